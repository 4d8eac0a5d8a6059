"""Ray as a launcher, on a local cluster of two nodes, which share this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_placement import FAMILY, SAYS, child_of, ended, is_gone

from agentrl.placement.base import LaunchError
from agentrl.placement.launcher import here, placed
from agentrl.schemas.pipeline import Execution

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with a processor and two GPUs each. There are no such GPUs: Ray counts
    them, and no more."""
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    size: dict[str, Any] = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    made.add_node(**size)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = made.address
    yield made.address
    made.shutdown()
    os.environ.pop("RAY_ADDRESS")
    if before:
        os.environ["RAY_ADDRESS"] = before


def test_commands_run_on_both_nodes_with_gpus_of_their_own(cluster: str, tmp_path: Path) -> None:
    with placed(Execution(launcher="ray", nodes=2, gpus=2, env={"WORD": "said"})):
        launcher = here()
        command = [sys.executable, "-c", SAYS, "{port}"]
        started = [launcher.start("server", command, log=tmp_path / f"log{n}", gpus=1) for n in range(4)]
        assert [ended(item) for item in started] == [0, 0, 0, 0]
        text = [(tmp_path / f"log{n}").read_text().split() for n in range(4)]
        assert sorted(device for _, device, _ in text) == ["0", "0", "1", "1"]
        assert {word for *_, word in text} == {"said"}
        for process, (port, *_) in zip(started, text, strict=True):
            assert process.address.rpartition(":")[2] == port.strip("[']")
        with pytest.raises(LaunchError, match="the server needs 1 GPUs of one machine, and 0 of 2, 0 of 2 are left"):
            launcher.start("server", ["true"], log=tmp_path / "more", gpus=1)


def test_a_cluster_that_is_too_small_is_refused_at_once(cluster: str) -> None:
    says = "needs 2 machines with 8 GPUs each, and the Ray cluster has machines with 2, 2"
    with placed(Execution(launcher="ray", nodes=2, gpus=8)), pytest.raises(LaunchError, match=says):
        here()


STAGE = """
import sys
from pathlib import Path
from agentrl.placement.launcher import here, placed
from agentrl.schemas.pipeline import Execution

with placed(Execution(launcher="ray", nodes=2)):
    here().start("server", [sys.executable, "-c", sys.argv[2]], log=Path(sys.argv[1]), node=1)
    print("started", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_stage_that_ends_or_is_killed_leaves_nothing_running(how: str, cluster: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STAGE, str(tmp_path / "log"), FAMILY]
    stage = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
    child = child_of(tmp_path / "log")
    leader = child.parent()
    assert leader is not None
    if how == "killed":
        stage.send_signal(signal.SIGKILL)
    assert stage.stdin is not None
    stage.stdin.close()
    stage.wait(60)
    assert is_gone(leader)
    assert how == "killed" or is_gone(child)
    if child.is_running():
        child.kill()


SPEC = """
name: spread
stages:
  tasks: {{uses: tasks.generate, with: {{env: lookup, train: 12, dev: 2, heldout: 2}}}}
  expert: {{uses: trajectories.synthesize, inputs: {{tasks: tasks.train}}, with: {{noise: 0.5}}}}
  alone:
    uses: train.sft
    inputs: {{trajectories: expert}}
    with: &training {{model: {{init: tiny}}, steps: 3, batch: 4, optimizer: {{lr: 5.0e-3}}}}
  spread:
    uses: train.sft
    inputs: {{trajectories: expert}}
    with: {{<<: *training, deepspeed: {{zero: 2}}}}
    execution: {{{execution}}}
"""


def assert_it_trains_alike(folder: Path, execution: str, *within: str) -> None:
    """Ranks on two machines have the losses of one process. ``within`` is a command that runs another one."""
    (folder / "spread.yaml").write_text(SPEC.format(execution=execution))
    command = [*within, sys.executable, "-m", "agentrl.flows.cli", "run", "spread.yaml", "--no-prefect", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600)
    logs = [path.read_text() for path in (folder / "store" / "logs").rglob("spread.log")]
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    stages = json.loads(done.stdout)["stages"]
    alone, spread = (
        [stages[name]["metrics"][item] for item in ("first_loss", "last_loss")] for name in ("alone", "spread")
    )
    assert spread == pytest.approx(alone, rel=1e-4)


def test_ranks_on_two_nodes_train_as_one_process(cluster: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    assert_it_trains_alike(tmp_path, f"launcher: ray, nodes: 2, env: {{RAY_ADDRESS: '{cluster}'}}")


def test_a_node_that_dies_ends_the_process_on_it(cluster: str, tmp_path: Path) -> None:
    """Here the actor on it dies, which is what a stage sees of a node."""
    with placed(Execution(launcher="ray", nodes=2)):
        process = here().start("server", [sys.executable, "-c", FAMILY], log=tmp_path / "log")
        leader = child_of(tmp_path / "log").parent()
        assert leader is not None
        actor = psutil.Process(leader.ppid())
        actor.kill()
        until = time.monotonic() + 60
        while process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert is_gone(leader)
        child = child_of(tmp_path / "log")
        child.kill()
