"""What is said of a dialect is said when it matters, and once."""

import warnings
from types import SimpleNamespace
from typing import Any, cast

from chats import TOOLS
from tiny_gguf import HIDES_TOOLS, TEXTS

from agentrl.chat.dialects import NO_CALLS, NO_REASONING, NO_TOOLS
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.schemas.trajectory import Message, Role


def speaker() -> Policy:
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.chat_template = HIDES_TOOLS
    return Policy(cast(Any, SimpleNamespace()), tokenizer, "small")


def said(policy: Policy, tools: str = "[]", answer: Message | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy.codec.opening([Message(role=Role.USER, content="Hello")], tools)
        if answer:
            policy.codec.assistant(answer)
    return [str(warning.message).partition(": ")[2] for warning in caught]


def test_nothing_is_said_of_tools_where_no_task_has_one() -> None:
    assert said(speaker(), answer=Message(role=Role.ASSISTANT, content="Hi.")) == []


def test_a_template_that_hides_tools_is_said_once_when_there_are_some() -> None:
    policy = speaker()
    assert said(policy) == []
    assert said(policy, TOOLS) == [NO_CALLS, NO_TOOLS]
    assert said(policy, TOOLS) == []


def test_reasoning_is_said_where_a_turn_has_some() -> None:
    policy = speaker()
    assert said(policy, answer=Message(role=Role.ASSISTANT, content="Hi.", reasoning="Why not?")) == [NO_REASONING]


def test_what_is_read_with_reasoning_says_so() -> None:
    policy = speaker()
    ids = policy.tokenizer.encode("<think>Why not?</think>\nHi.<|im_end|>", add_special_tokens=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert policy.codec.parse(ids).message.reasoning
    assert [NO_REASONING in str(warning.message) for warning in caught] == [True]
