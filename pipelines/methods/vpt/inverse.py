"""The stage that makes what an inverse model is trained on."""

from collections import Counter

from pydantic import Field

from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.methods.vpt.gaps import bare, shown
from agentrl.pipelines.parts.common import count, refuse_measured, written_about
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, Termination, ToolCall, Trajectory

SOURCE = "inverse"


class InverseWindow(StageConfig):
    """What an inverse model is shown of a row: equal where it is trained and where it labels."""

    before: int | None = Field(
        None,
        ge=0,
        description="results before the call that are shown, and the opening if there are fewer; null: all of both",
    )
    after: int = Field(1, ge=1, description="results after the call that are shown, its own among them")


@stage("trajectories.inverse", version=1)
def inverse(context: Context, config: InverseWindow, trajectories: list[Trajectories]) -> Trajectories:
    """What an inverse model is trained on, by ``train.sft``: each call of the rows, after what came before it and the
    result that came after it (VPT: Baker et al. 2022, arXiv 2206.11795, section 2). A row of two messages, as often as
    it comes. Rows of other splits than train are refused."""
    rows = list(rows_of(trajectories))
    refuse_measured({row.trajectory_id: row.split for row in rows})
    left = Counter(not_trained=0, without_calls=0, unanswered=0)
    made: list[Trajectory] = []
    for row in rows:
        conversation = bare(row)
        known = [(number, gap.call) for number, gap in enumerate(conversation.gaps) if gap.call]
        left["unanswered"] += conversation.unanswered
        if NOT_TRAINED in row.tags:
            left["not_trained"] += 1
            continue
        left["without_calls"] += not known
        for number, call in known:
            prompt = shown(row, conversation, number, config.before, config.after)
            made.append(_asked(row, context.trajectory_id(len(made)), prompt, call))
    context.append(made)
    count(context, {"rows": len(rows), "calls": len(made), **left})
    if not made:
        raise ValueError(f"none of the {len(rows)} rows has a call with a result; give rows whose calls are known")
    return context.select()


def _asked(row: Trajectory, name: str, prompt: str, call: ToolCall) -> Trajectory:
    return written_about(
        row,
        name,
        SOURCE,
        prompt=prompt,
        termination=Termination.ANSWERED,
        n_steps=1,
        n_tool_calls=1,
        messages=[Message(role=Role.USER, content=prompt), Message(role=Role.ASSISTANT, tool_calls=[call])],
        tools=row.tools,
    )
