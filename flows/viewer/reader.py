"""What all questions about one store share: its rows, artifacts and plans, and what was read of them before. Nothing
here writes."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from agentrl.datastore.annotations.labels import LabelSchema
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.tokenizers import TokenBytes
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import UnknownTrajectoryError
from agentrl.datastore.read.prefixes import sampled
from agentrl.datastore.table.writer import SCALARS
from agentrl.flows.viewer.processes import Commands
from agentrl.flows.viewer.query import among
from agentrl.flows.viewer.query.artifacts import Artifacts, numbers
from agentrl.flows.viewer.query.tables import Recent, Snapshot, Tables, both
from agentrl.flows.viewer.wire import Filtered, RefusedError

if TYPE_CHECKING:
    from agentrl.flows.viewer.pages.compare import PairedDifference
    from agentrl.flows.viewer.pages.training import Pulses, TrainingStage

TOKENS = ("input_ids", "action_mask", "logprobs", "spans")
CONTENT = (*SCALARS, "reward_components", "tags", "messages", "message_seconds", "tools", "final_state", *TOKENS)
"""The columns of a whole row."""


class StoreReader:
    """A store, as the viewer sees it."""

    def __init__(
        self,
        store: str,
        labels: LabelSchema = LabelSchema(),  # noqa: B008  (it is frozen)
        beside: "Mapping[str, Future[StoreReader]] | None" = None,
    ) -> None:
        """``beside`` are all stores that are shown beside each other, by their names, this one too."""
        self.store, self.labels = store, labels
        self._beside = {} if beside is None else beside  # it may be filled later
        self.catalog = Catalog(store)
        self.tables = Tables(TrajectoryBuffer(store))
        self.artifacts = Artifacts(self.catalog)
        self.compared: Recent[tuple[str, str, bool], PairedDifference] = Recent(16)
        self._rows: Recent[tuple[str, int], pa.Table] = Recent(2)
        self.tokenizers: Recent[tuple[str, str], TokenBytes] = Recent(8)
        self.plans, self.diagnoses = Commands(patience=60.0), Commands(patience=600.0)
        self.trained: Recent[str, TrainingStage] = Recent(256)
        self.pulses: Recent[None, Pulses] = Recent(1)

    def others(self) -> "dict[str, StoreReader]":
        """The other stores that can be read, by their names."""
        opened = {name: future.result() for name, future in self._beside.items() if future.exception() is None}
        return {name: reader for name, reader in opened.items() if reader is not self}

    def elsewhere(self, text: str) -> "tuple[StoreReader, str, str]":
        """The store of what ``text`` names, the beginning of the text that says so, and the rest: ``STORE:NAME`` is of
        another store, anything else of this one."""
        store, colon, name = text.partition(":")
        other = self.others().get(store) if colon else None
        return (other, f"{store}:", name) if other else (self, "", text)

    def sampled(self, row: pa.Table) -> np.ndarray:
        """Which tokens of a row it or its parents sampled; it alone, if the store does not have a parent."""
        try:
            mask = sampled(self.tables.buffer, row)
        except UnknownTrajectoryError:
            mask = row["action_mask"].combine_chunks()
        return numbers(mask[0], bool)

    def mask(self, question: Filtered, snapshot: Snapshot) -> np.ndarray | None:
        """The rows that a question is about; None if it is about all."""
        part = self.part(question, snapshot)
        return both(snapshot.matching(question.filter), part.mask if part else None)

    def snapshot_if_any(self, at: str | None) -> Snapshot | None:
        """The rows at a version; None if nothing was ever appended."""
        return None if self.tables.buffer.version is None else self.tables.at(at)

    def part(self, question: Filtered, snapshot: Snapshot) -> among.Subset | None:
        """The part of the buffer that a question is about; None if it is about all of it."""
        if question.among:
            return among.part(self.artifacts, snapshot, question.among, question.rule)
        if question.rule:
            raise RefusedError("a rule needs the artifact that has it", field="among")
        return None

    def read(self, ids: list[str], columns: tuple[str, ...], snapshot: Snapshot) -> pa.Table:
        """Rows at the snapshot's version. The newest is followed, which is faster than opening a version."""
        newest = snapshot.version == self.tables.buffer.version
        return self.tables.buffer.read(ids, columns, None if newest else snapshot.version)

    def row_of(self, trajectory_id: str, at: str | None) -> tuple[pa.Table, Snapshot]:
        """A whole row. A page asks for it three times: the others wait for the first that reads it."""
        snapshot = self.tables.at(at)

        def read() -> pa.Table:
            row = self.read([trajectory_id], CONTENT, snapshot)
            return row.take(np.array([0]))  # a copy, which does not hold the rows that were decoded with it

        try:
            return self._rows.get_or((trajectory_id, snapshot.version), read), snapshot
        except UnknownTrajectoryError as error:
            raise RefusedError(str(error), field="id", status=404) from None
