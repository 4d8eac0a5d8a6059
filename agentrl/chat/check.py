"""Whether imported token ids are those of a tokenizer: they must decode to the text of the row."""

from typing import TYPE_CHECKING

from agentrl.schemas.trajectory import Role, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 60


def token_problem(row: Trajectory, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Why ``row.input_ids`` cannot come from ``tokenizer``; None if they can.

    Every id is in the vocabulary. The tokens of each assistant message, by its span, or all sampled tokens if there are
    no spans, decode to text that holds the message's text and the names of the tools it calls.
    """
    if not row.input_ids:
        return None
    if (largest := max(row.input_ids)) >= len(tokenizer):
        return f"id {largest} is outside its vocabulary of {len(tokenizer)}"
    sampled = [token for token, action in zip(row.input_ids, row.action_mask, strict=True) if action]
    everything = str(tokenizer.decode(sampled))
    for number, message in enumerate(row.messages):
        if message.role is not Role.ASSISTANT:
            continue
        start, end = message.token_start, message.token_end
        text = everything if start is None or end is None else str(tokenizer.decode(row.input_ids[start:end]))
        if start is None and not sampled:
            continue
        for wanted in (message.content.strip(), *(call.name for call in message.tool_calls)):
            if wanted not in text:
                return f"message {number} says {wanted[:SHOWN]!r}, and its tokens decode to {text[:SHOWN]!r}"
    return None
