"""An online stage that is killed at random moments, and begins again each time.

    python online_crash.py FOLDER KILLS SEED CONFIG

runs the stage once undisturbed in FOLDER/calm, and in FOLDER/storm-0, storm-1, ... until KILLS kills were made. Each
run is a process forked from this one, which has imported what they need, so that it begins within milliseconds. Prints,
as JSON, how many kills each stormy run took.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers.models.qwen2.modeling_qwen2  # noqa: F401  (so that no run waits for it)

import agentrl.pipelines.stages.train as train
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.online.loop import OnlineLoop  # noqa: F401
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.online_log import OnlineLog
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.trajectories import synthesize

LIMITS = {"max_turn_tokens": 24, "max_tokens": 120}


def inputs(folder: Path) -> None:
    """Tasks, and a model that has learnt two ways to act in each of them."""
    harness = Harness(folder)
    tasks = harness.run(generate, {"env": "lookup", "train": 6, "dev": 1, "heldout": 1})["train"]
    shown = [harness.run(synthesize, {"noise": noise}, tasks=tasks)["trajectories"] for noise in (0.0, 1.0)]
    config = {"model": {"init": "tiny"}, "steps": 40, "batch": 6, "optimizer": {"lr": 5e-3, "warmup": 10}}
    model = harness.run(train.sft, config, trajectories=shown)["model"]
    shutil.copytree(model.path, folder / "model")
    shutil.copyfile(tasks.path, folder / "tasks.parquet")


def run(given: Path, folder: Path, config: dict[str, Any]) -> None:
    """The stage with its store in ``folder``. It goes on from what an earlier run left there."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    for name in ("out", "scratch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    buffer = TrajectoryBuffer(folder / "store")
    context = Context("online", "ab" * 16, "test", 0, buffer, folder / "out", folder / "scratch")
    names = {"stage": "given", "fingerprint": "cd" * 16}
    model = Model(given / "model", output="model", **names)
    tasks = Tasks(given / "tasks.parquet", output="train", **names)
    note_rows(folder / "made.txt")
    online(context, online.config.model_validate({**config, **LIMITS}), model=model, tasks=tasks)


def note_rows(path: Path) -> None:
    """Write down the name of each row that is finished, after it was kept."""
    keep = OnlineLog.keep

    def noted(self: OnlineLog, rows: Any) -> None:
        keep(self, rows)
        with path.open("a") as file:
            file.writelines(f"{row.trajectory_id}\n" for row in rows)

    OnlineLog.keep = noted  # type: ignore[method-assign]


def forked(work: Callable[[], None]) -> int:
    """The process id of a fork that does some work."""
    if child := os.fork():
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int, within: float | None = None) -> bool:
    """Whether a process came to its end ``within`` seconds. Otherwise it is killed."""
    over = None if within is None else time.monotonic() + within
    while True:
        done, status = os.waitpid(child, os.WNOHANG if over else 0)
        if done:
            if os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status):
                sys.exit(f"a run failed: {status}")
            return True
        if over and time.monotonic() > over:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.001)


def main() -> None:
    folder, kills, seed, config = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    ended(forked(lambda: inputs(folder)))
    start = time.monotonic()
    ended(forked(lambda: run(folder, folder / "calm", config)))
    takes = time.monotonic() - start
    moments, made = random.Random(seed), []
    while sum(made) < kills:
        storm = folder / f"storm-{len(made)}"
        made.append(0)
        while not ended(forked(lambda storm=storm: run(folder, storm, config)), moments.uniform(0, 0.7 * takes)):  # type: ignore[misc]
            made[-1] += 1
            if sum(made) == kills:
                ended(forked(lambda storm=storm: run(folder, storm, config)))  # type: ignore[misc]
                break
    print(json.dumps(made))


if __name__ == "__main__":
    main()
