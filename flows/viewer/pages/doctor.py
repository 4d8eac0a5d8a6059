"""What the doctor says of a run. It may load models, so it works in a process of its own."""

from collections.abc import Iterator
from typing import Any

from agentrl.flows.viewer.pages.run import RunQuery, run_named
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer
from agentrl.pipelines.run.runs import Run


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


def doctor(reader: StoreReader, question: RunQuery) -> Diagnosis:
    """What it found; it looks again only if a stage of the run began or ended. Raises RefusedError if there is no such
    run."""
    run = run_named(reader.catalog, question.run)
    stages = sorted((name, str(stage["status"])) for name, stage in run["stages"].items())
    arguments = ["doctor", run["run_id"], "--store", reader.store, "--json"]
    told = reader.diagnoses.of(arguments, about=f"{run.get('ended_at')} {stages}")
    known = told.answer.get("stages", {}) if told else {}
    return Diagnosis(
        run_id=run["run_id"],
        working=told is None,
        problem=told.problem or None if told else None,
        stages=list(known),
        findings=list(_findings(run, known)),
    )


def _findings(run: Run, stages: dict[str, list[dict[str, Any]]]) -> Iterator[Symptom]:
    for stage, findings in stages.items():
        fingerprint = run["stages"].get(stage, {}).get("fingerprint")
        artifact = f"{stage}/{fingerprint[:8]}" if fingerprint else None
        yield from (Symptom(stage=stage, artifact=artifact, **finding) for finding in findings)
