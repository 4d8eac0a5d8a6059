"""The models of online training on DeepSpeed ranks: what the process of the stage asks of them, and what each rank does
(``python -m agentrl.online.ranks``)."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.training.job import TrainingJob
from agentrl.training.launch import NoMemoryError, Ranks, heartbeat_s, main
from agentrl.training.orders import Orders, answer, arriving
from agentrl.training.rank import backend_of, begin, highest_peak, load_start

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.online.models import Models, Scores
    from agentrl.online.recorded import Recorded
    from agentrl.training.rows import TrainingRows

MODULE = "agentrl.online.ranks"
KEPT_WEIGHTS = 2
"""Folders of weights that stay: an engine may still read the one before the newest."""

ASKED, ANCHORED, SCORES, SEEN = "asked.parquet", "anchored.parquet", "scores.npz", "seen.parquet"
"""Names of the files of rows that go with an order, and of what is answered; they have the order's number too."""


class ModelsOnRanks:
    """See :class:`agentrl.online.models.Models`. This process holds none of the models: after each update the ranks
    write the weights as a folder, which ``policy`` names from then on, for engines to load.

    ``job`` says what is trained, ``folder`` is one that all ranks read, and ``batches`` the one in which iterations are
    recorded. Use it in ``with``, which ends the ranks. If a rank runs out of memory, all begin again at the last
    checkpoint with smaller micro batches, and take the updates since then again. Otherwise its methods raise
    TrainingError if the ranks fail.
    """

    def __init__(self, policy: "Policy", job: TrainingJob, folder: Path, batches: Path) -> None:
        self.policy, self.folder, self.batches = policy, folder.absolute(), batches.absolute()
        self.done = 0
        self.seen: pa.Table | None = None
        self._job = job
        self._saved: Path | None = None
        self._since: list[Path] = []
        self._behind = False
        self.folder.mkdir(exist_ok=True)
        shutil.rmtree(self.folder / "weights", ignore_errors=True)
        self._begin()

    def _begin(self) -> None:
        self._ranks = Ranks(self._job.deepspeed, self.folder, MODULE)
        self._orders = Orders(self.folder / "orders", self._alive, self._ranks.limits.heartbeat_s)
        job = self._job.model_copy(update={"orders": str(self._orders.folder)})
        self._ranks.begin(job.write(self.folder))

    def _alive(self) -> None:
        if self._ranks.said() is None:
            raise RuntimeError("the ranks ended before they answered")

    def __enter__(self) -> "ModelsOnRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._ranks.close()

    # -- what is asked

    def scores(self, rows: "TrainingRows") -> "Scores":
        from agentrl.training.rows import save_rows

        self._asked("scores", {ASKED: lambda path: save_rows(path, rows)})
        offsets = rows.lists("input_ids")[0]
        with np.load(self._orders.answered(SCORES)) as flat:
            return {name: np.split(flat[name], offsets[1:-1]) for name in flat.files}

    def anchored(self, parts: "Sequence[TrainingRows]") -> "list[TrainingRows]":
        from agentrl.online.recorded import parts_of
        from agentrl.training.rows import step_table

        table = step_table(0, list(enumerate(parts)))
        self._asked("anchored", {ASKED: lambda path: pq.write_table(table, path)})
        return [part for _, part in parts_of(pq.read_table(self._orders.answered(ANCHORED)))]

    def update(self, made: "Recorded") -> dict[str, float]:
        from agentrl.online.recorded import file_of, files_of
        from agentrl.training.batch import TrainingError
        from agentrl.training.rows import TrainingRows, step_table

        batch = file_of(self.batches, made.iteration)
        try:
            reply = self._asked("update", files=files_of(batch), batch=str(batch))
        except TrainingError as error:
            raise TrainingError(str(error), TrainingRows.of_table(step_table(0, made.parts))) from None
        self._since.append(batch)
        self.seen = pq.read_table(self._orders.answered(SEEN)) if reply["seen"] else None
        if made.parts:
            self._renew(self.policy.version + 1)
        metrics: dict[str, float] = reply["metrics"]
        return metrics

    def export(self, folder: Path) -> None:
        self._asked("export", path=str(folder.absolute()))

    def save(self, path: Path, progress: dict[str, Any]) -> None:
        self._asked("save", path=str(path.absolute()), progress=progress)
        self._saved, self._since = path, []

    def load(self, path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        progress: dict[str, Any] | None = self._asked("load", path=str(path.absolute()))["progress"]
        if progress is not None:
            self._saved, self._since = path, []
            self._renew(progress["version"])
        return progress

    def _renew(self, version: int) -> None:
        """Have the weights written that engines load."""
        folder = self.folder / "weights"
        self.policy.weights = folder / f"{version:06d}"
        self.export(self.policy.weights)
        for old in sorted(folder.iterdir())[:-KEPT_WEIGHTS]:
            shutil.rmtree(old)

    def _asked(
        self,
        do: str,
        beside: Mapping[str, Callable[[Path], object]] | None = None,
        files: Sequence[Path] = (),
        **about: Any,
    ) -> dict[str, Any]:
        """The answer to an order. ``beside`` writes the files of its own that go with it, by name."""
        from agentrl.training.batch import TrainingError

        while True:
            try:
                if self._behind:
                    self._catch_up()
                own = {self._orders.file(name): write for name, write in (beside or {}).items()}
                for path, write in own.items():
                    write(path)
                reply = self._orders.give(do, [*own, *files], **about)
                break
            except NoMemoryError as error:
                self._ranks.close()
                error.halve(self.folder / "job.json")
                self._job = TrainingJob.model_validate_json((self.folder / "job.json").read_text())
                self._begin()
                self._behind = True
        if "error" in reply:
            raise TrainingError(reply["error"])
        self.done = reply["done"]
        return reply

    def _catch_up(self) -> None:
        """Bring ranks that began again to where they were."""
        from agentrl.online.recorded import files_of

        if self._saved:
            self._orders.give("load", path=str(self._saved.absolute()))
        for batch in self._since:
            self._orders.give("update", files_of(batch), batch=str(batch))
        self._behind = False


# -- what each rank does


def run(job_file: Path) -> None:
    """Carry out orders until there are no more."""
    import torch.distributed as dist

    from agentrl.online.models import Models
    from agentrl.training.batch import TrainingError

    job = TrainingJob.model_validate_json(job_file.read_text())
    begin(job)
    assert job.orders is not None
    start = partial(load_start, job, job_file.parent)
    again = start if job.deepspeed.zero == 3 else None
    spread: Any = backend_of(job)
    about_steps = (job.steps, job.seed, job.updates)
    models = Models(start(), job.objective, job.optimizer, *about_steps, spread, again, job.record_tokens)  # type: ignore[arg-type]
    for path, order in arriving(Path(job.orders), heartbeat_s()):
        try:
            about = _carried_out(models, order, path)
        except TrainingError as error:
            about = {"error": str(error)}
        dist.barrier()  # else an order could be removed before all ranks have seen it
        if dist.get_rank() == 0:
            answer(path, {"done": models.done, **about}, _written(order, path))
    dist.destroy_process_group()


def _carried_out(models: "Models", order: dict[str, Any], path: Path) -> dict[str, Any]:
    """What is answered to an order in ``path``; files that go with it lie beside."""
    from agentrl.online.recorded import Recorded, parts_of
    from agentrl.training.rows import TrainingRows, step_table

    first = models.trainer.backend.rank == 0
    match order["do"]:
        case "scores":
            scores = models.scores(TrainingRows.of_table(pq.read_table(_beside(path, ASKED))))
            if first:
                flat = {name: np.concatenate(values) for name, values in scores.items()}
                np.savez(_beside(path, SCORES), **flat)  # type: ignore[arg-type]
        case "anchored":
            parts = models.anchored([part for _, part in parts_of(pq.read_table(_beside(path, ASKED)))])
            if first:
                pq.write_table(step_table(0, list(enumerate(parts))), _beside(path, ANCHORED))
        case "update":
            metrics = models.update(Recorded.read(Path(order["batch"])))
            if first and models.seen is not None:
                pq.write_table(models.seen, _beside(path, SEEN))
            peak = highest_peak(models.trainer.backend)
            return {"metrics": {**metrics, "peak_gib": peak}, "seen": models.seen is not None}
        case "export":
            models.export(Path(order["path"]))
        case "save":
            models.save(Path(order["path"]), order["progress"])
        case "load":
            return {"progress": models.load(Path(order["path"]))}
    return {}


def _beside(path: Path, name: str) -> Path:
    return path.with_suffix(f".{name}")


def _written(order: dict[str, Any], path: Path) -> list[Path]:
    """What the first rank wrote for an order, which the stage's process reads."""
    exported = [Path(order["path"])] if order["do"] == "export" else []
    return [file for name in (SCORES, ANCHORED, SEEN) if (file := _beside(path, name)).exists()] + exported


if __name__ == "__main__":
    main(run, ("agentrl.online.models",))
