"""``agentrl serve`` is killed at random moments while agents are at work, and started again: each token whose answer an
agent received is trained on in exactly one row, and no other token is. Only the last answer of a conversation may be
missing, if the kill came between its receipt and the line that notes it: no later request shows that it was received.

``KILLS`` kills (default 3), ``AGENTS`` agents at once (default 6), ``SEED`` draws the moments.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.schemas.trajectory import Message, Role, Trajectory

KILLS = int(os.environ.get("KILLS") or 3)
AGENTS = int(os.environ.get("AGENTS") or 6)
SEED = int(os.environ.get("SEED") or random.randrange(10**6))
TURNS = 6
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa"
STARTS_S = 180.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def serving(model: Path, store: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """``agentrl serve`` that answers. What it leaves at its end is killed."""
    command = [sys.executable, "-m", "agentrl.flows.cli", "serve", "--model", str(model), "--record", str(store)]
    command += ["--port", str(port), "--served-name", "tiny", "--max-turn-tokens", "6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        try:
            ends = time.monotonic() + STARTS_S
            while not answers(port):
                if running.poll() is not None or time.monotonic() > ends:
                    running.send_signal(signal.SIGABRT)  # it says where it stands
                    assert running.stderr is not None
                    raise AssertionError(f"the server did not start: {running.stderr.read().decode()[-4000:]}")
                time.sleep(0.5)
            yield running
        finally:
            running.kill()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


class Agent(threading.Thread):
    """Holds one conversation after another. A request whose answer does not come as a whole is sent again, to the next
    server too; ``received`` has the texts of the answers that came, by episode."""

    def __init__(self, port: int, stream: bool, ended: threading.Event) -> None:
        super().__init__(daemon=True)
        self.url, self.stream, self.ended = f"http://127.0.0.1:{port}", stream, ended
        self.received: dict[str, list[str]] = {}
        self.asked_again = 0

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self.ended.is_set():
                self.converse(client)

    def converse(self, client: httpx.Client) -> None:
        opened = self.until(lambda: client.post(f"{self.url}/episodes", json={"task_id": "t"}))
        texts = self.received[opened["id"]] = []
        messages = [{"role": "user", "content": WORDS}]
        while len(texts) < TURNS:
            texts.append(self.until(lambda: self.asked(client, opened, messages), parsed=False))
            messages.extend([{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "go on"}])
        reward = f"{self.url}/episodes/{opened['id']}/reward"
        self.until(lambda: client.post(reward, json={"reward": 1.0}))

    def asked(self, client: httpx.Client, opened: dict[str, Any], messages: list[dict[str, str]]) -> Any:
        body = {"model": "tiny", "messages": messages, "stream": self.stream}
        head = {"authorization": f"Bearer {opened['api_key']}"}
        answer = client.post(f"{opened['base_url']}/chat/completions", json=body, headers=head).raise_for_status()
        if not self.stream:
            return str(answer.json()["choices"][0]["message"]["content"])
        *events, done, _ = answer.text.split("\n\n")
        if done != "data: [DONE]":
            raise ValueError("half a stream")
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
        return "".join(delta.get("content") or "" for delta in deltas)

    def until(self, request: Any, parsed: bool = True) -> Any:
        """What a request is answered, however often it has to be sent. A reward that was given counts as answered."""
        while True:
            try:
                answer = request()
                if not parsed:
                    return answer
                if answer.status_code == 409:  # it was given before the kill
                    return {}
                return answer.raise_for_status().json()
            except (httpx.TransportError, ValueError):
                self.asked_again += 1
                time.sleep(0.5)


def trained(row: Trajectory) -> list[str]:
    """The texts of the turns that a row trains on."""
    return [
        message.content
        for message in row.messages
        if message.role is Role.ASSISTANT
        and message.token_end
        and all(row.action_mask[message.token_start or 0 : message.token_end])
    ]


@pytest.mark.faults
def test_each_token_that_was_received_is_in_exactly_one_row_whenever_the_server_is_killed(tmp_path: Path) -> None:
    moments = random.Random(SEED)
    policy = tiny_policy([[Message(role=Role.USER, content=WORDS)]], seed=0, size=TinySize(context=512))
    model, store, port = tmp_path / "model", tmp_path / "store", free_port()
    model.mkdir()
    policy.save(model)
    ended = threading.Event()
    agents = [Agent(port, bool(number % 2), ended) for number in range(AGENTS)]
    for number in range(KILLS):
        with serving(model, store, port) as running:
            for agent in agents if number == 0 else []:
                agent.start()
            time.sleep(moments.uniform(0.0, 3.0))
            os.kill(running.pid, signal.SIGKILL)
    ended.set()
    with serving(model, store, port) as running:
        for agent in agents:
            agent.join(120)
            assert not agent.is_alive(), "an agent waits for ever"
        running.send_signal(signal.SIGINT)
        running.wait(120)
    received = {name: texts for agent in agents for name, texts in agent.received.items()}
    buffer = TrajectoryBuffer(store)
    ids = buffer.scan().select("trajectory_id").collect()["trajectory_id"].to_list()
    rows: dict[str, list[Trajectory]] = defaultdict(list)
    for row in buffer.get_many(ids):
        rows[row.episode_id].append(row)
    wrong, unnoted = [], 0
    for name, texts in received.items():
        result = Counter(text for row in rows.get(name, []) for text in trained(row))
        tags = [tag for row in rows.get(name, []) for tag in row.tags]
        if result == Counter(texts[:-1]) and "undelivered:1" in tags:
            unnoted += 1
        elif result != Counter(texts):
            wrong.append((name, texts, dict(result), [row.tags for row in rows.get(name, [])]))
    turns = sum(map(len, received.values()))
    again = sum(agent.asked_again for agent in agents)
    print(f"seed {SEED}: {KILLS} kills, {len(received)} episodes, {turns} turns received, {again} requests sent again")
    print(f"{unnoted} last answers were received and not noted")
    assert not wrong, (SEED, wrong[:3])
    assert unnoted <= KILLS
    assert sum(row.n_action_tokens > 0 for each in rows.values() for row in each) >= len(received)
    assert set(rows) <= set(received), "no episode that nobody knows of"
