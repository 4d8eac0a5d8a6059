"""Did the policy get better, and on what: evaluations side by side, the attempts at one task, and where two rows
part."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
from pydantic import Field

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.query.artifacts import label, numbers
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.wire import Answer, AtVersion, Query, RefusedError, TaskQuery
from agentrl.schemas.trajectory import CONTROL
from agentrl.statistics.intervals import wilson
from agentrl.statistics.paired import Difference
from agentrl.statistics.sharpening import said_p

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader

EVALUATION = "evaluate.policy"
CHANGED = 500
PROMPTS = 5
ATTEMPTS = 1024
PROMPT = 300
"""Characters of a prompt in a list."""


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


class AttemptLine(Answer):
    trajectory_id: str
    success: bool | None
    reward: float | None
    sample_index: int
    n_tokens: int
    n_tool_errors: int
    termination: str


class Strip(Answer):
    """The attempts of one version of one policy in one stage at one temperature, in the order of time (at most 1,024),
    with success over the ``n`` that have an outcome, and its Wilson interval; they are None if none has. The segments
    of an episode are one attempt. ``rows`` counts all attempts."""

    stage: str
    policy: str
    policy_version: int
    temperature: float | None
    greedy: bool
    rows: int
    n: int
    success: float | None
    low: float | None
    high: float | None
    attempts: list[AttemptLine]


class TaskAttempts(Answer):
    """``rows`` counts all attempts. ``prompts`` are the different ones, of at most 5."""

    version: int
    env: str
    task_id: str
    prompts: list[str]
    rows: int
    strips: list[Strip]


class TwoRows(AtVersion):
    a: str
    b: str


class Aligned(Answer):
    """Where two rows part. ``shared`` counts the tokens that they begin with alike, so it is the first token that
    differs; None if they cannot be compared, and ``reason`` says why. ``flipped``: one succeeded, the other failed."""

    version: int
    a: str
    b: str
    shared: int | None
    reason: str
    same: bool
    flipped: bool


def evaluations(reader: "StoreReader", question: Query) -> Evaluations:
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


def compared(reader: "StoreReader", question: ArmsQuery) -> PairedDifference:
    return difference_of(reader, question.than, question.arm, question.greedy)


def difference_of(reader: "StoreReader", than: str, arm: str, greedy: bool) -> PairedDifference:
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
    beside = after.beside(before)

    def changed(gained: bool) -> list[ChangedTask]:
        chosen = ((task, pair) for task, pair in beside.items() if (pair[1] > pair[0] if gained else pair[1] < pair[0]))
        return [
            ChangedTask(env=env, task_id=task_id, prompt=prompt[:PROMPT], before=first, after=other)
            for (env, task_id, prompt), (first, other) in chosen
        ]

    gains, losses = changed(True), changed(False)
    gained = comparison.gains.get(after.name)
    return PairedDifference(
        than=_arm(before),
        arm=_arm(after),
        greedy=greedy,
        mean=difference.mean,
        low=difference.low,
        high=difference.high,
        p=difference.p,
        tasks=difference.tasks,
        unshared=difference.unshared,
        tasks_gained=len(gains),
        tasks_lost=len(losses),
        verdict=comparison.said(after, difference),
        sentence=sentence(*_names(after, before), difference, greedy),
        shown=difference.shown,
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


# one task


ATTEMPT = ("trajectory_id", "success", "reward", "sample_index", "n_tokens", "n_tool_errors", "termination")
STRIP = ("stage", "policy", "policy_version", "temperature", "greedy")
TEMPERATURE = pl.col("sampling").str.json_path_match("$.temperature").cast(pl.Float64, strict=False)
"""The temperature that a row was sampled at; null if the row does not say."""


def task(reader: "StoreReader", question: TaskQuery) -> TaskAttempts:
    return attempts_at(reader.tables.at(question.at), question.env, question.task_id)


def attempts_at(snapshot: Snapshot, env: str, task_id: str) -> TaskAttempts:
    """All attempts at a task, over stages and versions of policies. Raises RefusedError if there is none."""
    rows = _attempts(snapshot, env, task_id, [*ATTEMPT, *STRIP[:-2], "sampling", "prompt", "created_at"])
    rows = rows.with_columns(TEMPERATURE.alias("temperature"))
    rows = rows.with_columns(pl.col("temperature").eq(0.0).fill_null(value=False).alias("greedy"))
    strips = [_strip(part) for part in rows.partition_by(STRIP, maintain_order=True)]
    prompts = rows["prompt"].unique(maintain_order=True).head(PROMPTS).str.slice(0, PROMPT).to_list()
    return TaskAttempts(
        version=snapshot.version, env=env, task_id=task_id, prompts=prompts, rows=rows.height, strips=strips
    )


def newest_attempts(snapshot: Snapshot, env: str, task_id: str) -> tuple[list[str], int]:
    """Ids of the newest attempts at a task, in the order of time, and how many attempts there are. Raises RefusedError
    if there is none."""
    rows = _attempts(snapshot, env, task_id, ["trajectory_id", "created_at"])
    return rows["trajectory_id"].tail(ATTEMPTS).to_list(), rows.height


def _attempts(snapshot: Snapshot, env: str, task_id: str, columns: Sequence[str]) -> pl.DataFrame:
    """The first row of each episode: the segments after it have its outcome."""
    rows = snapshot.columns([*columns, "env", "task_id", "segment"])
    of_task = (pl.col("task_id") == task_id) & (pl.col("env") == env) & (pl.col("segment") == 0)
    rows = rows.filter(of_task).sort("created_at", "trajectory_id")
    if not rows.height:
        raise RefusedError(f"no row attempts task {task_id[:200]!r} of {env[:200]!r}", field="task_id", status=404)
    return rows


def _strip(rows: pl.DataFrame) -> Strip:
    scored = rows["success"].drop_nulls()
    solved, n = int(scored.sum()), len(scored)
    low, high = wilson(solved, n) if n else (None, None)
    return Strip(
        **{name: rows[name][0] for name in STRIP},
        rows=rows.height,
        n=n,
        success=solved / n if n else None,
        low=low,
        high=high,
        attempts=[AttemptLine(**attempt) for attempt in rows.head(ATTEMPTS).select(ATTEMPT).to_dicts()],
    )


# two rows


def aligned(reader: "StoreReader", question: TwoRows) -> Aligned:
    """Where two rows part, by their tokens."""
    (first_row, snapshot), (other_row, _) = (reader.row_of(name, question.at) for name in (question.a, question.b))
    rows = (first_row, other_row)
    tokenizers = [row["tokenizer"][0].as_py() for row in rows]
    ids = [numbers(row["input_ids"][0], np.int32) for row in rows]
    outcomes = [row["success"][0].as_py() for row in rows]
    shared, reason = None, ""
    if not all(map(len, ids)):
        reason = "one of them has no tokens, so nobody knows where they part"
    elif tokenizers[0] != tokenizers[1]:
        reason = f"tokenizers {tokenizers[0]} and {tokenizers[1]} differ, so their tokens cannot be compared"
    else:
        shared = common(*ids)
    return Aligned(
        version=snapshot.version,
        a=question.a,
        b=question.b,
        shared=shared,
        reason=reason,
        same=shared is not None and all(len(tokens) == shared for tokens in ids),
        flipped=None not in outcomes and outcomes[0] != outcomes[1],
    )


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many values two lists begin with alike."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    return int(different.argmax()) if different.any() else size


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
