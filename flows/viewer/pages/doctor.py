"""What the doctor says of a run. It may load models, so it works in a process of its own."""

import json
import subprocess
import threading
from typing import TYPE_CHECKING

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.viewer.pages.run import RunQuery
from agentrl.flows.viewer.processes import command_of
from agentrl.flows.viewer.wire import Answer, RefusedError
from agentrl.pipelines.run.runs import Run, find_run

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader

PATIENCE_S = 600.0
"""Seconds that the doctor may take."""


class Symptom(Answer):
    """A finding of a stage, in words: what was measured, the bound beyond which it counts as sick, and what helps.
    ``rows`` show it, at most 50, at these ``tokens`` if tokens do. ``artifact`` is STAGE/FINGERPRINT, None if it is
    gone, and ``step`` is the step that shows it best, None if none does."""

    stage: str
    artifact: str | None
    name: str
    evidence: str
    threshold: str
    remedy: str
    rows: list[str]
    tokens: list[int]
    step: int | None


class Diagnosis(Answer):
    """``working`` is true while the doctor looks: ask again in a second. ``problem`` says why there are no findings."""

    run_id: str
    working: bool
    problem: str | None
    stages: list[str]
    findings: list[Symptom]


def doctor(reader: "StoreReader", question: RunQuery) -> Diagnosis:
    return reader.doctor.of(question.run)


class Doctor:
    """Diagnoses by run. One is made at a time, and made again only if a stage of the run began or ended."""

    def __init__(self, catalog: Catalog, store: str) -> None:
        self.catalog = catalog
        self.store = store
        self._known: dict[tuple[str, str], Diagnosis] = {}
        self._at_work: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def of(self, run: str) -> Diagnosis:
        """Raises RefusedError if there is no such run."""
        try:
            record = find_run(self.catalog, run)
        except LookupError as error:
            raise RefusedError(str(error.args[0]), field="run", status=404) from None
        stages = sorted((name, str(stage["status"])) for name, stage in record["stages"].items())
        key = (str(record["run_id"]), f"{record.get('ended_at')} {stages}")
        with self._lock:
            if key in self._known:
                return self._known[key]
            if key not in self._at_work and not self._at_work:
                self._at_work.add(key)
                threading.Thread(target=self._look, args=(key,), daemon=True).start()
        return Diagnosis(run_id=key[0], working=True, problem=None, stages=[], findings=[])

    def _look(self, key: tuple[str, str]) -> None:
        try:
            done = command_of("doctor", key[0], "--store", self.store, "--json", patience=PATIENCE_S)
            diagnosis = diagnosed(key[0], done, artifacts_of(find_run(self.catalog, key[0])))
        except Exception as error:  # shown, instead of an answer that never comes
            reason = f"the doctor failed: {type(error).__name__}: {error}"
            diagnosis = Diagnosis(run_id=key[0], working=False, problem=reason, stages=[], findings=[])
        with self._lock:
            self._known[key] = diagnosis
            self._at_work.discard(key)


def artifacts_of(run: Run) -> dict[str, str]:
    """STAGE/FINGERPRINT of the stages of a run that have one."""
    fingerprints = {name: stage.get("fingerprint") for name, stage in run["stages"].items()}
    return {name: f"{name}/{fingerprint[:8]}" for name, fingerprint in fingerprints.items() if fingerprint}


def diagnosed(run_id: str, done: "subprocess.CompletedProcess[str]", artifacts: dict[str, str]) -> Diagnosis:
    """What `agentrl doctor --json` printed."""
    try:
        stages = json.loads(done.stdout)["stages"]
    except (ValueError, KeyError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Diagnosis(run_id=run_id, working=False, problem=lines[0][:300], stages=[], findings=[])
    findings = [
        Symptom(stage=stage, artifact=artifacts.get(stage), **finding)
        for stage, each in stages.items()
        for finding in each
    ]
    return Diagnosis(run_id=run_id, working=False, problem=None, stages=list(stages), findings=findings)
