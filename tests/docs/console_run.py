"""The commands of a page run in one shell, and what they print is compared with what the page shows."""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from page_blocks import ROOT

NOISE = (
    r"T \[.*\] .*: (started|done .*)",  # 12:01:02  [1/5] tasks: started
    r"T \[.*\] .*: [\dN].*",  # 12:01:02  [3/5] warm: 1/150  loss 6.137
    r"T [\dN]+ stages? to run.*",
    r"store +PATH.*",
    r"report +\S+",
    r"note: code in .* is run.*",
    r".*Warning.*",
    r"(T )?warning: .*",
)
"""Lines that a page may leave out, if it leaves out all of the kind."""


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines that it prints) of a console block. Lines before the first command belong to an empty one."""
    matches: list[tuple[str, list[str]]] = []
    lines = text.rstrip("\n").split("\n")
    while lines:
        line = lines.pop(0)
        if not line.startswith("$ "):
            if not matches and line.strip():
                matches.append(("", []))
            if matches and (line.strip() or matches[-1][1]):
                matches[-1][1].append(line)
            continue
        command = line[2:]
        while lines and not _whole(command):
            command += "\n" + lines.pop(0)
        matches.append((command, []))
    return matches


def _whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.rstrip().endswith("\\")


def plain(line: str, figures: bool) -> str:
    """A line without what differs between runs and machines: times, ids, digests, paths and, unless ``figures``,
    numbers."""
    for pattern, word in (
        (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(\+00:00)?", "DATE"),
        (r"\b\d{8}-\d{6}-[0-9a-f]{4}\b", "RUN"),
        (r"\b\d\d:\d\d:\d\d\b", "T"),
        (r"\b(?=[a-f]*\d)[0-9a-f]{8,64}\b", "HEX"),
        (r"\b(\d+ (min|h) )?[\d.]+ (s|ms|min)\b", "N s"),
        (r"(?<![\w.])/(?:[\w.@-]+/)*[\w.@-]*store\b", "PATH"),
        (r"store/(artifacts|recordings)/\S+", r"store/\1/PATH"),
        (r"─+", "─"),
        (r"[·█▁-▇]+", "█"),
    ):
        line = re.sub(pattern, word, line)
    if not figures:
        line = re.sub(r"[+-]?\d[\d,]*(\.\d+)?(e-?\d+)?", "N", line)
    return " ".join(line.split())


def difference(shown: list[str], printed: list[str], figures: bool = True) -> str:
    """What a page shows and a command did not print, or the other way round; empty if they agree. A line ``...`` stands
    for any lines, and ``...`` in a line for any text."""
    wanted = [plain(line, figures) for line in shown if line.strip()]
    given = [plain(line, figures) for line in printed if line.strip()]
    for kind in NOISE:
        if not any(re.fullmatch(kind, line) for line in wanted):
            given = [line for line in given if not re.fullmatch(kind, line)]
    at, gap = 0, False
    for line in wanted:
        if line == "...":
            gap = True
            continue
        pattern = re.sub(r"([\[\]*?])", r"[\1]", line).replace("...", "*")
        while gap and at < len(given) and not fnmatchcase(given[at], pattern):
            at += 1
        if at >= len(given) or not fnmatchcase(given[at], pattern):
            return f"shown   {line}\nprinted {given[at] if at < len(given) else '(nothing more)'}"
        at, gap = at + 1, False
    return "" if gap or at == len(given) else f"printed, and not shown: {given[at]}"


class Shell:
    """One bash with job control, whose commands find ``agentrl`` and ``python`` of these tests."""

    def __init__(self, folder: Path) -> None:
        binaries = Path(sys.executable).parent
        self.env = env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HOUSE": str(ROOT),
        }
        env["PATH"] = f"{binaries}{os.pathsep}{env['PATH']}"
        for name in ("COLUMNS", "AGENTRL_STORE"):
            env.pop(name, None)
        self.process: Any = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.buffered = b""
        self.status = 0
        self.run("set -m", [])

    def run(self, command: str, shown: list[str], limit: float = 570) -> list[str]:
        """The lines that a command prints. After one in the background, or one that ends it, as many as are shown are
        waited for."""
        end = f"__end_{time.monotonic_ns()}__"
        self.process.stdin.write(f"{{\n{command}\n}} </dev/null\necho {end} $?\n".encode())
        self.process.stdin.flush()
        until = time.monotonic() + limit
        lines: list[str] = []
        while end not in (line := self._line(until)):
            lines.append(line)
        before, _, status = line.partition(end)
        lines += [before] if before else []  # what is printed may lack its last line break
        self.status = int(status)
        if command.rstrip().endswith("&") or command.startswith("kill "):
            until = time.monotonic() + 90
            while len([line for line in lines if line.strip()]) < len([line for line in shown if line.strip()]):
                lines.append(self._line(until))
        return [line for line in lines if not re.match(r"\[\d+\][ +-]", line)]

    def _line(self, until: float) -> str:
        while b"\n" not in self.buffered:
            if not select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"nothing more was printed; so far: {self.buffered!r}")
            part = os.read(self.process.stdout.fileno(), 65536)
            if not part:
                raise EOFError("the shell ended")
            self.buffered += part
        line, _, self.buffered = self.buffered.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        """End the shell and all that it started."""
        jobs = subprocess.run(["ps", "-o", "pid=", "--sid", str(self.process.pid)], capture_output=True, text=True)
        for pid in jobs.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
