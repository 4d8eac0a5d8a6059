"""Training steps that are computed again. That loads a model, so each has a process of its own, and one runs at a
time."""

import atexit
import json
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

from agentrl.flows.viewer.pages.training import trained
from agentrl.flows.viewer.processes import begun
from agentrl.flows.viewer.query.artifacts import Artifacts
from agentrl.flows.viewer.query.tables import Recent
from agentrl.flows.viewer.refused import RefusedError
from agentrl.flows.viewer.wire.training import ReplayAnswer, Replayings
from agentrl.schemas.manifest import Manifest

KEPT = 64
"""Answers that are kept."""

Key = tuple[str, int, tuple[str, ...]]
"""STAGE/FINGERPRINT, step, settings."""


@dataclass
class _AtWork:
    """The replay that runs now."""

    key: Key
    process: "subprocess.Popen[str]"
    began: float
    stopped: bool = False


class Replays:
    """What steps gave when they were computed again, by artifact, step and settings."""

    def __init__(self, artifacts: Artifacts, store: str) -> None:
        self.artifacts = artifacts
        self.store = store
        self._known: Recent[Key, ReplayAnswer] = Recent(KEPT)
        self._at_work: _AtWork | None = None
        self._lock = threading.Lock()
        atexit.register(self.stop)

    def start(self, artifact: str, step: int, settings: list[str]) -> ReplayAnswer:
        """Begin to compute a step again, unless that was done. Raises RefusedError if the artifact trained nothing, or
        another step is computed now."""
        manifest, key = self._key(artifact, step, settings)
        with self._lock:
            work = self._at_work
            known = self._known.get(key)
            if known is not None and known.problem is None:
                return known
            if work is not None and work.key != key:
                reason = f"step {work.key[1]} of {work.key[0][:80]} is computed now; one is computed at a time"
                raise RefusedError(reason, following="wait for it, or stop it", status=409)
            if work is None:
                self._known.pop(key, None)
                work = self._at_work = _AtWork(key, self._begin(manifest, step, settings), time.monotonic())
                threading.Thread(target=self._wait, args=(work,), daemon=True).start()
            return _working(work)

    def of(self, artifact: str, step: int) -> Replayings:
        """The replays of a step, oldest first."""
        _, wanted = self._key(artifact, step, [])
        with self._lock:
            answers = [answer for key, answer in self._known.items() if key[:2] == wanted[:2]]
            if (work := self._at_work) is not None and work.key[:2] == wanted[:2]:
                answers.append(_working(work))
        return Replayings(replays=answers)

    def stop(self) -> None:
        """End the replay that runs now, if one does."""
        with self._lock:
            if self._at_work is not None:
                self._at_work.stopped = True
                self._at_work.process.terminate()

    def _key(self, artifact: str, step: int, settings: list[str]) -> tuple[Manifest, Key]:
        manifest = trained(self.artifacts, artifact)
        return manifest, (f"{manifest.ingredients.stage}/{manifest.fingerprint}", step, tuple(settings))

    def _begin(self, manifest: Manifest, step: int, settings: list[str]) -> "subprocess.Popen[str]":
        options = [f"--step={step}", *(f"--set={setting}" for setting in settings), f"--store={self.store}", "--json"]
        return begun("replay", *options, "--", f"{manifest.ingredients.stage}/{manifest.fingerprint}")

    def _wait(self, work: _AtWork) -> None:
        out, error = work.process.communicate()
        answer = replayed(work.key, out, error, time.monotonic() - work.began)
        if work.stopped:
            answer = _answer(work.key, seconds=answer.seconds, problem="it was stopped")
        with self._lock:
            self._known.get_or(work.key, lambda: answer)
            self._at_work = None


def _working(work: _AtWork) -> ReplayAnswer:
    return _answer(work.key, working=True, seconds=time.monotonic() - work.began)


def replayed(key: Key, out: str, error: str, seconds: float) -> ReplayAnswer:
    """What `agentrl replay --json` printed."""
    try:
        document = json.loads(out)
        numbers = {name: document[name] for name in ("rows", "recorded", "replayed", "equal")}
    except (ValueError, KeyError):
        lines = error.strip().splitlines() or ["it ended without a word"]
        return _answer(key, seconds=seconds, problem=lines[-1].removeprefix("error: ")[:500])
    return _answer(key, seconds=seconds, **numbers)


def _answer(key: Key, **values: Any) -> ReplayAnswer:
    nothing: dict[str, Any] = {"working": False, "seconds": 0.0, "problem": None, "rows": None}
    nothing |= {"recorded": {}, "replayed": {}, "equal": None}
    return ReplayAnswer(artifact=key[0], step=key[1], settings=list(key[2]), **{**nothing, **values})
