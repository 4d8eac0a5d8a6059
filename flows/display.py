"""What a person sees while a pipeline runs: progress bars on a terminal, otherwise one line per event."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn
from rich.table import Column
from rich.text import Text

from agentrl.schemas.shards import ShardsNow

Metrics = Mapping[str, float | int | str | ShardsNow | None]

WIDE = 110
"""Columns of a terminal that has room for long bars."""

LINE_EVERY_S = 30.0
"""Seconds between two lines about one stage if there is no terminal."""


def seconds(value: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def metrics_text(metrics: Metrics) -> str:
    shown = ((key, f"{value:.4g}" if isinstance(value, float) else value) for key, value in metrics.items())
    return "  ".join(f"{key} {value}" for key, value in shown)


class Display(Protocol):
    """Shows the events of a run. Its methods may be called from several threads."""

    def start(self, to_run: Mapping[str, float | None], cached: int, engine: str) -> None:
        """Stages that will run, with how long each took last time, in seconds; ``engine`` says what runs them."""

    def open(self) -> None:
        """Begin to show one piece of work that is no run of stages; ``start`` is not called then."""

    @property
    def note(self) -> Callable[[str], None]:
        """Say one thing."""

    def stage_started(self, name: str) -> None: ...

    def progress(self, name: str, done: int, total: int | None, metrics: Metrics) -> None: ...

    def stage_ended(self, name: str, text: str, ok: bool) -> None: ...

    def stop(self) -> None: ...


class Lines:
    """One line per event."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.note = write
        self._last: dict[str, float] = {}
        self._first: dict[str, tuple[float, int]] = {}
        self._number: dict[str, str] = {}
        self._said: set[str] = set()
        self._alone = False

    def open(self) -> None:
        self._alone = True

    def start(self, to_run: Mapping[str, float | None], cached: int, engine: str) -> None:
        self._number = {name: f"[{number}/{len(to_run)}]" for number, name in enumerate(to_run, 1)}
        self.note(f"{len(to_run)} stages to run, {cached} cached; {engine}")

    def stage_started(self, name: str) -> None:
        self._last[name] = time.monotonic()
        if not self._alone:
            self.note(f"{self._number.get(name, '')} {name}: started")

    def progress(self, name: str, done: int, total: int | None, metrics: Metrics) -> None:
        now = time.monotonic()
        began, before = self._first.setdefault(name, (now, done))
        if now - self._last.get(name, 0.0) >= LINE_EVERY_S:
            self._last[name] = now
            of = f"/{total}" if total else ""
            left = (now - began) / (done - before) * (total - done) if total and done > before else None
            parts = [f"{done}{of}", metrics_text(metrics), "" if left is None else f"{seconds(left)} left"]
            self._said.add(name)
            self.note(f"{self._number.get(name, '')} {name}: {'  '.join(filter(None, parts))}".lstrip())

    def stage_ended(self, name: str, text: str, ok: bool) -> None:
        """Work that is no stage is mentioned if it was long."""
        if not self._alone or name in self._said:
            self.note(f"{self._number.get(name, '')} {name}: {text}".lstrip())

    def stop(self) -> None:
        pass


class Live:
    """A bar for the run and one for each stage at work; lines about stages that have ended appear above them."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._lock = threading.Lock()
        self._stages: dict[str, TaskID] = {}
        self._expected: dict[str, float | None] = {}
        self._began: dict[str, float] = {}
        # On a narrow terminal the bar is short, and metrics are cut, because they are missed least.
        metrics = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30 if console.width >= WIDE else 10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeLeftColumn(),
            TextColumn("{task.fields[metrics]}", markup=False, table_column=metrics),
            console=console,
            expand=True,
            transient=True,
        )
        self._all: TaskID | None = None

    def open(self) -> None:
        self._progress.start()

    def start(self, to_run: Mapping[str, float | None], cached: int, engine: str) -> None:
        self._expected = dict(to_run)
        self.note(f"{len(to_run)} stages to run, {cached} cached; {engine}")
        self._all = self._progress.add_task("stages", total=len(to_run), metrics=self._left())
        self.open()

    def _left(self) -> str:
        """Seconds that the stages which have not ended took last time."""
        known = [value for value in self._expected.values() if value is not None]
        return f"about {seconds(sum(known))} left" if known and len(known) == len(self._expected) else ""

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def stage_started(self, name: str) -> None:
        with self._lock:
            self._began[name] = time.monotonic()
            self._stages[name] = self._progress.add_task(name, total=None, metrics="")

    def progress(self, name: str, done: int, total: int | None, metrics: Metrics) -> None:
        if name in self._stages:
            self._progress.update(self._stages[name], completed=done, total=total, metrics=metrics_text(metrics))

    def stage_ended(self, name: str, text: str, ok: bool) -> None:
        with self._lock:
            if name in self._stages:
                self._progress.remove_task(self._stages.pop(name))
            self._expected.pop(name, None)
            mark = Text("✓", style="green") if ok else Text("✗", style="red")
            self._progress.console.print(mark, end=" ")
            self._progress.console.print(f"{name}  {text}", highlight=False, markup=False)
            if ok and self._all is not None:
                self._progress.update(self._all, advance=1, metrics=self._left())

    def stop(self) -> None:
        self._progress.stop()


class Quiet:
    """Prints nothing, for ``--json``."""

    def open(self) -> None: ...

    def start(self, to_run: Mapping[str, float | None], cached: int, engine: str) -> None: ...

    def note(self, text: str) -> None: ...

    def stage_started(self, name: str) -> None: ...

    def progress(self, name: str, done: int, total: int | None, metrics: Metrics) -> None: ...

    def stage_ended(self, name: str, text: str, ok: bool) -> None: ...

    def stop(self) -> None: ...
