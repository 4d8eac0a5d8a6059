"""The stage that makes demonstrations for a team out of what one agent did alone."""

import json
from typing import Any

from pydantic import Field

from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.parts.common import count, refuse_measured
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rollouts.rationalize import with_text
from agentrl.rollouts.reopen import opening_of
from agentrl.rollouts.team import SOURCE, SpeakerConfig, shown
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, Trajectory

AT_ONCE = 256
_WITHOUT_TOKENS: dict[str, Any] = {
    "input_ids": [], "action_mask": [], "logprobs": [], "spans": [], "tokenizer": "", "n_tokens": 0,
    "n_action_tokens": 0, "fork_at": 0, "message_seconds": None, "source": SOURCE,
}  # fmt: skip


class CastConfig(StageConfig):
    speaker: SpeakerConfig = Field(
        SpeakerConfig(name="planner", ask="plan?"), description="who says beforehand what the row's calls will be"
    )
    actor: str = Field("walker", min_length=1, description="name of the agent that is told, and acts as the row did")
    say: list[str] | None = Field(None, min_length=1, description="arguments that the speaker says; None: all")


@stage("trajectories.cast", version=1)
def cast(context: Context, config: CastConfig, trajectories: list[Trajectories]) -> Trajectories:
    """Demonstrations for a team of two, from rows of one agent: the speaker says the arguments of the calls that the
    row made, in their order, and the actor reads that and acts as the row did. The rows have no tokens, so that
    train.sft encodes them; their parent is the row. Failures are among them: trajectories.reject leaves them out.

    Rows of which nothing is to be said are left out, and counted. Raises ValueError if a row is not of the train split.
    """
    light = ["trajectory_id", "split", "tags", "segment"]
    rows = {row["trajectory_id"]: row for selection in trajectories for row in selection.table(light).to_pylist()}
    refuse_measured({name: row["split"] for name, row in rows.items()})
    whole = [name for name, row in rows.items() if not row["segment"] and NOT_TRAINED not in row["tags"]]
    episodes = 0
    for start in range(0, len(whole), AT_ONCE):
        sources = trajectories[0].buffer.get_many(whole[start : start + AT_ONCE])
        plans = [(row, plan) for row in sources if (plan := _plan(row, config.say))]
        shard = [
            agent
            for number, (row, plan) in enumerate(plans, episodes)
            for agent in _agents(config, row, plan, [context.trajectory_id(2 * number + part) for part in range(2)])
        ]
        episodes += len(plans)
        context.append(shard, start)
        context.progress(start + len(sources), len(whole))
    parts = len(rows) - len(whole)
    count(context, {"episodes": episodes, "nothing_to_say": len(whole) - episodes, "parts_of_episodes": parts})
    return context.select()


def _plan(row: Trajectory, say: list[str] | None) -> str:
    """The arguments of a row's calls, in their order."""
    arguments = [json.loads(call.arguments) for message in row.messages for call in message.tool_calls]
    return " ".join(str(given[name]) for given in arguments for name in (say or given) if name in given)


def _agents(config: CastConfig, row: Trajectory, plan: str, names: list[str]) -> list[Trajectory]:
    """The rows of both agents."""
    bare = [message.model_copy(update={"token_start": None, "token_end": None}) for message in row.messages]
    opening = len(opening_of(row))
    heard = with_text(bare[:opening], shown(config.speaker.name, plan))
    spoken = [
        Message(role=Role.USER, content=f"{row.prompt} {config.speaker.ask}"),
        Message(role=Role.ASSISTANT, content=plan),
    ]
    both = {**_WITHOUT_TOKENS, "episode_id": names[0], "parent_id": row.trajectory_id}
    says = {"trajectory_id": names[0], "segment": 0, "agent": config.speaker.name, "messages": spoken, "tools": "[]"}
    plain = {"n_steps": 1, "n_tool_calls": 0, "n_tool_errors": 0}
    acts = {"trajectory_id": names[1], "segment": 1, "agent": config.actor, "messages": [*heard, *bare[opening:]]}
    return [row.model_copy(update={**both, **says, **plain}), row.model_copy(update={**both, **acts})]
