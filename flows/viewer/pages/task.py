"""The attempts at one task: by stage and policy, and as a tree of the tokens that they share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import polars as pl
import pyarrow.compute as pc

from agentrl.flows.viewer.pages.tokens import beginning
from agentrl.flows.viewer.query.artifacts import numbers
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, AtVersion, RefusedError
from agentrl.statistics.intervals import wilson

PROMPTS, PROMPT = 5, 300
"""Different prompts of a task that are shown, and characters of each."""
ATTEMPTS = 1024
ENDS = 20
TOKENS = 60
"""How much of a branch's text is shown."""


class TaskQuery(AtVersion):
    env: str
    task_id: str


class AttemptLine(Answer):
    trajectory_id: str
    success: bool | None
    reward: float | None
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


class TreeBranch(Answer):
    """Tokens that ``rows`` attempts share: [start, end) of each of them, after those of ``parent`` (the position of a
    branch in the list; None for a root). ``success`` is over the ``n`` rows with an outcome, ``reward`` the mean over
    the ``rewarded``, with its interval (None if a reward is not between 0 and 1). ``text`` begins the branch's text.
    ``ends`` are the rows that end with it, at most 20."""

    parent: int | None
    start: int
    end: int
    rows: int
    n: int
    success: float | None
    rewarded: int
    reward: float | None
    low: float | None
    high: float | None
    text: str
    ends: list[str]


class TaskTree(Answer):
    """The attempts at a task as a tree of shared tokens, each branch followed by those that go on from it. ``left_out``
    attempts have no tokens, or those of another tokenizer than most, or are beyond the newest 1,024."""

    version: int
    rows: int
    left_out: int
    branches: list[TreeBranch]


ATTEMPT = ("trajectory_id", "success", "reward", "n_tokens", "n_tool_errors", "termination")
STRIP = ("stage", "policy", "policy_version", "temperature", "greedy")
TEMPERATURE = pl.col("sampling").str.json_path_match("$.temperature").cast(pl.Float64, strict=False)
"""The temperature that a row was sampled at; null if the row does not say."""


def task(reader: StoreReader, question: TaskQuery) -> TaskAttempts:
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


# as a tree


def task_tree(reader: StoreReader, question: TaskQuery) -> TaskTree:
    """The newest attempts at a task as a tree. Raises RefusedError if there is none."""
    snapshot = reader.tables.at(question.at)
    ids = _attempts(snapshot, question.env, question.task_id, ["trajectory_id", "created_at"])["trajectory_id"]
    columns = ("trajectory_id", "tokenizer", "policy", "input_ids", "success", "reward")
    attempts = reader.read(ids.tail(ATTEMPTS).to_list(), columns, snapshot)
    attempts = attempts.filter(pc.greater(pc.list_value_length(attempts["input_ids"]), 0))
    counts = Counter(filter(None, attempts["tokenizer"].to_pylist()))
    tokenizer = counts.most_common(1)[0][0] if counts else ""
    attempts = attempts.filter(pc.and_(pc.equal(attempts["tokenizer"], tokenizer), bool(tokenizer)))
    sequences = [numbers(tokens, np.int32) for tokens in attempts["input_ids"]]
    rows = attempts.drop_columns(["input_ids"]).to_pylist()
    branches = []
    for branch in prefix_tree(sequences):
        first = branch.members[0]
        part = sequences[first][branch.start : min(branch.end, branch.start + TOKENS)]
        text = beginning(reader, part, tokenizer, rows[first]["policy"])
        branches.append(_told(branch, rows, text))
    return TaskTree(version=snapshot.version, rows=len(rows), left_out=len(ids) - len(rows), branches=branches)


@dataclass
class Branch:
    """Tokens [start, end) of the ``members``, which are positions of sequences; those in ``ends`` end with it."""

    parent: int | None
    start: int
    end: int
    members: list[int]
    ends: list[int] = field(default_factory=list)


def prefix_tree(sequences: Sequence[np.ndarray]) -> list[Branch]:
    """The tree of sequences, each branch followed by those that go on from it. It is as long as its members agree;
    without a token that all begin with, there are several roots."""
    branches: list[Branch] = []
    todo: list[tuple[int | None, list[int], int]] = [(None, each, 0) for each in reversed(_by_token(sequences, 0))]
    while todo:
        parent, members, start = todo.pop()
        first = sequences[members[0]][start:]
        end = start + min((common(first, sequences[member][start:]) for member in members), default=0)
        index = len(branches)
        branches.append(
            Branch(parent, start, end, members, [member for member in members if len(sequences[member]) == end])
        )
        rest = [member for member in members if len(sequences[member]) > end]
        todo += [
            (index, [rest[member] for member in each], end)
            for each in reversed(_by_token([sequences[position] for position in rest], end))
        ]
    return branches


def _by_token(sequences: Sequence[np.ndarray], offset: int) -> list[list[int]]:
    """Positions of the sequences that go on, by their token at ``place``, in the order in which tokens come first."""
    groups: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        if len(sequence) > offset:
            groups.setdefault(int(sequence[offset]), []).append(number)
    return list(groups.values())


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many values two lists begin with alike."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    return int(different.argmax()) if different.any() else size


def interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Wilson's interval of the mean of values between 0 and 1: it is that of outcomes, which vary the most, so it is
    rather too wide. None if there is no value, or one is not between."""
    return wilson(sum(values), len(values)) if values and 0 <= min(values) <= max(values) <= 1 else (None, None)


def _told(branch: Branch, attempts: Sequence[dict[str, Any]], text: str) -> TreeBranch:
    """A branch with what its members came to."""
    members = [attempts[member] for member in branch.members]
    outcomes = [row["success"] for row in members if row["success"] is not None]
    rewards = [row["reward"] for row in members if row["reward"] is not None]
    low, high = interval(rewards)
    return TreeBranch(
        parent=branch.parent,
        start=branch.start,
        end=branch.end,
        rows=len(members),
        n=len(outcomes),
        success=fmean(outcomes) if outcomes else None,
        rewarded=len(rewards),
        reward=fmean(rewards) if rewards else None,
        low=low,
        high=high,
        text=text,
        ends=[attempts[member]["trajectory_id"] for member in branch.ends[:ENDS]],
    )
