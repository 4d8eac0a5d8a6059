"""Trajectories to test the store with, and a real S3 server on loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from schemas.trajectory import Message, RewardComponent, Termination, ToolCall, Trajectory, trajectory_id

Make = Callable[..., Trajectory]


FP = "0123456789abcdef"


def build(number: int = 0, stage: str = "rollout", fingerprint: str = FP, **fields: object) -> Trajectory:
    """One consistent trajectory of two steps: a tool call with its observation, and an answer."""
    messages = [
        Message(role="user", content=f"boss of Ann {number}?", token_start=0, token_end=4),
        Message(
            role="assistant",
            reasoning="look it up",
            tool_calls=[ToolCall(id="c1", name="find", arguments='{"who": "Ann", "rel": "boss"}')],
            token_start=4,
            token_end=8,
        ),
        Message(role="tool", content=f"Bob {number}", tool_call_id="c1", name="find", token_start=8, token_end=10),
        Message(role="assistant", content=f"Bob {number}", token_start=10, token_end=12),
    ]
    mask = [False] * 4 + [True] * 4 + [False] * 2 + [True] * 2
    values: dict[str, object] = {
        "trajectory_id": trajectory_id(stage, fingerprint, number),
        "episode_id": f"e{number}",
        "task_id": f"t{number // 4}",
        "sample_index": number % 4,
        "source": "model",
        "env": "lookup",
        "split": "train",
        "level": number % 3,
        "prompt": f"boss of Ann {number}?",
        "reward": float(number % 2),
        "success": bool(number % 2),
        "termination": Termination.ANSWERED,
        "reward_components": [RewardComponent(name="exact", value=float(number % 2))],
        "tags": ["test"],
        "n_steps": 2,
        "n_tokens": 12,
        "n_action_tokens": 6,
        "n_tool_calls": 1,
        "messages": messages,
        "tools": '[{"type": "function", "function": {"name": "find"}}]',
        "tokenizer": "tok",
        "input_ids": [number % 100 + i for i in range(12)],
        "action_mask": mask,
        "logprobs": [-0.5 if action else float("nan") for action in mask],
    }
    return Trajectory.model_validate(values | fields)


@pytest.fixture
def make() -> Make:
    return build


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A moto server on loopback, in a process of its own: native clients may hold this one's interpreter lock."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture
def s3_store(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> str:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/team/store"


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest) -> str:
    """Each test that takes it runs on a folder and on S3."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_store"))
    return os.path.join(str(request.getfixturevalue("tmp_path")), "store")
