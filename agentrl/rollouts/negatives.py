"""Negative examples against hallucinated tool use (Agent-FLAN: Chen et al. 2024, section 3.3): a request that needs
tools although none are offered, and ordinary conversation under tools that it does not need. No call answers either.

They are text, tokenised by the stage that trains on them, with a chat template that shows tools. They are tasks of
their own, in an environment of their own, so that no refusal counts as a solution of the task that it was made of.
"""

from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

REFUSAL = "I have no tool that could find this out."
SOURCE = ENV = "negative"


def calls_tools(row: Trajectory) -> bool:
    return any(message.tool_calls for message in row.messages)


def without_tools(row: Trajectory, trajectory_id: str, refusal: str = REFUSAL) -> Trajectory:
    """The opening of an agent's run, with no tool offered; the answer is ``refusal``."""
    opening: list[Message] = []
    for message in row.messages:
        if message.role is Role.ASSISTANT:
            break
        opening.append(message)
    return _negative(row, trajectory_id, [*opening, Message(role=Role.ASSISTANT, content=refusal)], "[]")


def with_unneeded_tools(row: Trajectory, trajectory_id: str, tools: str) -> Trajectory:
    """A conversation that made no call, with ``tools`` (JSON) on offer. Raises ValueError if it made one."""
    if calls_tools(row):
        raise ValueError(f"{row.trajectory_id} calls tools; give conversations without calls")
    return _negative(row, trajectory_id, row.messages, tools)


def _negative(row: Trajectory, trajectory_id: str, messages: list[Message], tools: str) -> Trajectory:
    bare = [message.model_copy(update={"token_start": None, "token_end": None}) for message in messages]
    return Trajectory(
        trajectory_id=trajectory_id,
        episode_id=trajectory_id,
        task_id=trajectory_id,
        group_id=trajectory_id,
        parent_id=row.trajectory_id,
        source=SOURCE,
        env=ENV,
        split=row.split,
        prompt=row.prompt,
        policy=row.policy,
        reward=1.0,
        success=True,
        termination=Termination.ANSWERED,
        n_steps=sum(message.role is Role.ASSISTANT for message in messages),
        messages=bare,
        tools=tools,
    )
