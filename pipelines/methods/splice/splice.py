"""The stage that joins failed rows with successes at the same task."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from agentrl.chat.codec import tokenize
from agentrl.engines.blocking import blocking
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Model, NoteTable, Tasks, Trajectories
from agentrl.pipelines.methods.splice.splicing import Splicer
from agentrl.pipelines.parts.common import count, environment, record_dialect, refuse_measured, warn_of_error
from agentrl.pipelines.parts.in_context import check_training
from agentrl.pipelines.parts.stored_tasks import KnownTasks, TaskKey
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rollouts.continuations import check_replayable
from agentrl.rollouts.verification import ReplayVerifier
from agentrl.schemas.trajectory import NOT_TRAINED, Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Speaker

REVISIONS = [
    "That was wrong.",
    "I made a mistake. I do otherwise now.",
    "This leads nowhere, so I correct it.",
]
"""What turns that take a mistake back begin with, unless the config says otherwise."""

AT_ONCE = 32
"""Tasks whose rows are read and joined at once."""

COLUMNS = ["trajectory_id", "episode_id", "segment", "env", "task_id", "prompt", "split", "success", "n_steps", "tags"]


class SpliceConfig(StageConfig):
    revisions: list[str] = Field(
        REVISIONS,
        min_length=1,
        description="what the turn that takes the mistake back begins with, drawn for each row; a note that was made "
        "of the row takes its place",
    )
    tries: int = Field(8, ge=1, description="at most so many replays of each failed row, until one proves a splice")
    per_task: int = Field(4, ge=1, description="at most so many spliced rows of each task")


@stage("trajectories.splice", version=1)
def splice(
    context: Context,
    config: SpliceConfig,
    trajectories: list[Trajectories],
    model: Model,
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
    notes: NoteTable | None = None,
) -> Trajectories:
    """Agent-R: failed rows up to a mistake, on which they are not trained, then a turn that takes it back, and the rest
    of a success at the same task. A splice is kept only if a new episode answers all of it word for word and scores it
    as a success, which proves that both rows were in one state. ``notes`` of failed rows say what was wrong, in place
    of ``revisions``. ``model`` is the one whose tokens the rows are. The metrics count what was left out, by reason.

    Raises ValueError if a row is not of the train split, or of none of the tasks, or that names an environment whose
    episodes cannot be made again.
    """
    from agentrl.models.policy import Tokenizing

    written = notes.read() if notes else []
    check_training(written)
    drops: Counter[str] = Counter()
    groups = _groups(trajectories, drops)
    known = KnownTasks(trajectories, tasks)
    places = {env: environment(context, env) for env, _, _ in sorted(groups)}
    check_replayable(places)
    speaker = Tokenizing(model.path, model.name)
    record_dialect(context, speaker)
    splicer = Splicer(ReplayVerifier(places), speaker.codec, config.tries)
    text_of_row = {note.made_from: note.text for note in written}
    random = Random(stream(context.seed, "revisions"))
    texts = {
        name: text_of_row.get(name, random.choice(config.revisions))
        for group in groups.values()
        for name in group.failed
    }
    given = trajectories[0]
    rows = blocking(_spliced(context, splicer, speaker, given, list(groups.values()), known, texts, config.per_task))
    context.append(rows)
    count(context, {"foreign_tokens": sum(speaker.codec.count(texts[row.parent_id or ""]) for row in rows)})
    _tell(context, splicer, rows, drops)
    return context.select()


class _Group(NamedTuple):
    """The rows of a task that failed, and those that solved it, by their ids."""

    failed: list[str]
    solved: list[str]


def _groups(trajectories: list[Trajectories], drops: Counter[str]) -> dict[TaskKey, _Group]:
    """The tasks that some rows failed at and others solved; of the rows each once, the shortest successes first."""
    rows = {row["trajectory_id"]: row for selection in trajectories for row in selection.table(COLUMNS).to_pylist()}
    refuse_measured({name: row["split"] for name, row in rows.items()})
    episodes = Counter(row["episode_id"] for row in rows.values())
    groups: dict[TaskKey, _Group] = {}
    for name, row in sorted(rows.items(), key=lambda name_and_row: (name_and_row[1]["n_steps"], name_and_row[0])):
        if row["success"] is None:
            drops["unscored"] += 1
        elif NOT_TRAINED in row["tags"]:
            drops["not_trained"] += 1
        elif row["segment"] or episodes[row["episode_id"]] > 1:
            drops["part_of_episode"] += 1
        else:
            group = groups.setdefault((row["env"], row["task_id"], row["prompt"]), _Group([], []))
            (group.solved if row["success"] else group.failed).append(name)
    drops["never_solved"] += sum(len(group.failed) for group in groups.values() if not group.solved)
    return {key: group for key, group in sorted(groups.items()) if group.failed and group.solved}


async def _spliced(
    context: Context,
    splicer: Splicer,
    speaker: "Speaker",
    given: Trajectories,
    groups: list[_Group],
    known: KnownTasks,
    texts: Mapping[str, str],
    most: int,
) -> list[Trajectory]:
    """At most so many spliced rows of each task, none of them twice."""
    kept: list[Trajectory] = []
    firsts = [0, *accumulate(len(group.failed) for group in groups)]

    async def of_task(group: _Group, first: int, rows: dict[str, Trajectory]) -> list[Trajectory]:
        made: dict[tuple[int, ...], Trajectory] = {}
        solved = [rows[name] for name in group.solved]
        task = known.of(solved[0])
        for number, name in enumerate(group.failed):
            if len(made) == most:
                splicer.drops["over_per_task"] += len(group.failed) - number
                break
            row = await splicer.of(rows[name], solved, task, texts[name], context.trajectory_id(first + number))
            if row is not None:
                splicer.drops["doubled"] += tuple(row.input_ids) in made
                made.setdefault(tuple(row.input_ids), row)
        return list(made.values())

    try:
        for start in range(0, len(groups), AT_ONCE):
            part = groups[start : start + AT_ONCE]
            ids = [name for group in part for name in (*group.failed, *group.solved)]
            rows = dict(zip(ids, (_tokenised(row, speaker) for row in given.buffer.get_many(ids)), strict=True))
            results = await asyncio.gather(
                *(of_task(group, first, rows) for group, first in zip(part, firsts[start:], strict=False))
            )
            kept += [row for several in results for row in several]
            context.progress(start + len(part), len(groups), spliced=len(kept))
    finally:
        await splicer.verifier.close()
    return kept


def _tokenised(row: Trajectory, speaker: "Speaker") -> Trajectory:
    row = tokenize(row, speaker.codec, speaker.tokenizer_fingerprint)
    if wrong := speaker.wrote(row.trajectory_id, row.tokenizer):
        raise ValueError(wrong)
    return row


def _tell(context: Context, splicer: Splicer, rows: list[Trajectory], drops: Counter[str]) -> None:
    """Put what was dropped into the metrics, and say it."""
    verifier, left = splicer.verifier, drops + splicer.drops
    failed = len(rows) + sum(splicer.drops.values()) + drops["never_solved"]
    count(context, {"failed": failed, "spliced": len(rows), "environment_calls": verifier.calls})
    count(context, dict(sorted(left.items())))
    count(context, {f"replays_{reason}": number for reason, number in sorted((+verifier.drops).items())})
    warn_of_error(verifier.error)
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(left.items())) or "nothing"
    print(f"spliced {len(rows)} of {failed} failed rows; left out: {reasons}")
