"""The sandbox under attack. Every program here is run, and none may get out, hang, or leave a process."""

import asyncio
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from sandboxed import FORK_BOMB, FULL_DISK, HERE, SMALL, python

from agentrl.engines.blocking import blocking
from agentrl.sandbox import Ran, Unsafe, bubblewrap, cgroups


def running(mark: str) -> list[int]:
    """Processes of this machine whose command has the mark."""
    return [process.pid for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]


def groups(pid: int) -> list[Path]:
    """Cgroups that a process made."""
    return [group for folder in cgroups.places() for group in folder.glob(f"agentrl-{pid}-*")]


@pytest.fixture
def mark() -> Iterator[str]:
    """An argument to find a program's processes by. None may be there after the test, nor any cgroup of ours."""
    mark = f"mark-{uuid.uuid4()}"
    yield mark
    assert running(mark) == []
    assert groups(os.getpid()) == []


def test_a_fork_bomb_runs_out_of_processes(mark: str) -> None:
    ran = python(FORK_BOMB, mark)
    assert ran.ok
    assert 4 < int(ran.stdout) <= SMALL.processes


def test_a_fork_bomb_that_never_gives_up_ends_with_its_time(mark: str) -> None:
    short = SMALL.model_copy(update={"wall_s": 4.0})
    ran = blocking(HERE.run(["/bin/sh", "-c", "f() { f | f & }; while :; do f; done", mark], {}, short))
    assert not ran.ok
    assert ran.seconds < 30


def test_a_memory_bomb_is_stopped(mark: str) -> None:
    ran = python("held = []\nwhile True: held.append(bytearray(1 << 20))", mark)
    assert not ran.ok
    assert ran.stopped == "memory" or b"MemoryError" in ran.stderr


@pytest.mark.skipif(not cgroups.places(), reason="without a cgroup, memory is limited for each process")
def test_memory_is_that_of_all_processes_and_files_together(mark: str) -> None:
    source = """
        import os, time
        for _ in range(6):
            if os.fork() == 0:
                held = bytearray(b"x") * (24 << 20)
                time.sleep(60)
        for _ in range(6):
            print(os.wait()[1], flush=True)
            break
    """
    ran = python(source, mark)
    assert (b"9" in ran.stdout) or ran.stopped == "memory"
    ran = python("open('file', 'wb').write(bytes(3 << 20)); held = bytearray(b'x') * (62 << 20)", mark)
    assert ran.stopped == "memory"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_and_ends_the_program(mark: str, stream: str) -> None:
    ran = python(f"import sys\nwhile True: sys.{stream}.write('lots of text' * 1000)", mark)
    assert ran.stopped == "output"
    assert len(getattr(ran, stream)) == SMALL.output_kb * 1024
    assert ran.seconds < SMALL.wall_s


@pytest.mark.parametrize("folder", ["/tmp", "/tmp/work", "/dev/shm"])
def test_the_disk_is_full_soon_and_is_not_the_hosts(mark: str, folder: str) -> None:
    free = shutil.disk_usage("/").free
    number, written = python(FULL_DISK, mark, folder).stdout.split()
    assert int(number) == errno.ENOSPC
    assert int(written) <= SMALL.disk_mb
    assert shutil.disk_usage("/").free > free - (64 << 20)


def test_a_file_has_a_largest_size(mark: str) -> None:
    ran = python("open('big', 'wb').write(bytes(8 << 20))", mark)
    assert not ran.ok
    assert b"File too large" in ran.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_an_endless_loop_ends_with_its_cpu_time_and_a_sleeper_with_its_wall_time(mark: str) -> None:
    assert python("while True: pass", mark).stopped == "cpu_time"
    ignoring = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert not python(ignoring, mark).ok
    ran = python("import time; time.sleep(60)", mark, limits=SMALL.model_copy(update={"wall_s": 1.0}))
    assert ran.stopped == "wall_time"
    assert ran.seconds < 10


def test_there_is_no_network(mark: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"""
            import socket
            addresses = [("127.0.0.1", {port}), ("1.1.1.1", 53), chr(0) + "agentrl"]
            for family, address in zip([socket.AF_INET, socket.AF_INET, socket.AF_UNIX], addresses):
                try:
                    socket.socket(family).connect(address)
                    print("connected", address)
                except OSError as error:
                    print("refused")
        """
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind("\0agentrl")
            abstract.listen()
            assert python(source, mark).stdout.split() == [b"refused"] * 3
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_file_of_the_host_can_be_read(mark: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the host's secret")
    places = [str(secret), str(Path.home() / ".bashrc"), "/etc/shadow", "/etc/passwd", "/proc/1/root" + str(secret)]
    places += [__file__, "/sys/kernel/notes", "/proc/kcore", "/proc/sysrq-trigger", f"/proc/{os.getpid()}/environ"]
    source = f"""
        import os
        for place in {places!r}:
            try:
                print("read", place, open(place, "rb").read(10))
            except OSError:
                print("hidden")
        print(sorted(set(os.listdir("/")) - {{"bin", "dev", "lib", "lib32", "lib64", "proc", "sbin", "tmp", "usr"}}))
    """
    *seen, root = python(source, mark).stdout.decode().splitlines()
    assert seen == ["hidden"] * len(places)
    beside = {Path(sys.base_prefix).parts[1]} if not sys.base_prefix.startswith("/usr") else set()
    assert set(eval(root)) <= {"etc"} | beside


def test_a_link_to_the_host_leads_nowhere(mark: str, tmp_path: Path) -> None:
    (tmp_path / "target.txt").write_text("the host's")
    source = f"""
        import os
        os.symlink({str(tmp_path)!r}, "link")
        for mode in ("r", "w"):
            try:
                open("link/target.txt", mode)
                print("opened", mode)
            except OSError:
                print("nothing there")
    """
    assert python(source, mark).stdout == b"nothing there\n" * 2
    assert (tmp_path / "target.txt").read_text() == "the host's"


def test_no_environment_variable_of_the_host_can_be_read(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "sk-of-the-host")
    source = """
        import glob, os
        found = [dict(os.environ)]
        for place in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
            try:
                found.append(open(place).read())
            except OSError:
                pass
        print(len(found) > 2, "sk-of-the-host" in str(found))
    """
    assert python(source, mark).stdout == b"True False\n"


def test_nothing_outside_its_folder_can_be_written(mark: str, tmp_path: Path) -> None:
    places = ["/usr/bin/evil", "/etc/evil", "/evil", "/dev/evil", str(tmp_path / "evil")]
    places += ["/proc/sys/kernel/hostname", "/proc/sys/user/max_user_namespaces", "/proc/sysrq-trigger"]
    places += [str(Path(sys.base_prefix, "evil")), "/proc/self/oom_score_adj", "/sys/fs/cgroup/evil"]
    source = f"""
        import os
        for place in {places!r}:
            try:
                os.write(os.open(place, os.O_WRONLY | os.O_CREAT), b"-1000")
                print("wrote", place)
            except OSError:
                print("refused")
    """
    assert python(source, mark).stdout.decode().split() == ["refused"] * len(places)


def test_it_cannot_regain_rights(mark: str) -> None:
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.unshare(0x10000000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, b""), libc.setns(0, 0), os.getuid())
        print(libc.chroot(b"/tmp"), libc.setuid(0), libc.sethostname(b"x", 1))
    """
    assert python(source, mark).stdout.split() == [b"-1", b"-1", b"-1", b"65534", b"-1", b"-1", b"-1"]


def test_its_parent_cannot_be_killed(mark: str) -> None:
    source = f"""
        import os, signal
        for pid in [os.getppid(), 1, -1, {os.getpid()}]:
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
                try:
                    os.kill(pid, number)
                except OSError:
                    pass
        print("still here", flush=True)
    """
    started = time.monotonic()
    python(source, mark)
    assert time.monotonic() - started < SMALL.wall_s, "we are not stopped"
    assert python("print('next')").stdout == b"next\n"


def test_daemons_end_with_the_program(mark: str) -> None:
    source = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        print("left a daemon")
    """
    ran = python(source, mark)
    assert (ran.stdout, ran.stopped) == (b"left a daemon\n", None)


async def ends(run: "asyncio.Task[object]") -> None:
    """A run of a minute that is cancelled ends long before."""
    run.cancel()
    before = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert time.monotonic() - before < 30


def test_a_cancelled_run_leaves_nothing(mark: str) -> None:
    async def cancelled(after: float) -> None:
        run = asyncio.create_task(HERE.run([HERE.python, "-c", "import time; time.sleep(60)", mark], {}))
        while not running(mark):
            await asyncio.sleep(0.001)
        await asyncio.sleep(after)  # bwrap is then at different parts of its set-up
        await ends(run)

    for step in range(6):
        blocking(cancelled(0.004 * step))


def test_a_cancelled_run_ends_before_its_processes_ask_to_die_with_bwrap(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = bubblewrap.Bubblewrap._view
    late = {"--die-with-parent"}
    monkeypatch.setattr(bubblewrap.Bubblewrap, "_view", lambda *given: [x for x in view(*given) if x not in late])

    async def cancelled() -> None:
        run = asyncio.create_task(HERE.run([HERE.python, "-c", "import time; time.sleep(60)", mark], {}))
        while not any(psutil.Process(pid).name().startswith("python") for pid in running(mark)):
            await asyncio.sleep(0.01)
        await ends(run)

    blocking(cancelled())


def test_a_run_that_is_cancelled_while_it_starts_leaves_nothing(mark: str) -> None:
    async def cancelled(after: float) -> None:
        run = asyncio.create_task(HERE.run([HERE.python, "-c", "import time; time.sleep(60)", mark], {}))
        await asyncio.sleep(after)
        await ends(run)

    for step in range(12):
        blocking(cancelled(0.005 * step))


def test_a_program_whose_owner_is_gone_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocking(HERE.run(["/bin/echo", "here"], {})).stdout == b"here\n"
    monkeypatch.setattr(bubblewrap, "_owned", nullcontext)
    ran = blocking(HERE.run(["/bin/echo", "here"], {}))
    assert (ran.code, ran.stdout) == (125, b"")


def test_a_killed_owner_leaves_nothing(mark: str, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "import asyncio, sys\nfrom agentrl.sandbox import Bubblewrap\nbox = Bubblewrap()\n"
        "asyncio.run(box.run([box.python, '-c', 'import time; time.sleep(60)', sys.argv[1]], {}))"
    )
    here = Path(__file__).parents[2]
    owner = subprocess.Popen([sys.executable, str(script), mark[::-1]], env=os.environ | {"PYTHONPATH": str(here)})
    deadline = time.monotonic() + 30
    while len(running(mark[::-1])) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 30
    while running(mark[::-1]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running(mark[::-1]) == []
    cgroups.places.cache_clear()
    assert groups(owner.pid) == []


def test_without_cgroups_each_process_is_limited(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "places", lambda: ())

    def shell(source: str) -> Ran:
        return blocking(HERE.run(["/bin/sh", "-c", source, mark], {}, SMALL))

    assert shell("echo out; echo err >&2").stdout == b"out\n"
    forks = shell("for n in $(seq 40); do sleep 30 & done; wait")
    assert not forks.ok
    assert b"ork" in forks.stderr
    memory = shell("x=$(head -c 100m /dev/zero | tr '\\0' x)")
    assert not memory.ok
    assert memory.stopped is None
    assert shell("while :; do :; done").stopped == "cpu_time"


def test_unsafe_runs_have_limits_and_leave_nothing_too(mark: str) -> None:
    box = Unsafe(limits=SMALL)
    ran = blocking(box.run([box.python, "main.py"], {"main.py": b"import os; print(sorted(os.environ))"}))
    assert set(eval(ran.stdout)) <= {"HOME", "LC_CTYPE", "OLDPWD", "PATH", "PWD", "PYTHONHASHSEED"}
    assert blocking(box.run(["/bin/sh", "-c", "while :; do :; done", mark], {}, SMALL)).stopped == "cpu_time"
    big = blocking(box.run([box.python, "-c", "open('big', 'wb').write(bytes(8 << 20))"], {}, SMALL))
    assert b"File too large" in big.stderr
    slow = SMALL.model_copy(update={"wall_s": 0.5})
    assert blocking(box.run(["/bin/sh", "-c", "sleep 60 & sleep 60", mark], {}, slow)).stopped == "wall_time"
    assert blocking(box.run(["/bin/sh", "-c", "yes", mark], {}, SMALL)).stopped == "output"
