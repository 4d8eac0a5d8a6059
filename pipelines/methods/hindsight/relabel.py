"""The stage that relabels failed rows with the tasks that they do solve."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field, model_validator

from agentrl.engines.blocking import blocking
from agentrl.pipelines.handles import Model, Table, Tasks, Trajectories
from agentrl.pipelines.methods.hindsight.goals import AchievedGoals, Admission, DescribedGoals, Describer, Goals, Which
from agentrl.pipelines.parts.common import count, environment, load_policy, refuse_measured, secrets_of, warn_of_error
from agentrl.pipelines.parts.selected import check_tokenizer
from agentrl.pipelines.parts.stored_tasks import KnownTasks
from agentrl.pipelines.stage import Context, StageConfig, reveal, stage
from agentrl.rewards.judge import Judge
from agentrl.rollouts.reopen import reopened
from agentrl.rollouts.verification import Solved
from agentrl.schemas.trajectory import NOT_TRAINED, Role, Termination, Trajectory

if TYPE_CHECKING:
    from agentrl.environments.base import Environment
    from agentrl.models.policy import Policy

SOURCE = "relabelled"
AT_ONCE = 64
"""Rows that are read, and asked about, at once."""

SHIFTS = pa.schema(
    [
        pa.field("asked", pa.int32(), nullable=False),
        pa.field("achieved", pa.int32(), nullable=False),
        pa.field("rows", pa.int32(), nullable=False),
    ]
)
"""How levels shift: ``rows`` of tasks of level ``asked`` that now are of tasks of level ``achieved``."""


class RelabelConfig(StageConfig):
    by: Literal["env", "judge"] = Field(
        "env", description="who says what a row achieved: its environment, or a model that describes it"
    )
    goals: Which = Field(
        "final", description="final: the last goal that a row achieved; future: k of all that it achieved; for by: env"
    )
    k: int = Field(4, ge=1, description="goals of a row that are tried, for goals: future")
    cap: int | None = Field(None, ge=1, description="rows that are kept of each level; None: all")
    weight: float = Field(1.0, gt=0, description="what a relabelled row counts, beside 1 of a row that was sampled")
    detours: Literal["kept", "masked"] = Field(
        "kept",
        description="masked: turns but the last one are not trained on if the episode of the new task gives them no "
        "reward above 0; for rows with tokens of environments that reward steps",
    )
    describe: Describer | None = Field(None, description="the model that describes what a row did, for by: judge")
    verify: Judge | None = Field(None, description="the second model, which judges whether it did that")

    @model_validator(mode="after")
    def _a_judge_needs_two_models(self) -> "RelabelConfig":
        if self.by == "judge" and self.detours == "masked":
            raise ValueError("detours: masked needs the rewards of an episode, so it is for by: env")
        given = [name for name in ("describe", "verify") if getattr(self, name) is not None]
        if self.by == "judge" and len(given) < 2:
            raise ValueError("by: judge asks two models: set describe: {engines: [...]} and verify: {engines: [...]}")
        if self.by == "env" and given:
            raise ValueError(f"{given[0]} does nothing with by: env; set by: judge, or leave it out")
        if self.by == "judge" and self.goals != "final":
            raise ValueError("goals: future is for by: env; each engine of describe gives one goal")
        return self


class Relabelled(NamedTuple):
    trajectories: Trajectories
    tasks: Tasks
    levels: Table


@stage("trajectories.relabel", version=1)
def relabel(
    context: Context,
    config: RelabelConfig,
    trajectories: list[Trajectories],
    heldout: list[Tasks],
    model: Model | None = None,
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
) -> Relabelled:
    """Hindsight: failed rows after the opening of a task that they do solve, with the same tokens and mask from the
    first turn on. A row is kept only if the verifier of the new task scores it as a success. Their log-probs are NaN,
    so algorithms that compare with these refuse them.

    No new task is one of ``heldout``: wire all tasks there that anything is measured on. ``model`` tokenises the new
    openings of rows with tokens. The metrics count what was dropped, by reason; ``levels`` says how levels shift.

    Raises ValueError if a row is not of the train split, or of none of the tasks.
    """
    for secret in secrets_of([config.describe, config.verify]):
        reveal(secret)
    drops: Counter[str] = Counter()
    ids = _failed(trajectories, drops)
    Random(f"relabel-{context.seed}").shuffle(ids)
    known = KnownTasks(trajectories, tasks)
    held = [task for tasks in heldout for task in tasks.read()]
    envs = {env for env, _, _ in known.by_key} if config.by == "env" else set()
    places = {env: environment(context, env) for env in sorted(envs | {task.env for task in held if envs})}
    admission = Admission(places, held, config.cap)
    goals = _goals(config, {env: places[env] for env in sorted(envs)}, context.seed)
    solved = blocking(_solved(context, goals, admission, trajectories[0], ids, known))
    policy = load_policy(model) if model else None
    masked = config.detours == "masked"
    rows = [
        _reopened(solved_row, policy, context.trajectory_id(number), masked) for number, solved_row in enumerate(solved)
    ]
    context.append(rows)
    _tell(context, drops + goals.drops + admission.drops, len(ids), solved)
    warn_of_error(goals.error)
    context.metrics.update(environment_calls=goals.calls)
    shifts = Counter((solved_row.row.level, solved_row.task.level) for solved_row in solved)
    table = [{"asked": old, "achieved": new, "rows": rows} for (old, new), rows in sorted(shifts.items())]
    distinct = {solved_row.task.task_id: solved_row.task for solved_row in solved}
    return Relabelled(
        context.select(weights=[config.weight] * len(rows)),
        context.tasks(distinct.values()),
        context.table(pa.Table.from_pylist(table, SHIFTS), "levels"),
    )


def _failed(trajectories: list[Trajectories], drops: Counter[str]) -> list[str]:
    """Ids of the rows that failed and ended by themselves, each once, sorted."""
    columns = ["trajectory_id", "episode_id", "segment", "split", "success", "termination", "tags"]
    rows = {row["trajectory_id"]: row for selection in trajectories for row in selection.table(columns).to_pylist()}
    refuse_measured({name: row["split"] for name, row in rows.items()})
    episodes = Counter(row["episode_id"] for row in rows.values())
    failed = []
    for name, row in sorted(rows.items()):
        if row["success"] is None:
            drops["unscored"] += 1
        elif NOT_TRAINED in row["tags"]:
            drops["not_trained"] += 1
        elif row["success"]:
            drops["successes"] += 1
        elif row["segment"] or episodes[row["episode_id"]] > 1:
            drops["part_of_episode"] += 1
        elif row["termination"] != Termination.ANSWERED:
            drops["not_ended"] += 1
        else:
            failed.append(name)
    return failed


def _goals(config: RelabelConfig, places: "Mapping[str, Environment]", seed: int) -> Goals:
    if config.by == "env":
        return AchievedGoals(places, config.goals, config.k, seed)
    assert config.describe is not None
    assert config.verify is not None
    return DescribedGoals(config.describe, config.verify)


async def _solved(
    context: Context,
    goals: Goals,
    admission: Admission,
    trajectories: Trajectories,
    ids: list[str],
    known: KnownTasks,
) -> list[Solved]:
    """What is kept, in the order of ``ids``."""
    kept: list[Solved] = []
    try:
        for start in range(0, len(ids), AT_ONCE):
            rows = trajectories.buffer.get_many(ids[start : start + AT_ONCE])
            results = await asyncio.gather(*(goals.solved(row, known.of(row)) for row in rows))
            kept += [solved_row for solved in results for solved_row in solved if admission.admits(solved_row)]
            context.progress(start + len(rows), len(ids), relabelled=len(kept))
    finally:
        await goals.close()
    return kept


def _reopened(solved: Solved, policy: "Policy | None", name: str, masked: bool) -> Trajectory:
    """The row as one of the new task. Rewards of its steps were those of the old task, so they are taken out. If
    ``masked``, turns that do not lead to the new goal are not trained on."""
    row, task, score = solved.row, solved.task, solved.score
    if row.input_ids:
        if policy is None:
            raise ValueError(f"{row.trajectory_id} has tokens; wire inputs.model, whose tokenizer they are of")
        check_tokenizer(row.trajectory_id, row.tokenizer, policy)
    messages = [message.model_copy(update={"reward": None}) for message in row.messages]
    update: dict[str, Any] = {"messages": messages}
    if masked:
        mask = _without_detours(solved)
        update |= {"action_mask": mask, "n_action_tokens": sum(mask)}
    return reopened(
        row.model_copy(update=update),
        solved.opening,
        policy.codec if policy else None,
        name,
        SOURCE,
        solved.tools,
        task_id=task.task_id,
        group_id=task.task_id,
        sample_index=0,
        level=task.level,
        prompt=task.prompt,
        reward=score.reward,
        success=True,
        reward_components=list(score.components),
        final_state=json.dumps(score.state),
    )


def _without_detours(solved: Solved) -> list[bool]:
    """The row's mask without the turns that the episode of the new task does not reward, but for its last one."""
    row = solved.row
    turns = [message for message in row.messages if message.role is Role.ASSISTANT]
    if not row.input_ids:
        raise ValueError(f"{row.trajectory_id} has no tokens to mask; set detours: kept, or relabel sampled rows")
    if all(reward is None for reward in solved.rewards[:-1]) and len(turns) > 1:
        raise ValueError(
            f"env {row.env!r} gives no turn of {row.trajectory_id} a reward, so none can be called a detour: give "
            "rewards to steps, or set detours: kept"
        )
    mask = list(row.action_mask)
    for turn, reward in zip(turns[:-1], solved.rewards, strict=False):
        if (reward or 0.0) <= 0 and turn.token_start is not None and turn.token_end is not None:
            mask[turn.token_start : turn.token_end] = [False] * (turn.token_end - turn.token_start)
    return mask


def _tell(context: Context, drops: Counter[str], failed: int, solved: list[Solved]) -> None:
    """Put what was dropped into the metrics, and say it."""
    count(context, {"failed": failed, "relabelled": len(solved), **dict(sorted(drops.items()))})
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(drops.items()) if number) or "nothing"
    print(f"relabelled {len(solved)} of {failed} failed rows; left out: {reasons}")
