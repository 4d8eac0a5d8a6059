"""Recorders that are killed for good: no row trains on a turn that no client has received. ``KILLS`` says how often
(default 4)."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from recording import RowsInMemory, numbered, policy_for_tests, sampled, served

from agentrl.models.policy import Policy

HERE = Path(__file__).parent
KILLS = int(os.environ.get("KILLS") or 4)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    command = [sys.executable, str(HERE / "recording_process.py"), str(folder), *arguments]
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield running, running.stdout.readline().strip()
        finally:
            running.kill()


def ask(client: httpx.Client, opened: dict[str, Any], messages: list[dict[str, str]], stream: bool) -> str:
    """The text of an answer that has arrived as a whole. Raises httpx.HTTPError or ValueError otherwise."""
    body = {"model": "tiny", "messages": messages, "stream": stream}
    head = {"authorization": f"Bearer {opened['api_key']}"}
    answer = client.post(f"{opened['base_url']}/chat/completions", json=body, headers=head)
    if not stream:
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])
    *events, done, _ = answer.raise_for_status().text.split("\n\n")
    if done != "data: [DONE]":
        raise ValueError("half a stream")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content") or "" for delta in deltas)


def talk(url: str, stream: bool, told: dict[str, list[str]]) -> None:
    """Episodes of four turns until the server is gone; ``told`` has what was received, by episode."""
    try:
        with httpx.Client(timeout=20) as client:
            while True:
                opened = client.post(f"{url}/episodes", json={"task_id": "t"}).json()
                messages = [{"role": "user", "content": "a"}]
                for _ in range(4):
                    text = ask(client, opened, messages, stream)
                    told[opened["id"]].append(text)
                    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    except (httpx.HTTPError, ValueError):
        pass


def trained(policy: Policy, folder: Path) -> dict[str, list[str]]:
    """What rows train on, by episode, after the next server has taken over and closed everything."""
    store = RowsInMemory()
    with served(folder, policy, numbered(), store) as server:
        episodes = server.recorder.episodes
        server.on_loop(lambda: [episodes.close(episode, None, "test") for episode in list(episodes.opened.values())])
        rows = server.flush()
    result = defaultdict(list)
    for row in rows:
        result[row.episode_id] += [text.removesuffix("<|im_end|>") for text in sampled(policy, row)]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_whose_answer_was_lost_is_not_trained_on(stream: bool, policy: Policy, tmp_path: Path) -> None:
    told: dict[str, list[str]] = defaultdict(list)
    with process(tmp_path, "3") as (running, url):
        talk(url, stream, told)
        assert running.wait(60) == -signal.SIGKILL
    [(name, received)] = told.items()
    assert received == ["answer 0", "answer 1"]
    [path] = tmp_path.glob("*/*.jsonl")
    assert b"answer 2" in path.read_bytes(), "it was written"
    assert trained(policy, tmp_path) == {name: received}


@pytest.mark.slow
def test_no_row_trains_on_a_turn_that_nobody_received_whenever_the_server_is_killed(
    policy: Policy, tmp_path: Path
) -> None:
    episodes = lost = 0
    for number in range(KILLS):
        folder = tmp_path / str(number)
        told: dict[str, list[str]] = defaultdict(list)
        with process(folder) as (running, url):
            clients = [threading.Thread(target=talk, args=(url, bool(number % 2), told)) for number in range(24)]
            for client in clients:
                client.start()
            ends = time.monotonic() + 60
            while sum(map(len, list(told.values()))) < 100 and time.monotonic() < ends:
                time.sleep(0.05)
            time.sleep(random.random() / 5)
            running.kill()
            for client in clients:
                client.join(30)
        result = trained(policy, folder)
        assert len(result) >= 24
        for name, texts in result.items():
            assert set(texts) <= set(told[name]), f"{name} trains on what nobody received"
        episodes += len(result)
        lost += sum(len(set(received) - set(result.get(name, ()))) for name, received in told.items())
    assert lost <= episodes / 20, "next to no turn that was received is lost"
