"""The viewers that benchmarks/viewer.py compares: how each is fed and started.

Peers have interpreters of their own: ``VIEWERS`` is a folder with a virtual environment for each, which ``make
bench-viewer`` makes. What is fed once is kept, beside the store.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VIEWERS = Path(os.environ.get("VIEWERS", ROOT / ".venv-viewers"))
INGEST = Path(__file__).parent / "viewer_ingest.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PHOENIX_S = float(os.environ.get("PHOENIX_S", "600"))
PROJECT = "bench"
"""Of Trackio."""
SOME = 20_000
"""Phoenix gets so many rows if ten times as many would take it longer than PHOENIX_S seconds."""


@dataclass(frozen=True)
class Side:
    """A viewer. ``command`` starts it on the port ``{port}``; ``asks`` is the address that says that it answers."""

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    asks: str = "/"


def ours(folder: Path) -> Side:
    command = [sys.executable, "-m", "agentrl.flows.cli", "view", "--store", "store", "--port", "{port}"]
    return Side("agentrl", command)


def inspect(folder: Path) -> Side:
    command = [str(VIEWERS / "inspect/bin/inspect"), "view", "start", "--log-dir", str(folder / "inspect")]
    return Side("Inspect", [*command, "--host", "127.0.0.1", "--port", "{port}"])


def phoenix(folder: Path) -> Side:
    more = {"PHOENIX_WORKING_DIR": str(folder / "phoenix"), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": "{port}"}
    more |= {
        "PHOENIX_GRPC_PORT": "0",
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    return Side("Phoenix", [str(VIEWERS / "arize/bin/phoenix"), "serve"], more)


def trackio(folder: Path) -> Side:
    more = {"GRADIO_SERVER_PORT": "{port}", "BROWSER": "true", **trackio_environment(folder)}
    command = [str(VIEWERS / "trackio/bin/trackio"), "show", "--project", PROJECT, "--host", "127.0.0.1"]
    return Side("Trackio", command, more)


def trackio_environment(folder: Path) -> dict[str, str]:
    return {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}


def is_installed(side: Side) -> bool:
    return side.name == "agentrl" or Path(side.command[0]).exists()


@dataclass
class Server:
    """A viewer that answers. ``seconds`` passed until it did."""

    side: Side
    url: str
    process: "subprocess.Popen[bytes]"
    seconds: float

    def peak(self) -> float:
        """MiB that its processes held at most, each by itself."""
        import psutil

        process = psutil.Process(self.process.pid)
        return sum(_peak(item.pid) for item in [process, *process.children(recursive=True)]) / 2**20


def _peak(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM")), 0)


@contextmanager
def serving(side: Side, folder: Path) -> Iterator[Server]:
    port, second = _free_port(), _free_port()
    command = [word.replace("{port}", str(port)) for word in side.command]
    more = {name: value.format(port=port, second=second) for name, value in side.environment.items()}
    log = (folder / f"{side.name}.log").open("wb")
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, env={**ENVIRONMENT, **more}, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until_answered(url + side.asks, process)
        yield Server(side, url, process, time.perf_counter() - started)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def until_answered(url: str, process: "subprocess.Popen[bytes]", patience: float = 600.0) -> None:
    end = time.perf_counter() + patience
    while True:
        try:
            with urllib.request.urlopen(url, timeout=patience) as answer:
                answer.read()
            return
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            if process.poll() is not None or time.perf_counter() > end:
                raise RuntimeError(f"{url} does not answer: {error}") from None
            time.sleep(0.005)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return bytes(answer.read())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# feeding


def feed_inspect(folder: Path, rows: Iterable[bytes]) -> dict[str, Any]:
    python = VIEWERS / "inspect/bin/python"
    return _fed(folder / "inspect.json", [str(python), str(INGEST), "inspect", str(folder / "inspect")], rows)


def feed_phoenix(folder: Path, rows: Iterable[bytes]) -> dict[str, Any]:
    done = folder / "phoenix.json"
    if done.exists():
        return dict(json.loads(done.read_text()))
    python = VIEWERS / "arize/bin/python"
    with serving(phoenix(folder), folder) as server:
        return _fed(done, [str(python), str(INGEST), "phoenix", server.url, str(PHOENIX_S), str(SOME)], rows)


def _fed(done: Path, command: list[str], rows: Iterable[bytes]) -> dict[str, Any]:
    """What the other interpreter said, from the first time that it took these rows."""
    if done.exists():
        return dict(json.loads(done.read_text()))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for line in rows:
                process.stdin.write(line)
            process.stdin.close()
        except BrokenPipeError:  # it takes no more
            process.stdin = None
        text = process.stdout.read().decode()
    assert process.returncode == 0, text
    done.write_text(text.strip().splitlines()[-1])
    return dict(json.loads(done.read_text()))
