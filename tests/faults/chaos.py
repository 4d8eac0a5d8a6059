"""The cast of a storm and what befalls it: processes are killed, stopped for a while, told to end, started again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from diary import entries

HERE = Path(__file__).parent
MARK = "STORM"
"""Every process of a storm has this variable in its environment, and so has whatever it starts."""

PIPELINE = """
name: storm
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 24, dev: 4, heldout: 4}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {coverage: 1.0, noise: 0.5}}
  kept: {uses: trajectories.reject, inputs: {trajectories: expert}, with: {keep: 1}}
"""
CAST = {
    "local": {"appender": 4, "compactor": 2, "vacuumer": 1, "reader": 2, "collector": 1, "run": 2},
    "s3": {"appender": 3, "compactor": 2, "vacuumer": 1, "reader": 1, "collector": 1, "run": 2},
}


def environment(folder: Path, extra: dict[str, str]) -> dict[str, str]:
    """Of the actors. ``folder`` is the storm's own: its name marks the processes."""
    path = os.pathsep.join(map(str, (HERE / "everywhere", HERE, HERE.parent / "datastore", HERE.parents[1])))
    own = {"PYTHONPATH": path, MARK: str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    return {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", **own, **extra}


@dataclass
class Troupe:
    """The processes at work on one store."""

    place: str
    store: str
    folder: Path
    seed: int
    env: dict[str, str]
    pids: dict[tuple[str, int], int] = field(default_factory=dict)
    paused: dict[int, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.diaries = self.folder / "diaries"
        self.diaries.mkdir(parents=True, exist_ok=True)
        self.random = random.Random(self.seed)
        (self.folder / "storm.yaml").write_text(PIPELINE)
        command = [sys.executable, str(HERE / "nursery.py")]
        self.nursery = subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.begin("reader", 0)  # gives its number when all is imported

    @property
    def generation(self) -> int:
        """Seed of the pipeline runs: both of the cast run the same, which changes after one of them is through."""
        return sum(entry["what"] == "run" and entry["code"] == 0 for entry in entries(self.diaries, "run-*"))

    def begin(self, role: str, number: int) -> None:
        self.counts["started"] += 1
        arguments = [role, self.store, str(self.diaries), str(number), f"{self.seed}{self.counts['started']:04d}"]
        if role == "run":
            arguments += ["storm.yaml", "--set", f"seed={self.generation}", *["--no-prefect"][number:]]
        assert self.nursery.stdin
        assert self.nursery.stdout
        self.nursery.stdin.write(json.dumps(arguments) + "\n")
        self.nursery.stdin.flush()
        self.pids[role, number] = int(self.nursery.stdout.readline())

    def keep_going(self) -> None:
        """Start who is not at work."""
        for role, count in CAST[self.place].items():
            for number in range(count):
                if not psutil.pid_exists(self.pids.get((role, number), -1)):
                    self.begin(role, number)

    def strike(self) -> None:
        """Something befalls one of them, or a process that it has started."""
        role, number = self.random.choice(list(self.pids))
        if role == "run" and self.random.random() < 0.5:  # a run takes its time, and some shall come to their end
            return
        pid = self.random.choice([self.pids[role, number], *_children(self.pids[role, number])])
        what = self.random.choices([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], [5, 3, 2])[0]
        if pid not in self.paused and send(pid, what):
            self.counts[what.name] += 1
            if what is signal.SIGSTOP:
                self.paused[pid] = time.monotonic() + self.random.choice([0.3, 1, 2, 6])

    def resume(self) -> None:
        """Let those go on whose pause is over."""
        for pid, until in list(self.paused.items()):
            if time.monotonic() >= until:
                del self.paused[pid]
                send(pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill the cast. What its members have started must end by itself."""
        for pid in self.pids.values():
            send(pid, signal.SIGKILL)
        for pid in self.paused:
            send(pid, signal.SIGCONT)
        self.nursery.communicate()


def send(pid: int, what: signal.Signals) -> bool:
    """Whether there was a process to send the signal to."""
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return False
    return True


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def rage(troupe: Troupe, seconds: float, pace: float) -> None:
    """The storm itself. At its end every actor is killed. ``pace`` stretches the time from strike to strike."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            troupe.keep_going()
            troupe.resume()
            time.sleep(troupe.random.uniform(0.1, 1.0) * pace)
            troupe.strike()
    finally:
        troupe.end()


def survivors(folder: Path, patience_s: float) -> list[psutil.Process]:
    """Processes of a storm that are still there after some seconds."""
    until = time.monotonic() + patience_s
    while (result := list(_marked(folder))) and time.monotonic() < until:
        time.sleep(0.2)
    return result


def _marked(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue
