"""What an online stage keeps while it runs: states from which a run of more iterations goes on, and the policy that did
best on the tasks of ``dev``."""

import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from agentrl.datastore.storage.object_store import sync_tree
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Folder, Model
from agentrl.pipelines.stage import Context, Earlier, StageConfig
from agentrl.rollouts.segments import episode_of, firsts

if TYPE_CHECKING:
    from agentrl.online.learner import OnlineState
    from agentrl.online.loop import OnlineLoop
    from agentrl.schemas.task import Task

DEV = 1_000_000_000
"""Shards and rollouts from this number on are those on the tasks of ``dev``."""


BATCHES = "batches"
"""The folder in which iterations are recorded."""


class Checkpoints(StageConfig):
    """Which states and which policy are kept. A state is about three times as large as the model."""

    last: int = Field(1, ge=0, description="states kept, the newest: a run of more iterations goes on from one of them")
    every: int = Field(5, ge=1, description="iterations between two states, and between two looks at dev")
    keep: Literal["last", "best"] = Field("last", description="which policy is the output; best: on the input dev")


class Beginning(NamedTuple):
    """``state`` at the beginning, and ``ids`` of the rollouts that an earlier run made before it."""

    state: "OnlineState"
    ids: list[str]


class Keeper:
    """Keeps states and policies in the stage's scratch folder while it runs, and in its outputs at the end."""

    def __init__(self, context: Context, config: Checkpoints, loop: "OnlineLoop", dev: "Sequence[Task]") -> None:
        if config.keep == "best" and not dev:
            raise ValueError("checkpoints.keep: best needs tasks to judge by: wire inputs.dev, such as tasks.dev")
        self.context, self.config, self.loop, self.dev = context, config, loop, dev
        self.learner = loop.learner
        self.resume = context.scratch / "checkpoint.pt"
        self.batches = context.scratch / BATCHES
        self.states = context.scratch / "states"
        self.earlier = context.scratch / "earlier.json"
        for folder in (self.batches, self.states):
            folder.mkdir(exist_ok=True)

    # the beginning

    def begin(self, schedule: str) -> Beginning:
        """Where to begin: at the checkpoint of a killed run, at a state of an earlier run that differs in its number of
        iterations alone, or at the start."""
        state = self.loop.restore(self.resume)
        if not self.loop.iteration and not self.context.row_ids():  # else a killed run began at the start
            self.earlier.unlink(missing_ok=True)
            for folder in (self.batches, self.states):
                shutil.rmtree(folder)
                folder.mkdir()
            state = self._continue(schedule) or state
        ids = json.loads(self.earlier.read_text()) if self.earlier.exists() else []
        return Beginning(state, ids)

    def _continue(self, schedule: str) -> "OnlineState | None":
        candidates = [
            (int(path.stem), source, path)
            for source in self.context.unlike_in("iterations")
            for path in source.open("checkpoints").path.glob("*.pt")
            if int(path.stem) <= self.loop.tickets.batches and self._has_best(source, int(path.stem))
        ]
        if not candidates:
            return None
        at, earlier, path = max(candidates, key=lambda each: each[0])
        differs = f"{earlier.name}, which differs in its {earlier.value} iterations alone"
        depends = f"schedule: {schedule} depends on their number" if schedule != "constant" else ""
        if self.loop.replay and self.loop.replay.config.own:
            depends = "rollouts of the earlier run have other names, so they could not be replayed as this run's own"
        if self.loop.tickets.overlaps:
            depends = "which rollouts are under way depends on their number"
        if depends:
            warnings.warn(
                f"does not go on from {differs}: {depends}, so all {self.loop.tickets.batches} are made anew",
                stacklevel=3,
            )
            return None
        copied = self.context.scratch / "continued.pt"
        _copy(path, copied)
        state = self._take_over(earlier, at, self.loop.restore(copied))
        self.loop.save(self.resume, state)
        _remove(copied)
        self.context.metrics["continued_from"] = f"{earlier.name} at iteration {at}"
        warnings.warn(f"goes on from iteration {at} of {differs}; tasks are drawn in the same order", stacklevel=3)
        return state

    def _has_best(self, earlier: Earlier, at: int) -> bool:
        """Whether the best policy up to an iteration is the one that the earlier run put out."""
        if self.config.keep == "last":
            return True
        best = _best(earlier.open("metrics").table().to_pylist())
        return best is not None and best < at

    def _take_over(self, earlier: Earlier, at: int, state: "OnlineState") -> "OnlineState":
        """The state with the records of an earlier run up to an iteration, and its batches, rollouts and best policy in
        the scratch folder."""
        table = earlier.open("batches").table()
        pq.write_table(table.filter(pc.less(table["iteration"], at)), self.batches / "000000.parquet")
        made = self.loop.tickets.next * self.loop.per_ticket
        ids = [name for name in earlier.open("trajectories").ids() if number_of(name) < made]
        self.earlier.write_text(json.dumps(ids))
        if self.config.keep == "best":
            folder = self._folder(_best(state.metrics))
            shutil.copytree(earlier.open("model").path, folder, dirs_exist_ok=True)
        for path in sorted(earlier.open("checkpoints").path.glob("*.pt")):
            if int(path.stem) <= at and self._is_kept(int(path.stem)):
                _copy(path, self.states / path.name)
        steps, tickets = earlier.open("steps").table(), earlier.open("coverage").table()
        return replace(
            state,
            steps=steps.filter(pc.less(steps["step"], at)).to_pylist(),
            tickets=tickets.filter(pc.less(tickets["batch"], at)).to_pylist(),
        )

    # meanwhile

    def after(self, state: "OnlineState") -> None:
        """Look at dev, and keep the state, after an iteration whose metrics are the last of ``state``."""
        done = self.loop.iteration
        if self.dev and self._is_kept(done):
            state.metrics[-1]["dev_success"] = self._judge(done)
            if _best(state.metrics) == done - 1:
                self._save_model(self._folder(done - 1))
        if self.config.last and self._is_kept(done):
            # without the ids of rollouts, which differ from run to run; they are in the table of steps
            self.loop.save(self.states / f"{done:06d}.pt", replace(state, steps=[], tickets=[]))
            for old in sorted(self.states.glob("*.pt"))[: -self.config.last]:
                _remove(old)
            for old in self.states.glob("*.previous"):
                _remove(old)

    def _is_kept(self, done: int) -> bool:
        """Whether the state after so many iterations is one to keep."""
        return done % self.config.every == 0 or done == self.loop.tickets.batches

    def _judge(self, done: int) -> float:
        """Success of one rollout of each dev task at temperature 1. The rollouts go into the buffer, tagged ``dev``."""
        from agentrl.rollouts.runner import tickets

        attempts = tickets(self.dev, 1, self.context.trajectory_id, DEV + done * len(self.dev))
        rows = list(self.context.stored(DEV + done, attempts).values())
        if not rows:
            seed = stream(self.learner.seed, "dev", done)
            made = self.loop.runner.run(list(attempts.values()), seed, list(attempts))
            rows = [row.model_copy(update={"tags": [*row.tags, "dev"]}) for row in made]
            self.context.append(rows, shard=DEV + done)
        scored = [row.scored_success() for row in firsts(rows) if row.success is not None]
        if not scored:
            raise ValueError(
                f"no rollout of {len(rows)} on dev could be scored: {rows[0].tags}; look at the environment"
            )
        return sum(scored) / len(scored)

    def _folder(self, iteration: int | None) -> Path:
        return self.context.scratch / f"policy-{iteration}"

    def _save_model(self, folder: Path) -> None:
        self.learner.models.export(folder)
        sync_tree(folder)

    def checkpoint(self, state: "OnlineState") -> None:
        """Write what a run that is killed goes on from, and forget policies that are no longer the best."""
        sync_tree(self.batches)  # a checkpoint says that the batches before it are there
        self.loop.save(self.resume, state)
        for folder in self.context.scratch.glob("policy-*"):
            if folder != self._folder(_best(state.metrics)):
                shutil.rmtree(folder)

    # the end

    def ids(self, before: Sequence[str]) -> list[str]:
        """Rollouts of the whole run without those on dev, in the order in which they were made."""
        own = [name for name in self.context.row_ids() if number_of(name) < DEV]
        return [*before, *own]

    def model(self, state: "OnlineState") -> Model:
        """The policy that the stage puts out. The metrics say of which iteration it is, if that was judged."""
        best = _best(state.metrics)
        if best is not None:
            self.context.metrics["best_iteration"] = best
            self.context.metrics["best_dev_success"] = state.metrics[best]["dev_success"]
        if self.config.keep == "best":
            folder = self._folder(best)
            return self.context.model(lambda path: shutil.copytree(folder, path, dirs_exist_ok=True))
        return self.context.model(self.learner.models.export)

    def folder(self) -> Folder:
        """The states that are kept, and a list of their iterations."""

        def write(path: Path) -> None:
            for state in self.states.glob("*.pt"):  # a kill can leave part of another one
                _copy(state, path / state.name)
            (path / "iterations.json").write_text(
                json.dumps(sorted(int(checkpoint.stem) for checkpoint in path.glob("*.pt")))
            )

        return self.context.files(write, "checkpoints")


def _copy(state: Path, to: Path) -> None:
    """Copy a state, which is a file, or a folder if it is that of ranks."""
    if state.is_dir():
        shutil.copytree(state, to, dirs_exist_ok=True)
    else:
        shutil.copyfile(state, to)


def _remove(state: Path) -> None:
    if state.is_dir():
        shutil.rmtree(state)
    else:
        state.unlink()


def number_of(trajectory_id: str) -> int:
    """The number of an episode, at the end of the id of each of its rows."""
    return int(episode_of(trajectory_id).rpartition("-")[2])


def _best(metrics: Sequence[dict[str, Any]]) -> int | None:
    """The first iteration with the highest success on dev; None if none was judged."""
    judged = [(row["dev_success"], -index) for index, row in enumerate(metrics) if row.get("dev_success") is not None]
    return -max(judged)[1] if judged else None
