"""What training taught each policy, beyond what a lower temperature gives: see
:mod:`agentrl.statistics.sharpening`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines.results.measured import ROWS, Task, attempts_of, counts_of, drawn_as
from agentrl.schemas.manifest import Manifest
from agentrl.schemas.trajectory import CONTROL
from agentrl.statistics.paired import Difference
from agentrl.statistics.sharpening import Judgement, Learned, judged, paired, said_p

Outcomes = Mapping[Task, float]
Policy = tuple[str, str]
"""Stage and fingerprint of a model."""


@dataclass(frozen=True)
class PolicyOutcomes:
    """What an evaluation measured of a policy, by task: at temperature 1, greedy, and at the ``temperature`` that is
    best on dev tasks; ``best`` is None if that was not measured."""

    stage: str
    policy: str
    sampled: Outcomes
    greedy: Outcomes
    best: Outcomes | None
    temperature: float | None


def policy_outcomes(catalog: Catalog, manifest: Manifest, policy: str = "") -> PolicyOutcomes:
    """What an evaluation measured. Raises LookupError if it has no scored rollouts."""
    handle = attempts_of(catalog, TrajectoryBuffer(catalog.storage.uri), manifest)
    rows = handle.table(ROWS).to_pylist()
    sampled, greedy, control = (_outcomes(drawn_as(rows, decoding)) for decoding in ("sampled", "greedy", CONTROL))
    temperature = _best_temperature(catalog, manifest)
    best = {None: None, 0.0: greedy, 1.0: sampled}.get(temperature, control)
    models = [record.stage for record in manifest.ingredients.inputs.get("model", [])]
    named = policy or (models or [manifest.ingredients.stage])[0]
    return PolicyOutcomes(manifest.ingredients.stage, named, sampled, greedy, best, temperature)


def _outcomes(rows: Sequence[Mapping[str, Any]]) -> Outcomes:
    return {task: successes / attempts for task, (attempts, successes) in counts_of(rows).items()}


def _best_temperature(catalog: Catalog, manifest: Manifest) -> float | None:
    if "results" not in manifest.outputs:
        return None
    table = pq.read_table(catalog.local(manifest, manifest.outputs["results"].path)).to_pylist()
    return next((row["temperature"] for row in table if row.get("decoding") == CONTROL), None)


@dataclass(frozen=True)
class Gain:
    """What training made of a policy over its predecessor. ``best`` is the difference between both at their best
    temperatures, over the control for sharpening; ``sampled`` and ``greedy`` are those at temperature 1 and 0."""

    policy: str
    than: str
    judgement: Judgement
    sampled: Difference | None
    greedy: Difference | None
    best: Difference | None
    levels: Mapping[str, tuple[float, float]]
    """Success of the predecessor and of the policy: ``sampled``, ``greedy`` and ``best``, as far as they are known."""
    test: str
    """Whose the p values are."""
    control: Sequence[float] = ()
    """The best temperatures of the predecessor, one for each seed."""

    @property
    def word(self) -> Learned:
        return self.judgement.word

    @property
    def verdict(self) -> str:
        return _SAID[self.word].format(self.policy, self.than)

    def __str__(self) -> str:
        """In words, with the differences that say so."""
        kinds = {"best": f"over {self.than} {self._at_best}", "sampled": "at temperature 1"}
        told = []
        for kind, how in (kinds | {"greedy": "greedy"}).items():
            if contrast := getattr(self, kind):
                before, after = self.levels[kind]
                told.append(f"{how}: {before:.3f} -> {after:.3f}, {in_words(contrast, self.test)}")
        why = f" ({self.judgement.why})" if self.judgement.why else ""
        return "; ".join([f"{self.verdict}{why}", *told])

    @property
    def brief(self) -> str:
        """What counts alone: the verdict and the difference to the control, or why there is none."""
        if self.best is None:
            return f"{self.verdict}: {self.judgement.why}"
        before, after = self.levels["best"]
        levels = f"{before:.3f} {self._at_best} -> {after:.3f}"
        return f"{self.verdict}: {levels}, {in_words(self.best, self.test)}"

    @property
    def _at_best(self) -> str:
        temperatures = ", ".join(f"{temperature:g}" for temperature in dict.fromkeys(self.control))
        return f"at its best temperature {temperatures}"

    def to_json(self) -> dict[str, Any]:
        differences = {name: getattr(self, name) for name in ("sampled", "greedy", "best")}
        told = {name: vars(value) if value else None for name, value in differences.items()}
        who = {"policy": self.policy, "than": self.than, "word": self.word, "why": self.judgement.why}
        return {**who, **told, "levels": self.levels, "control": list(self.control), "said": str(self)}


_SAID = {
    Learned.ADDS: "{0} adds to {1}",
    Learned.SHARPENS: "{0} sharpens {1}: a lower temperature gives as much",
    Learned.NONE: "{0} gains none over {1}",
    Learned.WORSE: "{0} is worse than {1}",
    Learned.CANNOT_TELL: "cannot tell whether {0} adds to {1}",
}


def in_words(contrast: Difference, test: str = "McNemar") -> str:
    points = (
        f"{contrast.mean * 100:+.1f} points (95 % interval {contrast.low * 100:+.1f} to {contrast.high * 100:+.1f})"
    )
    p = "" if contrast.p is None else f", {test} {said_p(contrast.p)}"
    return f"{points}, {contrast.gained} gained, {contrast.lost} lost of {contrast.tasks} tasks{p}"


def gain(before: Sequence[PolicyOutcomes], after: Sequence[PolicyOutcomes]) -> Gain:
    """What policies gained over others, paired in their order: one of both, or those of several seeds."""
    kinds = ("sampled", "greedy", "best")
    sampled, greedy, best = (_difference(before, after, kind) for kind in kinds)
    levels = {kind: (_mean(before, kind), _mean(after, kind)) for kind in kinds if _measured(before, after, kind)}
    judgement = judged(best, sampled)
    stages = list(dict.fromkeys(outcomes.stage for outcomes in (*before, *after) if outcomes.best is None))
    lacking = ", ".join(stages[:2]) + (f" and {len(stages) - 2} more" if len(stages) > 2 else "")
    if not before or (best is None and not lacking):
        judgement = Judgement(judgement.word, "they share no seed" if not before else "they share no task")
    elif lacking:
        judgement = Judgement(
            judgement.word, f"the control was not run; set inputs.dev of {lacking}, as in dev: tasks.dev"
        )
    control = [outcomes.temperature for outcomes in before if outcomes.temperature is not None]
    once = {outcome for outcomes in (*before, *after) for outcome in outcomes.sampled.values()} <= {0.0, 1.0}
    test = "exact McNemar" if once else "randomization"
    return Gain(_name(after), _name(before), judgement, sampled, greedy, best, levels, test, control)


def _name(each: Sequence[PolicyOutcomes]) -> str:
    return ", ".join(dict.fromkeys(outcomes.policy for outcomes in each))


def _measured(before: Sequence[PolicyOutcomes], after: Sequence[PolicyOutcomes], kind: str) -> bool:
    return bool(before) and all(getattr(outcomes, kind) for outcomes in (*before, *after))


def _mean(each: Sequence[PolicyOutcomes], kind: str) -> float:
    return fmean(outcome for outcomes in each for outcome in getattr(outcomes, kind).values())


def _difference(before: Sequence[PolicyOutcomes], after: Sequence[PolicyOutcomes], kind: str) -> Difference | None:
    if not _measured(before, after, kind):
        return None
    try:
        return paired(*([getattr(outcomes, kind) for outcomes in each] for each in (before, after)))
    except ValueError:  # they share no task
        return None


def gains(catalog: Catalog, evaluations: Iterable[Manifest]) -> dict[str, Gain]:
    """What each of ``evaluations`` shows that training made of its policy, by its fingerprint, over the nearest
    predecessor of which one of them is on the same tasks. A policy without one is left out."""
    outcomes: dict[str, PolicyOutcomes] = {}

    def of(evaluation: Manifest) -> PolicyOutcomes:
        if evaluation.fingerprint not in outcomes:
            outcomes[evaluation.fingerprint] = policy_outcomes(catalog, evaluation)
        return outcomes[evaluation.fingerprint]

    return {
        evaluation.fingerprint: gain([of(before)], [of(evaluation)])
        for before, evaluation in predecessors(catalog, evaluations)
    }


def predecessors(catalog: Catalog, evaluations: Iterable[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """For each of ``evaluations``, that of the nearest predecessor of its policy on the same tasks, and it; those
    without one are left out."""
    known = {key: evaluation for evaluation in evaluations for key in _measured_of(evaluation)}
    for (policy, tasks), evaluation in known.items():
        before = next(
            (known[ancestor, tasks] for ancestor in ancestors(catalog, policy) if (ancestor, tasks) in known), None
        )
        if before is not None:
            yield before, evaluation


def _measured_of(manifest: Manifest) -> list[tuple[Policy, str | None]]:
    """The policy that an evaluation measured, and the digest of its tasks."""
    inputs = manifest.ingredients.inputs
    if "results" not in manifest.outputs or "trajectories" not in manifest.outputs:
        return []
    models, tasks = inputs.get("model", []), inputs.get("tasks", [])
    return [((models[0].stage, models[0].fingerprint), tasks[0].digest)] if len(models) == 1 and tasks else []


def ancestors(catalog: Catalog, policy: Policy) -> Iterator[Policy]:
    """The models that training of a policy started from, the nearest first."""
    seen = {policy}
    while (made := catalog.manifest(*policy)) is not None:
        models = made.ingredients.inputs.get("model", [])
        if len(models) != 1 or (policy := (models[0].stage, models[0].fingerprint)) in seen:
            return
        seen.add(policy)
        yield policy


def gain_of(catalog: Catalog, evaluation: Manifest) -> Gain | None:
    """What one evaluation shows, with the newest one of the store of its nearest predecessor on the same tasks."""
    older = [
        manifest
        for manifest in catalog.all()
        if manifest.ingredients.uses == evaluation.ingredients.uses and manifest.fingerprint != evaluation.fingerprint
    ]
    newest = {
        key: manifest
        for manifest in sorted(older, key=lambda manifest: manifest.created_at)
        for key in _measured_of(manifest)
    }
    for policy, tasks in _measured_of(evaluation):
        for ancestor in ancestors(catalog, policy):
            if before := newest.get((ancestor, tasks)):
                return gain([policy_outcomes(catalog, before)], [policy_outcomes(catalog, evaluation)])
    return None
