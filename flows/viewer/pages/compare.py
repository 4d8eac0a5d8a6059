"""Did the policy get better, and on what: evaluations side by side, and the newest policy against the one before it."""

from typing import Any

import pyarrow.parquet as pq
from pydantic import Field

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.query.artifacts import Artifacts, label
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, Query, RefusedError
from agentrl.pipelines.results.gains import predecessors
from agentrl.schemas.manifest import Manifest
from agentrl.schemas.trajectory import CONTROL
from agentrl.statistics.paired import Difference
from agentrl.statistics.sharpening import said_p

EVALUATION = "evaluate.policy"
CHANGED = 500
PROMPT = 300
"""Characters of a prompt in a list."""
LOST = 5
"""Lost tasks that are named beside the sentence that says whether the policy got better."""


class ArmsQuery(Query):
    than: str = Field(min_length=1, max_length=300)
    arm: str = Field(min_length=1, max_length=300)
    greedy: bool = False


class LevelResult(Answer):
    """Success on one level of one environment; ``level`` -1 is all levels, ``env`` "" all environments.
    ``control`` is the temperature that did best on dev tasks, if this is success at it as the control for
    sharpening."""

    env: str
    level: int
    greedy: bool
    control: float | None
    tasks: int
    n: int
    success: float
    low: float
    high: float


class EvaluatedPolicy(Answer):
    """An evaluation. ``artifact`` is STAGE/FINGERPRINT, as /api/compare takes it; ``when`` is ISO 8601."""

    artifact: str
    stage: str
    policy: str
    split: str
    when: str
    results: list[LevelResult]


class Evaluations(Answer):
    """Newest first."""

    evaluations: list[EvaluatedPolicy]


class ComparedArm(Answer):
    """Success over all tasks with its 95 % interval; ``unscored`` rows have no outcome and are left out."""

    name: str
    artifacts: list[str]
    policies: list[str]
    tasks: int
    unscored: int
    success: float
    low: float
    high: float


class ChangedTask(Answer):
    """Success before and after, as shares of the attempts."""

    env: str
    task_id: str
    prompt: str
    before: float
    after: float


class PairedDifference(Answer):
    """``than`` is compared with ``arm`` on the tasks of both: the difference of success with its 95 % interval
    (bootstrap over tasks), McNemar's ``p`` if each task has one attempt in both, and the verdict in words.
    ``sentence`` says it shortly, by the names of the policies; ``shown`` says whether there is a difference. ``word``
    says what ``arm`` gained over ``than`` at its best temperature, the control for sharpening (adds, sharpens, none,
    worse, cannot tell), and ``learned`` says that with its figures, or why nobody can tell; None and empty if they are
    no evaluations. At most 500 tasks each are listed as gained and lost; ``tasks_gained`` and ``tasks_lost`` count
    all."""

    than: ComparedArm
    arm: ComparedArm
    greedy: bool
    mean: float
    low: float
    high: float
    p: float | None
    tasks: int
    unshared: int
    tasks_gained: int
    tasks_lost: int
    verdict: str
    sentence: str
    shown: bool
    word: str | None
    learned: str
    gained: list[ChangedTask]
    lost: list[ChangedTask]


class Better(Answer):
    """The newest policy against the one before it, at temperature 1, with at most 5 of the tasks that it lost; None if
    there are no two evaluations of the same tasks."""

    difference: PairedDifference | None


def evaluations(reader: StoreReader, question: Query) -> Evaluations:
    """All evaluations of the store, with their results by environment and level."""
    listed, artifacts = [], reader.artifacts
    for manifest in artifacts.all():
        if manifest.ingredients.uses != EVALUATION or "results" not in manifest.outputs:
            continue
        try:
            rows = pq.read_table(artifacts.catalog.open(manifest, manifest.outputs["results"].path)).to_pylist()
        except (OSError, StoreError):
            continue  # freed since the list was read
        if not rows:
            continue
        listed.append(
            EvaluatedPolicy(
                artifact=label(manifest),
                stage=manifest.ingredients.stage,
                policy=rows[0]["policy"],
                split=rows[0]["split"],
                when=manifest.created_at.isoformat(),
                results=[
                    LevelResult(
                        env=row.get("env") or "",
                        level=row["level"],
                        greedy=row["decoding"] == "greedy",
                        control=row["temperature"] if row["decoding"] == CONTROL else None,
                        tasks=row["tasks"],
                        n=row.get("attempts") or row["tasks"],
                        success=row["success"],
                        low=row["low"],
                        high=row["high"],
                    )
                    for row in rows
                    if row["decoding"] != "dev"
                ],
            )
        )
    return Evaluations(evaluations=listed)


def compared(reader: StoreReader, question: ArmsQuery) -> PairedDifference:
    return difference_of(reader, question.than, question.arm, question.greedy)


def difference_of(reader: StoreReader, than: str, arm: str, greedy: bool) -> PairedDifference:
    """How ``arm`` differs from ``than``; what was computed before is kept."""
    return reader.compared.get_or((than, arm, greedy), lambda: _difference(reader.catalog, than, arm, greedy))


def _difference(catalog: Catalog, than: str, arm: str, greedy: bool) -> PairedDifference:
    """How ``arm`` differs from ``than``, as `agentrl compare` says it. Raises RefusedError if one of them was not
    measured, or they share no task."""
    from agentrl.pipelines.results.compare import compare

    try:
        comparison = compare(catalog, [than, arm], greedy=greedy)
    except LookupError as error:
        raise RefusedError(str(error.args[0]), field="arm", following="agentrl compare --help", status=404) from None
    if len(comparison.arms) != 2:
        raise RefusedError(
            f"{than} and {arm} are one arm: they differ by their seeds alone, or not at all", field="arm"
        )
    before, after = comparison.arms
    try:
        [(_, difference)] = comparison.differences()
    except ValueError as error:
        raise RefusedError(f"{than} and {arm} cannot be compared: {error}", field="arm") from None
    changed = [
        ChangedTask(env=env, task_id=task_id, prompt=prompt[:PROMPT], before=first, after=other)
        for (env, task_id, prompt), (first, other) in after.beside(before).items()
    ]
    gains = [task for task in changed if task.after > task.before]
    losses = [task for task in changed if task.after < task.before]
    gained = comparison.gains.get(after.name)
    return PairedDifference(
        than=_arm(before),
        arm=_arm(after),
        greedy=greedy,
        **{name: getattr(difference, name) for name in ("mean", "low", "high", "p", "tasks", "unshared", "shown")},
        tasks_gained=len(gains),
        tasks_lost=len(losses),
        verdict=comparison.said(after, difference),
        sentence=sentence(*_names(after, before), difference, greedy),
        word=gained.pooled.word.value if gained else None,
        learned=gained.pooled.brief if gained else "",
        gained=gains[:CHANGED],
        lost=losses[:CHANGED],
    )


def _names(after: Any, before: Any) -> tuple[str, str]:
    """The policies of two arms, or if those are called the same, the arms."""
    policies = [", ".join(dict.fromkeys(run.policy for run in arm.runs)) for arm in (after, before)]
    return (policies[0], policies[1]) if policies[0] != policies[1] else (after.name, before.name)


def _arm(arm: Any) -> ComparedArm:
    estimate = arm.estimate
    return ComparedArm(
        name=arm.name,
        artifacts=[run.label for run in arm.runs],
        policies=[run.policy for run in arm.runs],
        tasks=len({task for run in arm.runs for task in run.outcomes}),
        unscored=sum(run.unscored for run in arm.runs),
        success=estimate.mean,
        low=estimate.low,
        high=estimate.high,
    )


def sentence(after: str, before: str, contrast: Difference, greedy: bool) -> str:
    """Whether one policy is better than another, by how much and how sure that is."""
    points = f"{_signed(contrast.mean)} points of success {'greedily' if greedy else 'at temperature 1'}"
    sure = f"95 % interval {_signed(contrast.low)} to {_signed(contrast.high)}"
    sure += "" if contrast.p is None else f", McNemar {said_p(contrast.p)}"
    told = f"{points} ({sure}) over {contrast.tasks:,} task{'' if contrast.tasks == 1 else 's'}"
    changed = f"{contrast.gained:,} gained, {contrast.lost:,} lost"
    if contrast.shown:
        return f"{after} is {'better' if contrast.mean > 0 else 'worse'} than {before}: {told}; {changed}."
    return f"{after} is not shown to be better or worse than {before}: {told}; {changed}."


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "\N{MINUS SIGN}")


# the newest policy


def better(reader: StoreReader, question: Query) -> Better:
    """The newest policy against the one before it."""
    two = newest_two(reader.catalog, reader.artifacts)
    try:
        difference = difference_of(reader, *two, greedy=False) if two else None
    except RefusedError:  # one was freed meanwhile, or has no attempts at temperature 1
        difference = None
    if difference is None:
        return Better(difference=None)
    few = {"gained": [], "lost": difference.lost[:LOST]}
    return Better(difference=difference.model_copy(update=few))


def newest_two(catalog: Catalog, artifacts: Artifacts) -> tuple[str, str] | None:
    """The newest policy of which a predecessor was evaluated on the same tasks: that evaluation, and its own after it.
    Of several sets of tasks, the one counts on which the control for sharpening of the predecessor was measured. If no
    policy has a predecessor, the two newest evaluations of different policies on the same tasks; None if there are
    none."""
    evaluations = [
        manifest
        for manifest in artifacts.all()
        if manifest.ingredients.uses == EVALUATION and {"results", "trajectories"} <= manifest.outputs.keys()
    ]
    oldest_first = list(reversed(evaluations))  # of equal ones the newest counts
    try:
        by_training = {evaluation.fingerprint: before for before, evaluation in predecessors(catalog, oldest_first)}
    except (OSError, StoreError):
        by_training = {}  # freed since the list was read
    trained = [evaluation for evaluation in evaluations if evaluation.fingerprint in by_training]
    of_newest = [evaluation for evaluation in trained if _digests(evaluation, "model") == _digests(trained[0], "model")]
    for evaluation in sorted(of_newest, key=lambda each: "dev" not in by_training[each.fingerprint].ingredients.inputs):
        return label(by_training[evaluation.fingerprint]), label(evaluation)
    for number, evaluation in enumerate(evaluations):
        before = next((other for other in evaluations[number + 1 :] if _policies_differ(other, evaluation)), None)
        if before is not None:
            return label(before), label(evaluation)
    return None


def _digests(evaluation: Manifest, name: str) -> set[str]:
    return {record.digest for record in evaluation.ingredients.inputs.get(name, [])}


def _policies_differ(older: Manifest, newer: Manifest) -> bool:
    """Whether two evaluations are of other models and of the same tasks."""
    tasks = _digests(newer, "tasks")
    return _digests(older, "model") != _digests(newer, "model") and _digests(older, "tasks") == tasks and bool(tasks)
