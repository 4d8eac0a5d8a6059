"""What ranks, servers and machines are waited for, and how long."""

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.replicas import start_s, transfer_s
from agentrl.placement import on_ray
from agentrl.placement.launcher import placed
from agentrl.placement.on_ray import OnRay
from agentrl.schemas.pipeline import Execution, TimeLimits

ROOT = Path(__file__).parents[2]


def test_time_to_start_grows_with_the_weights_unless_it_is_set(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(141_000_000_000)  # 70 billion numbers of two bytes, in no block of the disk
    assert start_s(tmp_path) == pytest.approx(600 + 2820)
    assert start_s(tmp_path / "gone") == 600
    assert transfer_s(5_000_000_000) == pytest.approx(400)
    with placed(Execution(limits=TimeLimits(server_start_s=50, transfer_s=7))):
        assert (start_s(tmp_path), transfer_s(5_000_000_000)) == (50, 7)


class SilentRay(types.ModuleType):
    """Ray, as one process sees a node: it answers nothing, until Ray says that it is dead."""

    class RayError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayError=self.RayError)
        self.dead = False

    def wait(self, questions: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (questions, []) if self.dead else ([], questions)

    def get(self, question: Any) -> int:
        raise self.RayError("The actor died.\nits node 10.0.0.7 is marked dead")


def test_a_node_of_ray_that_is_silent_lives_until_ray_says_that_it_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = SilentRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    now = [0.0]
    monkeypatch.setattr(on_ray.time, "monotonic", lambda: now[0])
    asked = []
    starter = types.SimpleNamespace(poll=types.SimpleNamespace(remote=lambda: asked.append(1) or "question"))
    process = OnRay(starter, "10.0.0.7:1", "ranks", tmp_path / "log", lambda: None)
    assert process.poll() is None
    now[0] = 61.0
    with pytest.warns(UserWarning, match=r"ranks \(10.0.0.7:1\) has not answered for 60 s; it counts as alive"):
        assert process.poll() is None
    now[0] = 3600.0
    assert process.poll() is None
    assert asked == [1], "a question that is not answered is not asked again"
    ray.dead = True
    assert (process.poll(), process.poll()) == (1, 1)
    assert (
        "Ray gave up the machine of the ranks (10.0.0.7:1): its node 10.0.0.7 is marked dead"
        in (tmp_path / "log").read_text()
    )


STAGE = """
import sys, time
from pathlib import Path
from agentrl.placement.launcher import placed
from agentrl.schemas.pipeline import Execution, TimeLimits
from agentrl.training.job import DeepSpeed
from agentrl.training.launch import Ranks

with placed(Execution(limits=TimeLimits(heartbeat_s=5))):
    ranks = Ranks(DeepSpeed(processes=2), Path(sys.argv[1]))
    print("started", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_say_why_they_end_if_their_stage_is_gone_or_hangs(how: signal.Signals, tmp_path: Path) -> None:
    """A stage that is stopped stands for one whose machine is cut off: nothing tells its ranks that it is gone."""
    pytest.importorskip("deepspeed")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", STAGE, str(tmp_path)], stdout=subprocess.PIPE, env=env) as stage:
        try:
            assert stage.stdout is not None
            assert stage.stdout.readline() == b"started\n"
            time.sleep(20 if how is signal.SIGSTOP else 2)  # ranks import before they look
            stage.send_signal(how)
            [log] = tmp_path.glob("ranks-*.log")
            reason = {signal.SIGKILL: "the process that started this one is gone", signal.SIGSTOP: "no sign of life"}[
                how
            ]
            until = time.monotonic() + 60
            while reason not in log.read_text():
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            if how is signal.SIGSTOP:
                assert "ranks 0 to 1 on" in log.read_text()
        finally:
            stage.kill()
