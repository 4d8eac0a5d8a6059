"""The rows of a step of ``train.offline``, made again from the stored rollouts that it learned from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import StoreError
from agentrl.pipelines.methods.echo.observed import observing, weighing
from agentrl.pipelines.parts.scores import under
from agentrl.pipelines.replay.compared import turned
from agentrl.pipelines.replay.recorded import RowsOfStep, StepRows, check_equal
from agentrl.pipelines.replay.settings import ReplayError, StepChange, check_needs
from agentrl.pipelines.run.execute import open_output
from agentrl.pipelines.stages.train import OfflineConfig, stored_credit, stored_rollouts
from agentrl.schemas.manifest import Manifest

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.training.rows import TrainingRows


class StoredRows:
    """All rows of the stage by its own settings, and by those of a ``change``, with the advantages of the groups that
    its inputs have. ``policy`` is the one that training starts from.

    Raises ReplayError if the change needs what is not stored, or the inputs are gone.
    """

    def __init__(
        self, catalog: Catalog, manifest: Manifest, own: OfflineConfig, change: StepChange, policy: "Policy"
    ) -> None:
        check_needs(own.algorithm, change.config.algorithm)
        self.catalog, self.manifest, self.policy = catalog, manifest, policy
        self._own = None if own.algorithm.needs_teacher else self._rows(own)[0]
        self._made, self.lr_scale = self._rows(change.config)

    def _rows(self, config: OfflineConfig) -> tuple[pa.Table, float]:
        """All rows by a config, and the guard's factor on the learning rate."""
        from agentrl.training.rows import write_rows

        with TemporaryDirectory(prefix="agentrl-replay-") as folder:
            try:
                given = under(self._input("trajectories"), self._input("scores"), config.scorer)
                chosen = stored_rollouts(config, given, self.policy)
                credit = stored_credit(config, chosen, self.policy, self._input("steps"), Path(folder), None)
                batches = credit.batches
                if observe := weighing(config.observe):
                    batches = observing(lambda _: None, chosen, self.policy, observe, batches, config.algorithm)
                path = write_rows(Path(folder, "rows.arrow"), batches)
            except (StoreError, LookupError, ValueError) as error:
                raise ReplayError(f"rows cannot be made from the stored rollouts: {error.args[0]}") from error
            with pa.memory_map(str(path)) as source:  # the table holds the map, which outlives its file
                return pa.ipc.open_file(source).read_all(), credit.lr_scale

    def _input(self, name: str) -> list[Any]:
        buffer = TrajectoryBuffer(self.catalog.storage.uri)
        records = self.manifest.ingredients.inputs.get(name, [])
        return [open_output(record, self.catalog, buffer) for record in records]

    def made(self, number: int, recorded: StepRows) -> RowsOfStep:
        """What the step trains on by the change, in the order of the ``recorded`` rows: of the same rollouts, those
        that have an advantage. Raises ReplayError if the stage's own settings do not give the recorded rows any
        more."""
        own = self._own
        if own is not None:
            check_equal(recorded, [_of(own, rows) for rows in recorded], number)
        rows = [_of(self._made, batch) for batch in recorded]
        before, after = _records(recorded), _records(rows)
        return RowsOfStep(
            [batch for batch in rows if len(batch)],
            1.0,
            _counts(recorded, before),
            _counts(rows, after),
            turned(before, after),
        )


def _of(made: pa.Table, recorded: "TrainingRows") -> "TrainingRows":
    """The rows of the rollouts of ``recorded`` in a table, in its order."""
    from agentrl.training.rows import TrainingRows

    places = pc.index_in(pa.array(recorded.ids()), made["row_id"].combine_chunks())
    return TrainingRows.of_table(made.take(places.drop_null()))


def _records(batches: StepRows) -> list[dict[str, Any]]:
    """What :func:`turned` compares: the mean weight of each rollout's trained tokens, which is its advantage times what
    its selection counts it."""
    records = []
    for rows in batches:
        (offsets, weights), (_, mask) = rows.lists("weights"), rows.lists("mask")
        for name, first, end in zip(rows.ids(), offsets[:-1], offsets[1:], strict=True):
            trained = mask[first:end].astype(bool)
            mean = float(np.mean(weights[first:end][trained])) if trained.any() else 0.0
            records.append({"trajectory_id": name, "advantage": mean, "trained": bool(trained.any())})
    return records


def _counts(batches: StepRows, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    tokens = sum(float(np.sum(rows.lists("mask")[1])) for rows in batches)
    return {"trained_rows": float(sum(row["trained"] for row in records)), "trained_tokens": tokens}
