"""Rows of every kind that a format may stumble over."""

import json
import math
from typing import Any

import pyarrow as pa
from store_rows import build

from agentrl.schemas.trajectory import Message, RewardComponent, Role, Span, Termination, ToolCall, Trajectory

LOOK = '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]'


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def said(text: str, **fields: Any) -> Message:
    return Message(role=Role.ASSISTANT, content=text, **fields)


def called(number: int, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call_{number}", name="look", arguments=json.dumps(arguments))


def asked(*calls: ToolCall, text: str = "", **fields: Any) -> Message:
    return Message(role=Role.ASSISTANT, content=text, tool_calls=list(calls), **fields)


def answer(number: int, text: str) -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=f"call_{number}", name="look")


def spoken(number: int, messages: list[Message], **fields: Any) -> Trajectory:
    """A row without tokens."""
    empty: dict[str, Any] = {
        "tokenizer": "",
        "input_ids": [],
        "action_mask": [],
        "logprobs": [],
        "n_tokens": 0,
        "n_action_tokens": 0,
        "tags": [],
    }
    counts = {
        "n_steps": sum(message.role is Role.ASSISTANT for message in messages),
        "n_tool_calls": sum(len(message.tool_calls) for message in messages),
        "prompt": next(message.content for message in messages if message.role is Role.USER),
    }
    return build(number, messages=messages, **{**empty, **counts, **fields})


def hard(number: int) -> Trajectory:
    """A system message, parallel calls, odd spacing in arguments, tools that differ from row to row, gaps between
    spans, trailing tokens, a NaN inside an action, unicode."""
    messages = [
        Message(role=Role.SYSTEM, content="be brief", token_start=0, token_end=2),
        Message(role=Role.USER, content=f"wéather {number}?\n", token_start=3, token_end=5),
        Message(
            role=Role.ASSISTANT,
            content="both",
            reasoning="two at once",
            tool_calls=[
                ToolCall(id="a", name="find", arguments='{"who":  "Ann", "n": [1, {"x": null}]}'),
                ToolCall(id="b", name="find", arguments="{}"),
            ],
            reward=0.25,
            token_start=6,
            token_end=9,
        ),
        Message(role=Role.TOOL, content="sunny", tool_call_id="a", name="find", token_start=10, token_end=11),
        Message(role=Role.TOOL, content="rainy", tool_call_id="b", name="find", token_start=11, token_end=12),
        Message(role=Role.ASSISTANT, content="mixed", token_start=13, token_end=15),
    ]
    mask = [6 <= i < 9 or 13 <= i < 15 for i in range(17)]
    logprobs = [-0.1 * (i + 1) if action else math.nan for i, action in enumerate(mask)]
    logprobs[7] = math.nan
    tools = [{"type": "function", "function": {"name": "find", "parameters": {f"p{number}": [number, "x"]}}}]
    return build(
        number,
        messages=messages,
        tools=json.dumps(tools),
        input_ids=[number * 100 + i for i in range(17)],
        action_mask=mask,
        logprobs=[float(x) for x in pa.array(logprobs, pa.float32()).to_pylist()],
        n_tokens=17,
        n_action_tokens=5,
        n_tool_calls=2,
        n_tool_errors=1,
        spans=[Span(version=2, start=6, end=9), Span(version=3, start=12, end=15)],
        parent_id=f"parent-{number}",
        fork_at=6,
        final_state='{"a": [1]}',
        termination=Termination.MAX_STEPS if number % 2 else Termination.ANSWERED,
    )


def without_spans(row: Trajectory) -> Trajectory:
    bare = [message.model_copy(update={"token_start": None, "token_end": None}) for message in row.messages]
    return row.model_copy(update={"messages": bare})


BRIEF = Message(role=Role.SYSTEM, content="be brief")
_CALL = [user("where?"), asked(called(1, place="here")), answer(1, "there"), said("over there")]
_FAILED = [
    user("where?"),
    asked(called(1, place="nowhere"), called(2, place="here")),
    answer(1, "no such place").model_copy(update={"error": True}),
    answer(2, "there").model_copy(update={"error": False}),
    said("over there"),
]

KINDS: dict[str, list[Trajectory]] = {
    "text": [spoken(0, [user("hi"), said("hello"), user("and?"), said("that is all")], tools="[]")],
    "tools": [spoken(1, _CALL, tools=LOOK)],
    "parallel calls": [
        spoken(
            2,
            [
                user("both?"),
                asked(called(1, place="a"), called(2, place="b"), text="I look twice"),
                answer(1, "1"),
                answer(2, "2"),
                said("1 and 2"),
            ],
            tools=LOOK,
        )
    ],
    "reasoning": [
        spoken(3, [Message(role=Role.SYSTEM, content="be kind"), user("why?"), said("so", reasoning="hm")], tools="[]")
    ],
    "user after tools": [spoken(4, [*_CALL, BRIEF, user("sure?"), said("yes")], tools=LOOK)],
    "two agents": [
        spoken(5, [user("judge"), said("fine")], agent="judge", segment=1, episode_id="e", tags=["not-trained"]),
        spoken(6, [user("solve"), said("42")], agent="solver", segment=0, episode_id="e"),
    ],
    "odd calls": [
        spoken(
            7,
            [
                user("both?"),
                asked(*(ToolCall(id="", name="look", arguments=text) for text in ('{"place": "a"}', "[1]"))),
                Message(role=Role.TOOL, content="1"),
                Message(role=Role.TOOL, content="2"),
                said(""),
                user("and?"),
                asked(ToolCall(id="", name="look", arguments='"here"')),
            ],
            tools='[{"name": "look", "parameters": {"type": "object"}}, {"name": "stop"}, {"type": "web_search"}]',
        )
    ],
    "tokens": [hard(8), hard(9), build(10)],
    "tokens, no spans": [without_spans(hard(11))],
    "unscored": [
        spoken(
            12,
            [user("hi"), said("ho")],
            reward=None,
            success=None,
            reward_components=[],
            termination=Termination.UNKNOWN,
        )
    ],
    "failed": [
        spoken(13, _FAILED, reward=0.25, success=False, termination=Termination.TIME_LIMIT, n_tool_errors=1, tools=LOOK)
    ],
    "components": [
        spoken(
            14,
            [user("q"), said("a", reward=0.5)],
            reward_components=[
                RewardComponent(name="exact", value=1.0),
                RewardComponent(name="short", value=0.5, weight=0.1),
            ],
            policy="model",
            policy_version=3,
            sampling='{"temperature": 0.7}',
            final_state='{"done": true}',
        )
    ],
}
"""Rows by what is special about them."""
