"""``agentrl serve``: the whole command, with a model, killed and started again, and what is refused before."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from test_generate import store_with_a_model

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return store_with_a_model(tmp_path_factory.mktemp("serve"))


class Serving:
    """The command, in a process of its own."""

    def __init__(self, folder: Path, store: str, *options: str) -> None:
        self.log = (folder / f"log-{time.monotonic()}").open("w+")
        command = [
            sys.executable,
            "-m",
            "agentrl.flows.cli",
            "serve",
            "--model",
            "warm",
            "--record",
            store,
            "--port",
            "0",
            "--json",
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, *options], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.events: list[dict[str, Any]] = []
        while not self.events or self.events[-1]["event"] != "serving":
            self.events.append(self._event())
        self.episodes = self.events[-1]["episodes"]

    def _event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            text += line
            if line == "}\n":
                return dict(json.loads(text))
        self.log.seek(0)
        raise AssertionError(self.log.read())

    def end(self, number: int) -> dict[str, Any] | None:
        self.process.send_signal(number)
        last = self._event() if number != signal.SIGKILL else None
        self.process.wait(30)
        return last


def ask(opened: dict[str, Any], messages: list[Any]) -> Any:
    client = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0)
    return (
        client.chat.completions.create(model=opened["model"], messages=messages, max_completion_tokens=8)
        .choices[0]
        .message
    )


@pytest.mark.slow
@pytest.mark.ci
def test_a_model_is_served_and_recorded_and_a_kill_loses_nothing(store: str, tmp_path: Path) -> None:
    first = Serving(tmp_path, store)
    opened = [httpx.post(first.episodes, json={"task_id": f"t{n}"}).json() for n in range(3)]
    begun: list[Any] = [{"role": "user", "content": "city of Ann?"}]
    for episode in opened:
        episode["messages"] = [
            *begun,
            ask(episode, begun).model_dump(exclude_none=True),
            {"role": "user", "content": "and Bob?"},
        ]
    url = opened[0]["base_url"].removesuffix("/v1") + "/reward"
    done = httpx.post(url, json={"reward": 1.0}, headers={"authorization": f"Bearer {opened[0]['api_key']}"})
    assert done.json()["rows"] == [opened[0]["id"]]
    first.end(signal.SIGKILL)

    second = Serving(tmp_path, store)
    assert second.events[0]["event"].endswith("2 episodes go on")
    for episode in opened[1:]:
        path = episode["base_url"].partition("/episodes")[2]
        episode["base_url"] = second.episodes + path
        ask(episode, episode["messages"])
    url = opened[1]["base_url"].removesuffix("/v1") + "/reward"
    assert httpx.post(url, json={"reward": 0.0}, headers={"authorization": f"Bearer {opened[1]['api_key']}"}).is_success
    assert second.end(signal.SIGTERM) == {"event": "stopped", "open": 1}

    buffer = TrajectoryBuffer(store)
    table = buffer.sql(
        "select trajectory_id, task_id, reward, n_steps from trajectories where source = 'recorded' order by task_id"
    )
    assert table.rows() == [(opened[0]["id"], "t0", 1.0, 1), (opened[1]["id"], "t1", 0.0, 2)]
    row = buffer.get(opened[1]["id"])
    assert (row.policy, row.episode_id, row.stage) == ("warm", opened[1]["id"], "recorded")
    assert row.policy_version == row.spans[0].version == 0
    shown = buffer.get_many([opened[1]["id"]])[0]
    assert all(value < 0.01 for value, own in zip(shown.logprobs, shown.action_mask, strict=True) if own)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "--host 0.0.0.0 is reached by others: set AGENTRL_API_KEY"),
        (["--fixed-temperature", "nan"], 2, "--fixed-temperature nan: allowed are 0 to 2"),
        (["--served-name", "x\udcff"], 2, r"--served-name 'x\udcff' cannot be a column of rows"),
        (["--history", "all"], 2, "--history all: allowed are keep, template"),
        (["--engine", "{type: openai, model: m}"], 2, "engine openai gives text"),
        (["--engine", "{type: transformers, schedule: exact}"], 2, "waits until every conversation goes on; use free"),
        (["--engine", "{type: vlm}"], 2, "there is no engine 'vlm'"),
        (["--engine", "{type: "], 2, "--engine is not YAML"),
        (["--model", "warn"], 2, "there is no artifact or tag 'warn'; did you mean 'warm'"),
        (["--context", "100000"], 2, "max_tokens 100000 is beyond the context"),
    ],
)
def test_what_cannot_be_served_is_said_first(
    options: list[str],
    code: int,
    message: str,
    store: str,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AGENTRL_API_KEY", raising=False)
    assert cli.call(["serve", "--model", "warm", "--record", store, "--port", "0", *options]) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert len([line for line in errors.splitlines() if "warning" not in line]) == 1


def test_an_address_in_use_is_said(store: str, capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.call(["serve", "--model", "warm", "--record", store, "--port", port]) == 1
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
