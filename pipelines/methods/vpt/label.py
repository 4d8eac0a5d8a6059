"""The stage that labels logs without calls by an inverse model."""

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field, model_validator

from agentrl.engines import EngineChoice
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.engines.seeds import stream
from agentrl.environments.conversation import AskedOnce
from agentrl.pipelines.handles import Model, Table, Tasks, Trajectories
from agentrl.pipelines.methods.vpt.choose import LoggedRow
from agentrl.pipelines.methods.vpt.gaps import bare, counted, shown
from agentrl.pipelines.methods.vpt.inverse import InverseWindow
from agentrl.pipelines.parts.budget import SamplingConfig, check_room
from agentrl.pipelines.parts.common import count, environment, policy_of, refuse_measured, secrets_of, warn_of_error
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.parts.stored_tasks import KnownTasks
from agentrl.pipelines.stage import Context, reveal, stage
from agentrl.rollouts.continuations import check_replayable
from agentrl.rollouts.verification import ReplayVerifier
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, Trajectory

SOURCE = "labelled"
ENV = "inverse"
"""The environment in which an inverse model is asked. What it calls is the label, and no call is made."""

WITHOUT_TOKENS: dict[str, Any] = {
    "tokenizer": "", "input_ids": [], "action_mask": [], "logprobs": [], "spans": [], "n_tokens": 0,
    "n_action_tokens": 0, "message_seconds": None,
}  # fmt: skip
"""A log with other messages has other tokens: ``train.sft`` writes them."""

LABELS = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("result", pa.int32(), nullable=False),
        pa.field("tool", pa.string()),
        pa.field("arguments", pa.string()),
        pa.field("share", pa.float32(), nullable=False),
        pa.field("rank", pa.int32()),
        pa.field("right", pa.bool_()),
        pa.field("refused", pa.string()),
    ]
)
"""A line for each missing call: the ``result`` that it has, from 0; the call that was chosen, its ``share`` of the
tries and its ``rank`` among the calls that they gave; with ``hide``, whether the row's own call is the same
(``right``); and why its row was refused, if it was: at the first line without a rank. That line shows the likeliest
call, if there was one."""


class LabelConfig(InverseWindow):
    tries: int = Field(8, ge=1, description="answers of the inverse model for each missing call")
    verify: Literal["replay", "share"] = Field(
        "replay",
        description="replay: calls are made in the environment, and the likeliest whose result is that of the log is "
        "taken; share: the likeliest is taken if so large a share of the tries as threshold gave it",
    )
    threshold: float = Field(0.5, ge=0, le=1, description="for verify: share")
    hide: bool = Field(
        False,
        description="the calls of rows that have some are hidden and labelled too, and compared with the labels: how "
        "good an inverse model is; False: only rows without any are labelled, and the others are left out",
    )
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineChoice = DEFAULT_ENGINE

    @model_validator(mode="after")
    def _threshold_is_of_shares(self) -> "LabelConfig":
        if self.verify == "replay" and "threshold" in self.model_fields_set:
            raise ValueError("threshold does nothing with verify: replay; leave it out, or set verify: share")
        if self.verify == "share" and self.tries == 1:
            raise ValueError("of one try the share is 1, which says nothing; set tries: 8, or verify: replay")
        if self.tries > 1 and self.sampling.temperature == 0:
            raise ValueError("at temperature 0 all tries are the same; set tries: 1, or leave temperature at 1")
        return self


class LabelledRows(NamedTuple):
    trajectories: Trajectories
    labels: Table


@stage("trajectories.label_calls", version=1)
def label_calls(
    context: Context,
    config: LabelConfig,
    trajectories: list[Trajectories],
    model: Model | None = None,
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
) -> LabelledRows:
    """Rows whose calls are missing, with calls that an inverse model says (VPT: Baker et al. 2022, arXiv 2206.11795).
    ``model`` is trained on rows of ``trajectories.inverse``. With ``verify: replay`` each call is made in the row's
    environment, whose result has to be the log's; the row gets the score of that episode, and is left out if the log
    says another outcome. A row of which one call is refused is left out whole. ``tasks`` are those of the rows.

    Raises ValueError if a row is not of the train split, or that names an environment whose episodes cannot be made
    again.
    """
    for secret in secrets_of([config.engine]):
        reveal(secret)
    logs, left = _logs(trajectories, config.hide)
    _ask(context, config, logs, model)
    if config.verify == "replay":
        environments = {name: environment(context, name) for name in sorted({log.row.env for log in logs})}
        check_replayable(environments)
        verifier = ReplayVerifier(environments)
        blocking(_replay(context, verifier, logs, KnownTasks(trajectories, tasks)))
        count(context, {"environment_calls": verifier.calls})
        warn_of_error(verifier.error)
    else:
        for log in logs:
            log.by_share(config.threshold)
    kept = [log for log in logs if not log.refused]
    context.append([_row(log, context.trajectory_id(number)) for number, log in enumerate(kept)])
    _tell(context, logs, left)
    lines = [line for log in logs for line in _lines(log, config.hide)]
    return LabelledRows(context.select(), context.table(pa.Table.from_pylist(lines, LABELS), "labels"))


def _logs(trajectories: Sequence[Trajectories], hide: bool) -> tuple[list[LoggedRow], Counter[str]]:
    """Rows to label, each once, and how many others were left out, by reason."""
    rows = list(rows_of(trajectories))
    refuse_measured({row.trajectory_id: row.split for row in rows})
    episodes = Counter(row.episode_id for row in rows)
    logs, left = list[LoggedRow](), Counter[str]()
    for row in rows:
        conversation = bare(row)
        if NOT_TRAINED in row.tags:
            left["not_trained"] += 1
        elif row.segment or episodes[row.episode_id] > 1:
            left["part_of_episode"] += 1
        elif not conversation.gaps:
            left["without_results"] += 1
        elif not hide and all(gap.call for gap in conversation.gaps):
            left["with_calls"] += 1
        elif conversation.unanswered:
            left["unanswered"] += 1
        else:
            logs.append(LoggedRow(row, conversation))
    return logs, left


def _ask(context: Context, config: LabelConfig, logs: Sequence[LoggedRow], model: Model | None) -> None:
    """Have the inverse model say the calls that are missing. A prompt that comes several times is asked once."""
    from agentrl.rollouts.runner import RolloutRunner, tickets

    asked: dict[tuple[str, str], Task] = {}
    keys: list[tuple[str, str] | None] = []
    for log in logs:
        for number, gap in enumerate(log.conversation.gaps):
            prompt = shown(log.row, log.conversation, number, config.before, config.after)
            key = (prompt, log.row.tools) if config.hide or gap.call is None else None
            keys.append(key)
            if key and key not in asked:
                name = f"label-{len(asked)}"
                asked[key] = Task(task_id=name, env=ENV, split="train", prompt=prompt, tools=log.row.tools)
    policy = policy_of(model, config.engine)
    every, answers = list(asked.values()), dict[str, list[Trajectory]]()
    attempts = tickets(every, config.tries, lambda number: f"answer-{number}")
    if attempts:
        sampling, tell = config.sampling.of(policy), partial(_progress, context)
        with RolloutRunner(policy, config.engine.build(policy), AskedOnce(ENV), sampling, on_progress=tell) as runner:
            check_room(policy, runner, every)
            for row in runner.run(list(attempts.values()), stream(context.seed, "label"), list(attempts)):
                answers.setdefault(row.task_id, []).append(row)
    given = iter(keys)
    votes = {key: counted(answers[task.task_id]) for key, task in asked.items()}
    for log in logs:
        for gap, key in zip(log.conversation.gaps, given, strict=False):
            log.votes.append(votes[key] if key else [(gap.call, 1.0)] if gap.call else [])
    tokens = sum(row.n_action_tokens for rows in answers.values() for row in rows)
    count(context, {"prompts": len(every), "foreign_tokens": tokens})


def _progress(context: Context, done: int, total: int, numbers: dict[str, float | str]) -> None:
    context.progress(done, total, **numbers)


async def _replay(context: Context, verifier: ReplayVerifier, logs: Sequence[LoggedRow], known: KnownTasks) -> None:
    try:
        for number, log in enumerate(logs, 1):
            await log.by_replay(verifier, known.of(log.row))
            context.progress(number, len(logs))
    finally:
        await verifier.close()


def _row(log: LoggedRow, name: str) -> Trajectory:
    """A log with all of its calls, and if it was replayed with the outcome of that."""
    row, solved = log.labelled, log.solved
    messages = row.messages
    update: dict[str, Any] = {"trajectory_id": name, "episode_id": name, "parent_id": row.trajectory_id, "fork_at": 0}
    if solved:
        rewards = iter(solved.rewards)
        messages = [
            message.model_copy(update={"reward": next(rewards, None)}) if message.role is Role.ASSISTANT else message
            for message in messages
        ]
        score = solved.score
        update |= {"reward": score.reward, "success": score.success, "final_state": json.dumps(score.state)}
        update |= {"reward_components": list(score.components), "tools": solved.tools}
    return row.model_copy(
        update={**update, **WITHOUT_TOKENS, "source": SOURCE, "messages": messages, "n_steps": _spoken(messages)}
    )


def _spoken(messages: Sequence[Message]) -> int:
    return sum(message.role is Role.ASSISTANT for message in messages)


def _lines(log: LoggedRow, hide: bool) -> Iterator[dict[str, object]]:
    """The table's lines of a row: of the gaps whose call was asked for."""
    for number, (gap, votes) in enumerate(zip(log.conversation.gaps, log.votes, strict=True)):
        if gap.call and not hide:
            continue
        rank = log.ranks[number] if number < len(log.ranks) else None
        call, share = votes[rank or 0] if votes else (None, 0.0)
        yield {
            "trajectory_id": log.row.trajectory_id,
            "result": number,
            "tool": call and call.name,
            "arguments": call and call.arguments,
            "share": share,
            "rank": rank,
            "right": log.right(number),
            "refused": log.refused or None,
        }


def _tell(context: Context, logs: Sequence[LoggedRow], left: Counter[str]) -> None:
    """Put into the metrics what became of rows and calls, and say it."""
    refused = Counter(log.refused for log in logs if log.refused)
    labels = [number for log in logs if not log.refused for number in log.ranks]
    compared = [log.right(number) for log in logs if not log.refused for number in range(len(log.ranks))]
    right = [same for same in compared if same is not None]
    missing = sum(len(log.conversation.gaps) for log in logs)
    count(context, {"rows": len(logs) + sum(left.values()), "labelled": len(logs) - sum(refused.values())})
    count(context, {"calls": missing, "labels": len(labels), "first_choice": labels.count(0), **left, **refused})
    if right:
        context.metrics.update(right=sum(right) / len(right))
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted((left + refused).items())) or "none"
    print(f"labelled {len(logs) - sum(refused.values())} of {len(logs) + sum(left.values())} rows; left out: {reasons}")
    if logs and not labels:
        warnings.warn(
            f"no row was labelled: {reasons}; train the inverse model on more calls, with the same before and after, "
            "or give more tries",
            stacklevel=3,
        )
