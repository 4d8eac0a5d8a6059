"""Stages whose context is compressed, which kill themselves at chosen moments of episodes of several rows, and begin
again each time.

    python segments_crash.py FOLDER CONFIG

runs each way of ``WAYS`` once undisturbed in FOLDER/WAY/calm, and once for each moment in FOLDER/WAY/MOMENT, with a
kill for each number of ``MOMENTS``: when the moment comes for that time. CONFIG is that of `train.online`. Prints, as
JSON, the rows that the buffer had after each kill: way -> moment -> for each kill, the names of rows.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from online_crash import LIMITS, ended, forked, inputs, run

import agentrl.pipelines.stages.online_log as online_log
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import NoBufferError
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.trajectories import sample
from agentrl.rollouts.episodes import EpisodeRun

FREE = {"ahead": 1, "max_staleness": 2, "engine": {"type": "transformers", "schedule": "free"}}


class Fuse:
    """Kills this process when it was lit so many times."""

    def __init__(self, number: int) -> None:
        self.left = number

    def light(self) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def compressed(fuse: Fuse) -> None:
    """An episode has a second segment, or a further one, and goes on."""
    compress = EpisodeRun._compressed

    async def then(self: EpisodeRun, *given: Any) -> bool:
        goes_on = await compress(self, *given)
        if goes_on:
            fuse.light()
        return goes_on

    EpisodeRun._compressed = then  # type: ignore[method-assign]


def keeping(fuse: Fuse) -> None:
    """The rows of an episode with several are in a file, which has not its name yet."""
    keep = online_log.OnlineLog.keep

    class Replacing:
        @staticmethod
        def replace(*paths: Path) -> None:
            fuse.light()
            os.replace(*paths)

    def noted(self: online_log.OnlineLog, rows: Sequence[Any]) -> None:
        online_log.os = Replacing if len(rows) > 1 else os  # type: ignore[assignment]
        keep(self, rows)

    online_log.OnlineLog.keep = noted  # type: ignore[method-assign]


def appending(fuse: Fuse) -> None:
    """Rows go to the buffer, and half of them were read."""
    _while_appending(fuse, before=True)


def appended(fuse: Fuse) -> None:
    """Rows are in the buffer, and nothing else is done about it."""
    _while_appending(fuse, before=False)


def _while_appending(fuse: Fuse, before: bool) -> None:
    append = Context.append

    def then(self: Context, rows: Sequence[Any], shard: int = 0, **more: Any) -> int:
        later = [number for number, row in enumerate(rows) if row.segment]

        def read() -> Any:
            for number, row in enumerate(rows):
                if before and number == later[len(later) // 2]:
                    fuse.light()
                yield row

        done = append(self, read() if later else rows, shard, **more)
        if later and not before:
            fuse.light()
        return done

    Context.append = then  # type: ignore[method-assign]


def sampled(given: Path, folder: Path, config: dict[str, Any]) -> None:
    """`trajectories.sample` with its store in ``folder``, two tasks a shard."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    for name in ("out", "scratch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    buffer = TrajectoryBuffer(folder / "store")
    context = Context("sample", "ab" * 16, "test", 0, buffer, folder / "out", folder / "scratch")
    names = {"stage": "given", "fingerprint": "cd" * 16}
    asked = {"samples": 4, "shard_tasks": 2, "sampling": {**LIMITS, "compress": config["compress"]}}
    sample(
        context,
        sample.config.model_validate(asked),
        tasks=Tasks(given / "tasks.parquet", output="train", **names),
        model=Model(given / "model", output="model", **names),
    )


MOMENTS = {compressed: (15, 6), keeping: (5, 9), appending: (2, 1), appended: (1, 1)}
WAYS: dict[str, tuple[Callable[..., None], dict[str, Any], list[Callable[[Fuse], None]]]] = {
    "sample": (sampled, {}, [compressed, appending, appended]),
    "online": (run, {}, [compressed, appending, appended]),
    "free": (run, FREE, [compressed, keeping, appending, appended]),
}


def names_in(folder: Path) -> list[str]:
    """The rows of a store, if there is one. A process of its own reads them: one with Polars' threads cannot fork."""

    def read() -> None:
        names: list[str] = []
        with suppress(NoBufferError):  # nothing was appended
            names = TrajectoryBuffer(folder / "store").scan().collect()["trajectory_id"].to_list()
        (folder / "names.json").write_text(json.dumps(names))

    ended(forked(read))
    return list(json.loads((folder / "names.json").read_text()))


def killed(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        sys.exit(f"a run was to be killed and ended by {status}")


def main() -> None:
    given, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    ended(forked(lambda: inputs(given)))
    left: dict[str, dict[str, list[list[str]]]] = {}
    for way, (stage, more, moments) in WAYS.items():

        def play(folder: Path, stage: Any = stage, more: dict[str, Any] = more) -> None:
            stage(given, folder, {**config, **more})

        ended(forked(lambda way=way, play=play: play(given / way / "calm")))  # type: ignore[misc]
        left[way] = {}
        for moment in moments:
            folder, result = given / way / moment.__name__, list[list[str]]()
            for number in MOMENTS[moment]:

                def die(moment: Any = moment, number: int = number, folder: Path = folder, play: Any = play) -> None:
                    moment(Fuse(number))
                    play(folder)

                killed(forked(die))
                result.append(names_in(folder))
            ended(forked(lambda folder=folder, play=play: play(folder)))  # type: ignore[misc]
            left[way][moment.__name__] = result
    print(json.dumps(left))


if __name__ == "__main__":
    main()
