"""What is in no namespace: keys of the kernel, other processes' memory, sockets to a host. A sandboxed program may not
reach any of it, and what honest programs need still works."""

import ctypes
import os
import platform
import re
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandboxed import HERE, SMALL, python

from agentrl.engines.blocking import blocking
from agentrl.sandbox import SandboxError, bubblewrap, seccomp

ROOT = os.geteuid() == 0
CALLER = """
    import ctypes, errno, os
    libc = ctypes.CDLL(None, use_errno=True)
    def call(number, *arguments):
        result = libc.syscall(number, *arguments)
        return errno.errorcode[ctypes.get_errno()] if result < 0 else "done"
"""
NUMBERS = {
    name: numbers[list(seccomp.AUDIT_ARCH).index(platform.machine())] for name, numbers in seccomp.DENIED.items()
}


@pytest.fixture(params=["as it is", pytest.param("another user", marks=pytest.mark.skipif(not ROOT, reason="root"))])
def user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The user who starts bubblewrap: the one to whom root falls back, or an ordinary user, without cgroups."""
    if request.param == "as it is":
        yield 65534 if ROOT else os.geteuid()
        return
    nobody = bubblewrap._as_nobody

    def ordinary(*arguments: list[str]) -> list[str]:
        return [part.replace("=65534", "=54321") for part in nobody(*arguments)]

    monkeypatch.setattr(bubblewrap, "_as_nobody", ordinary)
    monkeypatch.setattr("agentrl.sandbox.cgroups.places", lambda: ())
    yield 54321


def program(body: str) -> str:
    return textwrap.dedent(CALLER) + textwrap.dedent(body)


def test_the_numbers_are_those_of_the_kernels_headers() -> None:
    headers = [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")]
    compared = 0
    for column, header in enumerate(headers):
        if header.is_file():
            defined = dict(re.findall(r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
            for name, numbers in seccomp.DENIED.items():
                if name in defined:
                    assert numbers[column] == int(defined[name]), name
                    compared += 1
    assert compared or not any(header.is_file() for header in headers)


def test_every_denied_call_is_refused_inside(user: int) -> None:
    ran = python(program(f"print({{name: call(n, 0, 0, 0, 0, 0, 0) for name, n in {NUMBERS!r}.items() if n}})"))
    assert ran.ok, ran.stderr
    answers = eval(ran.stdout)
    assert len(answers) > 40
    assert {name: answer for name, answer in answers.items() if answer != "EPERM"} == {}


def test_keys_of_the_host_can_be_neither_seen_nor_reached(user: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    add, control = NUMBERS["add_key"], NUMBERS["keyctl"]
    key = libc.syscall(add, b"user", b"agentrl-secret", b"sk-of-the-host", 14, -3)  # of the session
    if key < 0:
        pytest.skip("this kernel keeps no keys for us")
    try:
        libc.syscall(control, 5, key, 0x3F3F3F3F)  # whoever knows its number may read it, without a filter
        body = f"""
            import ctypes
            held = ctypes.create_string_buffer(64)
            print(call({control}, 11, {key}, held, 64), held.value)
            print(call({control}, 0, -3, 1), call({control}, 0, -4, 1))
            print(call({add}, b"user", b"to the next run", b"hello", 5, -4))
            for path in ("/proc/keys", "/proc/key-users"):
                try:
                    print(open(path).read() or "nothing")
                except OSError:
                    print("nothing")
        """
        ran = python(program(body))
        assert ran.stdout.split() == [b"EPERM", b"b''", b"EPERM", b"EPERM", b"EPERM", b"nothing", b"nothing"], (
            ran.stderr
        )
    finally:
        libc.syscall(control, 9, key, -3)


def test_bubblewraps_own_process_can_be_neither_read_nor_traced(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/folder-of-the-host")
    body = f"""
        import glob
        for path in ("environ", "cmdline", "mem", "maps", "cwd/usr", "root/usr", "fd/0", "task/1/mem"):
            for process in ("/proc/1/", "/proc/self/root/proc/1/"):
                try:
                    open(process + path, "rb").read(10)
                    print("read", path)
                except IsADirectoryError:
                    print("entered", path)
                except OSError:
                    pass
        print(call({NUMBERS["ptrace"]}, 16, 1, 0, 0))
        for path in glob.glob("/proc/[0-9]*/environ"):
            text = open(path, "rb").read()
            print(b"folder-of-the-host" in text, {os.getcwd().encode()!r} in text)
    """
    ran = python(program(body))
    assert ran.stdout.split() == [b"EPERM", b"False", b"False"], ran.stderr


def test_no_namespace_is_made_by_clone_either(user: int) -> None:
    clone, clone3 = (
        numbers[list(seccomp.AUDIT_ARCH).index(platform.machine())] for numbers in (seccomp.CLONE, seccomp.CLONE3)
    )
    flags = [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000]
    body = f"""
        print([call({clone}, flag | 17, 0, 0, 0, 0) for flag in {flags}], call({clone3}, 0, 0))
        child = libc.syscall({clone}, 17, 0, 0, 0, 0)
        if not child:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    ran = python(program(body))
    assert ran.stdout.decode().splitlines() == [f"{['EPERM'] * 7} ENOSYS", "7"], ran.stderr


def test_sockets_are_those_that_a_namespace_of_networks_holds(user: int) -> None:
    body = """
        import socket
        made = []
        for family in range(1, 46):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
                try:
                    socket.socket(family, kind).close()
                    made.append(family)
                except OSError:
                    pass
        print(sorted(set(made)))
        try:
            socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        except OSError as error:
            print(errno.errorcode[error.errno])
    """
    made, vsock = python(program(body)).stdout.decode().splitlines()
    assert set(eval(made)) <= set(seccomp.FAMILIES)
    assert vsock == "EAFNOSUPPORT"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other forms of calls are those of x86_64")
def test_other_forms_of_a_call_pass_no_filter() -> None:
    ran = python(program("print(call(0x40000000 + 39), call(463), call(2000))"))
    assert ran.stdout.split() == [b"ENOSYS"] * 3  # getpid of x32; calls that are newer than the list
    body = """
        import mmap
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # getpid of i386: mov eax, 20; int 0x80; ret
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        print("called")
    """
    ran = python(program(body))
    assert (ran.code, ran.stdout) == (128 + signal.SIGSYS, b"")


def test_what_honest_programs_do_still_works(user: int) -> None:
    body = """
        import asyncio, concurrent.futures, fcntl, multiprocessing, socket, sqlite3, subprocess, tempfile, threading

        async def echoed():
            server = await asyncio.start_server(lambda r, w: (w.write(b"hello"), w.close()), "127.0.0.1", 0)
            reader, _ = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
            return await reader.read()

        if __name__ == "__main__":
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                print(sum(pool.map(int, "123")))
            with multiprocessing.Pool(2) as pool:
                print(pool.map(abs, [-1, 2]))
            print(sqlite3.connect("data.db").execute("select 2 + 2").fetchone())
            print(subprocess.run("echo out | tr o O", shell=True, capture_output=True, text=True).stdout.strip())
            print(asyncio.run(echoed()), len(socket.if_nameindex()))
            with tempfile.TemporaryFile() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
    """
    ran = python(body, limits=SMALL.model_copy(update={"memory_mb": 256}))
    assert ran.ok, ran.stderr
    assert ran.stdout.decode().splitlines() == ["6", "[1, 2]", "(4,)", "Out", "b'hello' 1"]


def test_a_machine_whose_numbers_are_not_known_has_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    bubblewrap.check.cache_clear()
    try:
        with pytest.raises(SandboxError, match="knows x86_64 and aarch64, not 'riscv64'; choose `sandbox: docker`"):
            blocking(HERE.run(["/bin/true"], {}))
    finally:
        bubblewrap.check.cache_clear()
    assert len(seccomp.program("aarch64")) % 8 == 0
