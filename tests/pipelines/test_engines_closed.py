"""Every stage that opens an engine closes it: at its end, after a failure, and on Ctrl-C. The engine is one of the
user's, in a folder outside the repository, with a real server process and a connection to it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from architectures import lookup_tasks, qwen
from faulty_shop import task
from own_classes import WARM
from test_engine_openai import Endpoint

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.engines.base import EngineError
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.star.rationalize import rationalize
from agentrl.pipelines.stages.evaluate import evaluate
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.trajectories import sample

TETHERED = '''
import asyncio
import subprocess
import sys
from pathlib import Path

from agentrl.engines.base import EngineError
from agentrl.engines.configs import EngineConfig
from agentrl.engines.transformers import TransformersEngine

SERVER = """
import socket, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        kept = server.accept()
"""


class Tethered(TransformersEngine):
    def __init__(self, policy, config):
        super().__init__(policy.model)
        self.version = policy.version
        self.left, self.log = config.turns, Path(config.log)
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        self.port = int(self.server.stdout.readline())
        self.opening = self.connection = None
        self.note(f"open {self.server.pid}")

    def note(self, what):
        with self.log.open("a") as file:
            file.write(what + "\\n")

    async def turn(self, *arguments, **settings):
        if self.opening is None:
            self.opening = asyncio.ensure_future(asyncio.open_connection("127.0.0.1", self.port))
            self.note("connected")
        _, self.connection = await self.opening
        self.left -= 1
        if self.left < 0:
            raise EngineError("it is out of order")
        return await super().turn(*arguments, **settings)

    async def close(self):
        if self.connection is not None:
            self.connection.close()
            await self.connection.wait_closed()
        self.server.kill()
        self.server.wait()
        self.server.stdout.close()
        await super().close()
        self.note(f"closed {self.server.pid}")


class TetheredConfig(EngineConfig):
    type: str
    log: str
    turns: int = 10**9

    def build(self, policy):
        return Tethered(policy, self)
'''

LIMITS = {"max_turn_tokens": 8, "max_tokens": 120}
STAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sample": (sample, {"samples": 2, "sampling": LIMITS, "shard_tasks": 3}),
    "rationalize": (rationalize, {"samples": 2, "sampling": LIMITS}),
    "evaluate": (evaluate, LIMITS),
    "online": (online, {"iterations": 2, "tasks": 2, "samples": 2, **LIMITS}),
}


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_tether.py").write_text(TETHERED)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_tether", None)


def held() -> tuple[set[int], set[Any]]:
    """Children of this process, and its TCP connections."""
    me = psutil.Process()
    connections = {
        (connection.laddr, connection.raddr)
        for connection in me.net_connections("tcp")
        if connection.status != "LISTEN"
    }
    return {child.pid for child in me.children(recursive=True)}, connections


@pytest.mark.parametrize("turns", [10**9, 7], ids=["to its end", "until it fails"])
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_closes_its_engine(outside: Path, name: str, turns: int) -> None:
    harness, (stage, config) = Harness(outside), STAGES[name]
    inputs: dict[str, Any] = {"model": harness.model(qwen().save), "tasks": harness.tasks(lookup_tasks(5))}
    if name == "rationalize":
        inputs["trajectories"] = []
    log = outside / "log"
    engine = {"type": "my_tether:TetheredConfig", "log": str(log), "turns": turns}
    before = held()
    if turns == 7:
        with pytest.raises(EngineError, match="out of order"):
            harness.run(stage, {**config, "engine": engine}, **inputs)
    else:
        harness.run(stage, {**config, "engine": engine}, **inputs)
    opened, connected, *closed = log.read_text().split("\n")
    assert connected == "connected", "one connection serves the whole stage"
    assert closed == [opened.replace("open", "closed"), ""]
    assert all(now <= then for now, then in zip(held(), before, strict=True)), (held(), before)


def test_a_stage_closes_its_connections_to_an_endpoint(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "key")
    server = Endpoint()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine = {"type": "openai", "model": "teacher", "base_url": server.url, "api_key": "${TEACHER_KEY}", "retries": 0}
    config = {"samples": 2, "sampling": {"max_turn_tokens": 50}, "engine": engine}
    harness = Harness(outside)
    tasks = harness.tasks([task("2 figs?", "faulty_shop:Shop", number) for number in range(3)])
    before = held()
    harness.run(sample, config, tasks=tasks)
    server.plan = ["", "", "", "", "refused"]
    with pytest.raises(EngineError, match="no such key"):
        harness.run(sample, config, tasks=tasks)
    ours = {remote for _, remote in held()[1] - before[1] if remote and remote.port == server.server_port}
    server.shutdown()
    server.server_close()
    assert not ours


PIPELINE = f"""
name: tethered
execution: {{env: {{OMP_NUM_THREADS: "1"}}}}
stages:
{WARM.replace("train: 4", "train: 64")}  sample:
    uses: trajectories.sample
    inputs: {{model: warm, tasks: tasks.train}}
    with: {{samples: 500, engine: {{type: "my_tether:TetheredConfig", log: LOG}}}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_closes_the_engine_of_a_run(outside: Path, number: signal.Signals) -> None:
    log = outside / "log"
    (outside / "tethered.yaml").write_text(PIPELINE.replace("LOG", str(log)))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "tethered.yaml", "--no-prefect", "--store", "store"]
    run = subprocess.Popen(command, cwd=outside, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ends = time.monotonic() + 240
    while not (log.exists() and "connected" in log.read_text()):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < ends
        time.sleep(0.1)
    time.sleep(1.0)
    run.send_signal(number)
    text, _ = run.communicate(timeout=60)
    assert run.returncode not in (0, None)
    opened, _, *closed = log.read_text().split("\n")
    assert closed == [opened.replace("open", "closed"), ""], text
    assert not psutil.pid_exists(int(opened.split()[1]))


TEACHER = """
name: teacher
execution: {env: {OMP_NUM_THREADS: "1"}}
stages:
  tasks: {uses: tasks.import, with: {paths: [tasks.jsonl], env: "my_shop:Shop"}}
  sample:
    uses: trajectories.sample
    inputs: {tasks: tasks}
    with:
      samples: 2
      shard_tasks: 4
      sampling: {max_turn_tokens: 50}
      limits: {processes: 2, in_flight: 8}
      engine: {type: openai, model: teacher, base_url: 'URL', api_key: "${TEACHER_KEY}"}
"""

SHOP = """
import subprocess

from agentrl.environments.tools import tool


class Visit:
    def __init__(self, task):
        self.helper = subprocess.Popen(["sleep", "1000"])

    @tool
    def price(self, item: str) -> int:
        return len(item)

    def score(self, answer):
        return answer == "done"

    def close(self):
        self.helper.kill()
        self.helper.wait()


class Shop:
    name, version = "shop", "1"

    def tasks(self, sizes, seed):
        return {}

    def episode(self, task):
        return Visit(task)
"""


@pytest.mark.slow
def test_ctrl_c_in_mid_batch_leaves_no_process_no_socket_and_no_half_row(outside: Path) -> None:
    server = Endpoint()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (outside / "teacher.yaml").write_text(TEACHER.replace("URL", server.url))
    (outside / "my_shop.py").write_text(SHOP)
    lines = [json.dumps({"prompt": f"{number} figs?", "ground_truth": '"done"'}) for number in range(40)]
    (outside / "tasks.jsonl").write_text("\n".join(lines))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TEACHER_KEY": "key"}
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "teacher.yaml", "--no-prefect", "--store", "store"]
    run = subprocess.Popen(command, cwd=outside, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ends = time.monotonic() + 120
    while len(server.requests) < 60:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < ends
        time.sleep(0.01)
    tree = psutil.Process(run.pid).children(recursive=True)
    assert sum(node.name() == "sleep" for node in tree) == 2
    run.send_signal(signal.SIGINT)
    text, _ = run.communicate(timeout=60)
    assert run.returncode not in (0, None), text
    assert [node for node in tree if node.is_running() and node.status() != psutil.STATUS_ZOMBIE] == []
    time.sleep(0.2)
    mine = [
        connection
        for connection in psutil.Process().net_connections("tcp")
        if connection.laddr.port == server.server_port
    ]
    assert {entry.status for entry in mine} <= {"LISTEN"}
    buffer = TrajectoryBuffer(outside / "store")
    kept = len(buffer.scan().select("trajectory_id").collect())
    assert kept % 8 == 0, "shards of 4 tasks, 2 samples each"
    assert kept < 80
    asked = len(server.requests)
    subprocess.run(command, cwd=outside, env=env, check=True, stdout=subprocess.DEVNULL, timeout=120)
    rows = buffer.scan().select("trajectory_id", "task_id", "success").collect()
    server.shutdown()
    server.server_close()
    assert (len(rows), rows["trajectory_id"].n_unique(), rows["success"].all()) == (80, 80, True)
    assert len(server.requests) - asked == 2 * (80 - kept), "what was appended is not sampled again"
