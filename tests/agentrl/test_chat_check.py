"""Imported token ids against the tokenizer that is said to have made them."""

import pytest

from agentrl.chat.check import token_problem
from agentrl.models.tiny import train_tokenizer
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

TOKENIZER = train_tokenizer(["where is Ann", "over there", "look"], 300)


def row(text: str, name: str | None = None, spans: bool = True) -> Trajectory:
    asked, words = (TOKENIZER.encode(name, add_special_tokens=False) for name in ("where is Ann", "over there look"))
    calls = [ToolCall(id="1", name=name, arguments="{}")] if name else []
    position = {"token_start": len(asked), "token_end": len(asked) + len(words)} if spans else {}
    messages = [
        Message(role=Role.USER, content="where is Ann"),
        Message(role=Role.ASSISTANT, content=text, tool_calls=calls, **position),
    ]
    fields = {"trajectory_id": "r", "episode_id": "r", "task_id": "t", "source": "x", "env": "e", "split": "train"}
    outcome = {"prompt": "q", "reward": None, "success": None, "termination": Termination.UNKNOWN}
    ids, mask = [*asked, *words], [False] * len(asked) + [True] * len(words)
    return Trajectory(
        messages=messages, input_ids=ids, action_mask=mask, logprobs=[float("nan")] * len(ids), **fields, **outcome
    )


@pytest.mark.parametrize("spans", [True, False])
def test_ids_of_the_tokenizer_pass_and_others_do_not(spans: bool) -> None:
    assert token_problem(row("over there", spans=spans), TOKENIZER) is None
    assert token_problem(row("over there", "look", spans), TOKENIZER) is None
    assert "says 'nowhere'" in (token_problem(row("nowhere", spans=spans), TOKENIZER) or "")
    assert "says 'find'" in (token_problem(row("over there", "find", spans), TOKENIZER) or "")
    far = row("over there", spans=spans)
    far.input_ids[0] = 10**6
    assert "outside its vocabulary" in (token_problem(far, TOKENIZER) or "")
