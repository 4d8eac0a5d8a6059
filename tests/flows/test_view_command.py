"""``agentrl view``: the whole command in a process of its own, and what is refused before."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from viewer_store import make_store

from agentrl.flows import cli

ROOT = Path(__file__).parents[2]


def serving(store: Path, *options: str) -> tuple["subprocess.Popen[str]", dict[str, str]]:
    """The command, and what it says once it serves."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "agentrl.flows.cli",
        "view",
        "--store",
        str(store),
        "--port",
        "0",
        "--json",
        *options,
    ]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line == "}\n":
            return process, json.loads(text)
    raise AssertionError(process.communicate()[1])


def files(folder: Path) -> dict[str, bytes]:
    """All but what the buffer keeps of its own reading."""
    result = (path for path in folder.rglob("*") if path.is_file() and "tmp" not in path.relative_to(folder).parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in result}


@pytest.mark.slow
@pytest.mark.ci
def test_the_store_is_served_and_left_as_it_was(tmp_path: Path) -> None:
    make_store(tmp_path)
    before = files(tmp_path)
    began = time.monotonic()
    process, text = serving(tmp_path)
    try:
        assert text["event"] == "serving"
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", text["url"])
        port = text["url"].rstrip("/").rpartition(":")[2]
        assert text["forward"].startswith(f"ssh -N -L {port}:127.0.0.1:{port} ")
        with httpx.Client(base_url=text["url"], timeout=60) as client:
            assert client.get("/api/session").status_code == 204
            print(f"answers after {time.monotonic() - began:.2f} s")
            assert client.get("/api/overview").json()["rows"] == 24
            assert client.get("/api/rows").headers["x-total"] == "24"
            name = "grpo-aaaaaaaa-000000"
            for path in ("facets", f"rows/{name}", f"tokens/{name}"):
                assert client.get(f"/api/{path}").status_code == 200, path
            assert client.get("/api/overview", headers={"host": "evil.example"}).status_code == 403
        maps = Path(f"/proc/{process.pid}/maps")
        if maps.exists():
            assert "libtorch" not in maps.read_text()
        seconds = sum(psutil.Process(process.pid).cpu_times()[:2])
        print(f"{seconds:.2f} s of processor time, {psutil.Process(process.pid).memory_info().rss / 2**20:.0f} MiB")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
    assert files(tmp_path) == before


@pytest.mark.slow
def test_a_page_that_listens_does_not_hold_up_the_end(tmp_path: Path) -> None:
    make_store(tmp_path)
    process, text = serving(tmp_path)
    with httpx.Client(base_url=text["url"], timeout=60) as client, client.stream("GET", "/api/events") as live:
        lines = live.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGINT)
        assert not any(lines)
    assert process.wait(30) in (0, 130)
    assert process.stderr is not None
    assert process.stderr.read() == ""


@pytest.mark.slow
def test_beyond_this_machine_the_address_has_a_token(tmp_path: Path) -> None:
    process, text = serving(tmp_path, "--host", "0.0.0.0")
    try:
        address, _, token = text["url"].partition("#token=")
        assert len(token) >= 32
        port = address.rstrip("/").rpartition(":")[2]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert client.get("/api/overview").status_code == 401
            assert client.get("/api/session", headers={"x-agentrl-token": token}).status_code == 204
            assert client.get("/api/overview").status_code == 200
    finally:
        process.terminate()
        process.wait(30)


def test_what_cannot_be_served_is_said_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["view", "--store", str(tmp_path / "none")]) == 2
    assert f"there is no store at {tmp_path / 'none'}" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.call(["view", "--store", str(tmp_path), "--port", port]) == 1
    assert capsys.readouterr().err == f"error: --host 127.0.0.1 --port {port}: Address already in use\n"
    assert cli.call(["view", "--store", str(tmp_path), "--host", "no.such.host.invalid"]) == 1
    assert "no.such.host.invalid" in capsys.readouterr().err
    assert cli.call(["view", "--store", str(tmp_path), "--write", "--unsafe-open"]) == 2
    assert "--write and --unsafe-open do not go together" in capsys.readouterr().err
