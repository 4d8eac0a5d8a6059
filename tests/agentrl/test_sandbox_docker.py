"""The attacks on the sandbox, in containers. A docker daemon runs, and has the image that DOCKER_IMAGE names."""

import asyncio
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sandboxed
from sandboxed import FORK_BOMB, FULL_DISK, SMALL
from test_environment_code import CHEATS, attempt, call

from agentrl.engines.blocking import blocking
from agentrl.environments.code.environment import Code, CodeConfig
from agentrl.rollouts.demonstrations import demonstrate
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


@pytest.mark.parametrize("seconds", [0.03, 0.1, 0.2, 0.4, 3])
def test_a_cancelled_run_leaves_no_container(seconds: float) -> None:
    """Not even one that the daemon was about to make."""

    async def cancelled() -> None:
        run = asyncio.create_task(HERE.run([HERE.python, "-c", "import time; time.sleep(600)"], {}))
        await asyncio.sleep(seconds)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    blocking(cancelled())
    time.sleep(2)


def test_an_image_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SandboxError, match="no container of 'no-such-image'"):
        blocking(Docker(image="no-such-image").run(["true"], {}))


def test_a_container_that_does_not_begin_is_an_error_and_a_program_cannot_claim_it() -> None:
    empty = "agentrl-without-a-shell"
    subprocess.run(["docker", "import", "-", empty], input=bytes(1024), capture_output=True, check=True)
    try:
        with pytest.raises(SandboxError, match=f"no container of '{empty}'.*/bin/sh"):
            blocking(Docker(image=empty).run(["true"], {}))
    finally:
        subprocess.run(["docker", "rmi", empty], capture_output=True, check=True)
    claiming = "import sys; print('Error response from daemon: no such image', file=sys.stderr); sys.exit(1)"
    assert python(claiming).code == 1


def test_no_file_of_the_host_can_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the host's secret")
    places = [str(secret), __file__, "/proc/1/root" + str(secret), f"/proc/{os.getpid()}/environ"]
    places += ["/var/run/docker.sock", "/etc/shadow", "/proc/kcore", "/sys/firmware/acpi", "link/secret.txt"]
    source = f"""
        import os
        os.symlink({str(tmp_path)!r}, "link")
        for place in {places!r}:
            try:
                print("seen", place, os.listdir(place) if os.path.isdir(place) else open(place, "rb").read(10))
            except OSError:
                print("hidden")
    """
    seen = python(source).stdout.decode().splitlines()
    empty = [f"seen {position} []" for position in places]
    assert all(entry in ("hidden", nothing) for entry, nothing in zip(seen, empty, strict=True)), seen


def test_it_cannot_regain_rights() -> None:
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.unshare(0x10000000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, b""), libc.setns(0, 0), os.getuid())
        print(libc.chroot(b"/tmp"), libc.setuid(0), libc.sethostname(b"x", 1))
    """
    assert python(source).stdout.split() == [b"-1", b"-1", b"-1", b"65534", b"-1", b"-1", b"-1"]


def test_daemons_end_with_the_program() -> None:
    source = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        print("left a daemon")
    """
    ran = python(source)
    assert (ran.stdout, ran.stopped) == (b"left a daemon\n", None)
    assert ran.seconds < 30


def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        f"import asyncio\nfrom agentrl.sandbox import Docker, ResourceLimits\n"
        f"box = Docker(image={HERE.image!r}, limits=ResourceLimits(wall_s=1.0))\n"
        f"asyncio.run(box.run([box.python, '-c', 'import time; time.sleep(600)'], {{}}))"
    )
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    owner = subprocess.Popen([sys.executable, str(script)], env=os.environ | path, start_new_session=True)
    there = ["docker", "ps", "--quiet", "--filter", f"name=agentrl-{owner.pid}-"]

    def running() -> bytes:
        return subprocess.run(there, capture_output=True, check=True).stdout

    deadline = time.monotonic() + 60
    while not running() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running(), "the container has started"
    owner.kill()
    owner.wait()
    while running() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert running() == b""


@pytest.mark.parametrize("cheat", CHEATS)
def test_nobody_is_paid_for_less_than_a_solution(cheat: str) -> None:
    limits = HERE.limits.model_copy(update={"wall_s": 5.0})
    environment = Code(CodeConfig(levels=[1], sandbox=HERE.model_copy(update={"limits": limits}), reward="share"))
    [task] = environment.tasks({"train": 1}, 0)["train"]
    edits = [call("edit", path="main.py", old="", new=CHEATS[cheat]), call("run_tests")]
    _, episode, score = attempt(task, *edits, environment=environment)
    assert (episode.share, score.success, score.reward) == (0.0, False, 0.0)


def test_a_solution_is_paid() -> None:
    environment = Code(CodeConfig(levels=[1], sandbox=HERE))
    [task] = environment.tasks({"train": 1}, 0)["train"]
    row = demonstrate(environment, task, 0.0, 0, "t")
    assert (row.success, row.reward) == (True, 1.0)
