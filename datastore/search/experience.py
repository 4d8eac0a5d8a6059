"""Past successes as demonstrations for a new task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from agentrl.schemas.trajectory import Message, Role, Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.search.index import Method, SearchIndex

HELD_OUT = ("dev", "heldout", "test", "validation")


@dataclass(frozen=True)
class Demonstration:
    """One successful run. ``tokens`` counts ``text``."""

    trajectory_id: str
    messages: list[Message]
    text: str
    tokens: int


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has, at four characters a token: for budgets without a tokenizer."""
    return -(-len(text) // 4)


def experience(
    index: "SearchIndex",
    prompt: str,
    *,
    k: int = 3,
    max_tokens: int = 1024,
    task_id: str | None = None,
    where: pl.Expr | None = None,
    splits: Sequence[str] = ("train",),
    method: "Method" = "hybrid",
    count: Callable[[str], int] = estimate_tokens,
) -> list[Demonstration]:
    """At most ``k`` successful runs of tasks like this one, best match first, within ``max_tokens`` in all.

    Runs come only from ``splits``, one per task, and never from the task itself. A held-out split is refused: its
    answers must not reach a policy that is measured on it. A run that does not fit is left out, and a shorter one after
    it may still go in.
    """
    if leaking := sorted(set(splits) & set(HELD_OUT)):
        raise ValueError(f"splits {leaking} are held out; demonstrations from them would leak answers, use train")
    allowed = pl.col("success") & pl.col("split").is_in(list(splits)) & (pl.col("prompt") != prompt)
    allowed &= pl.col("source") != "negative"  # an invented refusal solves nothing
    if task_id is not None:
        allowed &= pl.col("task_id") != task_id
    if where is not None:
        allowed &= where
    hits = index.search(prompt, k * 4, where=allowed, method=method, per_task=1)
    chosen: list[Demonstration] = []
    left = max_tokens
    for row in index.buffer.get_many(hits["trajectory_id"].to_list()):
        text = render(row)
        if (tokens := count(text)) <= left:
            messages = [message for message in row.messages if message.role is not Role.SYSTEM]
            chosen.append(Demonstration(row.trajectory_id, messages, text, tokens))
            left -= tokens
        if len(chosen) == k:
            break
    return chosen


def render(row: Trajectory) -> str:
    """A run as plain text: the task, each call with what it returned, the answer."""
    lines = []
    for message in row.messages:
        if message.role is Role.SYSTEM:
            continue
        if message.content:
            name = {Role.USER: "Task", Role.ASSISTANT: "Agent", Role.TOOL: "Result"}[message.role]
            lines.append(f"{name}: {message.content}")
        lines += [f"Call: {call.name} {call.arguments}" for call in message.tool_calls]
    return "\n".join(lines)
