"""What a person sees in a notebook while something works: one output of the cell, which is updated in place."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.flows.display import Metrics, metrics_text, seconds
from agentrl.pipelines.displays import Frame, escaped

EVERY_S = 0.2
"""Seconds between two updates, at least; the last state is always shown."""
ENDED = 100
"""Lines about what has ended, at most; earlier ones are counted."""

_LINE = "font-family:ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere"


@dataclass
class _Work:
    began: float
    done: int = 0
    total: int | None = None
    metrics: str = ""


class _Shown:
    """The output as HTML, and as text for what shows no HTML."""

    def __init__(self, html: str, text: str) -> None:
        self._html, self._text = html, text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html


class Cell:
    """A :class:`~agentrl.flows.display.Display` whose output is a line for all that has ended, and a bar for each piece
    of work that goes on. Updates come from the threads in which things happen. Work that is no run of stages shows
    itself when it first says how far it is: what is done at once leaves no output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: dict[str, _Work] = {}
        self._lines: list[str] = []
        self._stages = self._ended = 0
        self._handle: Any = None
        self._updated = 0.0
        self._alone = False

    def open(self) -> None:
        self._alone = True

    def start(self, to_run: Mapping[str, float | None], cached: int, engine: str) -> None:
        self._stages = len(to_run)
        self.note(f"{len(to_run)} stages to run, {cached} cached; {engine}")

    @property
    def note(self) -> Callable[[str], None]:
        return self._note

    def _note(self, text: str) -> None:
        with self._lock:
            self._lines.append(text)
        self._show()

    def stage_started(self, name: str) -> None:
        with self._lock:
            self._work[name] = _Work(time.monotonic())
        self._show_if_begun()

    def progress(self, name: str, done: int, total: int | None, metrics: Metrics) -> None:
        with self._lock:
            if (work := self._work.get(name)) is None:
                return
            work.done, work.total, work.metrics = done, total, metrics_text(metrics)
        if time.monotonic() - self._updated >= EVERY_S:
            self._show()

    def stage_ended(self, name: str, text: str, ok: bool) -> None:
        with self._lock:
            self._work.pop(name, None)
            self._ended += ok
            self._lines.append(f"{'✓' if ok else '✗'} {name}  {text}")
        self._show_if_begun()

    def stop(self) -> None:
        with self._lock:
            self._work.clear()
        self._show_if_begun()

    def _show_if_begun(self) -> None:
        if self._handle is not None or not self._alone:
            self._show()

    def _show(self) -> None:
        from IPython.display import display

        with self._lock:
            self._updated = time.monotonic()
            shown = self._render()
            if self._handle is None:
                self._handle = display(shown, display_id=True)
            else:
                self._handle.update(shown)

    def _render(self) -> _Shown:
        lines = self._lines[-ENDED:]
        if left := len(self._lines) - len(lines):
            lines = [f"{left} lines before", *lines]
        frame, texts = Frame(), list(lines)
        for line in lines:
            frame.add(f'<div style="{_LINE}">{escaped(line)}</div>')
        if self._stages and self._work:
            frame.add(_bar(self._ended, self._stages, f"{self._ended}/{self._stages} stages"))
        for name, work in self._work.items():
            texts.append(text := _said(name, work))
            frame.add(_bar(work.done, work.total, text))
        return _Shown(frame.done(), "\n".join(texts))


def _said(name: str, work: _Work) -> str:
    took = time.monotonic() - work.began
    left = took / work.done * (work.total - work.done) if work.total and work.done else None
    parts = [
        f"{work.done}/{work.total}" if work.total else str(work.done or ""),
        seconds(took),
        "" if left is None else f"{seconds(left)} left",
        work.metrics,
    ]
    return f"{name}  {'  '.join(filter(None, parts))}"


def _bar(done: int, total: int | None, text: str) -> str:
    """A bar; one that only moves if the total is not known."""
    known = f' value="{done}" max="{total}"' if total else ""
    bar = f'<progress{known} style="width:160px;margin-right:8px;vertical-align:middle"></progress>'
    return f'<div style="{_LINE}">{bar}{escaped(text)}</div>'
