"""A store to test with, on a folder and on a real S3 server on loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_rows import Make, build


@pytest.fixture
def make() -> Make:
    return build


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """moto's S3 on loopback with atomic conditional puts, in a process of its own: native clients may hold this one's
    interpreter lock."""
    with socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, faulty = probe.getsockname()[1], other.getsockname()[1]
    server_file = Path(__file__).parents[1] / "faults/s3_server.py"
    command = [sys.executable, str(server_file), str(port), str(faulty), "0"]
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
