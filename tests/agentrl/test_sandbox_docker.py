"""The attacks on the sandbox, in containers. A docker daemon runs, and has the image that DOCKER_IMAGE names."""

import asyncio
import errno
import os
import subprocess
import time

import pytest
import sandboxed
from sandboxed import FORK_BOMB, FULL_DISK, SMALL

from agentrl.engines.blocking import blocking
from agentrl.sandbox import Docker, Ran, ResourceLimits, SandboxError

pytestmark = pytest.mark.docker

HERE = Docker(image=os.environ.get("DOCKER_IMAGE", "python:3.12-slim"), limits=SMALL)

ATTACKS = {
    "writing outside": """
        import os
        def refused(path):
            try:
                os.open(path, os.O_WRONLY | os.O_CREAT)
            except OSError:
                return True
        print(all(refused(path) for path in ("/evil", "/usr/evil", "/etc/evil", "/proc/sys/kernel/core_pattern")))
    """,
    "network": """
        import socket
        try:
            socket.create_connection(("1.1.1.1", 53), 2)
        except OSError:
            print(True)
    """,
    "environment": """
        import os
        print("SECRET_KEY" not in os.environ and os.getuid() == 65534)
    """,
    "killing the parent": """
        import os
        for pid in (os.getppid(), 1):
            try:
                os.kill(pid, 9)
            except OSError:
                pass
        print(True, flush=True)
    """,
}


def python(source: str, *arguments: str, limits: ResourceLimits = SMALL) -> Ran:
    return sandboxed.python(source, *arguments, limits=limits, sandbox=HERE)


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "sk")
    yield
    there = ["docker", "ps", "--all", "--quiet", "--filter", f"name=agentrl-{os.getpid()}-"]
    for _ in range(40):
        left = subprocess.run(there, capture_output=True, check=True).stdout
        if not left:
            return
        time.sleep(0.25)
    assert left == b""


def test_a_program_gets_its_files_and_gives_its_output_and_its_exit_code() -> None:
    source = b"import sys; print(open('folder/data.txt').read()); sys.exit(3)"
    ran = blocking(HERE.run([HERE.python, "main.py"], {"main.py": source, "folder/data.txt": b"read"}))
    assert (ran.code, ran.stdout, ran.stopped) == (3, b"read\n", None), ran.stderr


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_succeeds(attack: str) -> None:
    ran = python(ATTACKS[attack])
    assert ran.stdout == b"True\n", ran


def test_a_fork_bomb_runs_out_of_processes() -> None:
    assert 4 < int(python(FORK_BOMB).stdout) <= 20


def test_the_disk_is_full_soon() -> None:
    number, written = python(FULL_DISK, ".").stdout.split()
    assert int(number) == errno.ENOSPC
    assert int(written) <= SMALL.disk_mb


def test_limits_end_a_program() -> None:
    assert python("held = []\nwhile True: held.append(bytearray(1 << 20))").stopped == "memory"
    assert python("while True: print('lots of text' * 1000)").stopped == "output"
    assert not python("while True: pass").ok
    slow = SMALL.model_copy(update={"wall_s": 3.0})
    assert python("import time; time.sleep(600)", limits=slow).stopped == "wall_time"


def test_a_cancelled_run_leaves_no_container() -> None:
    async def cancelled() -> None:
        run = asyncio.create_task(HERE.run([HERE.python, "-c", "import time; time.sleep(600)"], {}))
        await asyncio.sleep(2)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    blocking(cancelled())


def test_an_image_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SandboxError, match="no container of 'no-such-image'"):
        blocking(Docker(image="no-such-image").run(["true"], {}))
