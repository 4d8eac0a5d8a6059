"""What requests repeat is read once, and means what it meant at first."""

import hashlib
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from agentrl.recorder.chat import ChatMessage
from agentrl.recorder.repeated import LastUsed, made_of, read_once
from agentrl.recorder.tree import SampledTurn, canonical, digests, with_own_ids
from agentrl.schemas.trajectory import Message, Role, ToolCall


def calling(call_id: str, arguments: str = "{}", name: str = "find") -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=[ToolCall(id=call_id, name=name, arguments=arguments)])


def sampled(parent: SampledTurn | None, told: str, own: str, name: str) -> SampledTurn:
    message = calling(own, name=name)
    return SampledTurn(0, parent, [], [], None, message, [told], b"", "[]", "")  # type: ignore[arg-type]


def test_an_equal_message_is_the_same_object_and_another_is_not() -> None:
    read = TypeAdapter(Annotated[ChatMessage, read_once()]).validate_python
    first = read({"role": "user", "content": "who?"})
    assert read({"content": "who?", "role": "user"}) == first
    assert read({"role": "user", "content": "who?"}) is first
    assert read({"role": "user", "content": "who?"}).message is first.message
    assert read({"role": "system", "content": "who?"}).message.role is Role.SYSTEM


class Field(BaseModel):
    value: Any


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), (1, True), (0.0, -0.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1})])
def test_values_that_are_only_alike_are_kept_apart(first: Any, second: Any) -> None:
    read = TypeAdapter(Annotated[Field, read_once()]).validate_python
    assert repr(read({"value": first}).value) == repr(first)
    assert repr(read({"value": second}).value) == repr(second)


def test_a_message_that_is_wrong_is_refused_each_time() -> None:
    read = TypeAdapter(list[Annotated[ChatMessage, read_once()]]).validate_python
    for _ in range(2):
        with pytest.raises(ValidationError) as refused:
            read([{"role": "user", "content": "who?"}, {"role": "nobody"}])
        assert [problem["loc"] for problem in refused.value.errors()] == [(1, "role")]


def test_what_is_used_is_kept_and_the_rest_goes() -> None:
    kept: LastUsed[int] = LastUsed(100)
    kept.put("used", 0, 10)
    for number in range(1000):
        kept.put(number, number, 10)
        assert kept.get("used") == 0
    assert kept.get(999) == 999
    assert kept.get(0) is None
    assert len(kept._young) + len(kept._old) <= 22


def test_digests_of_known_messages_are_those_of_new_ones() -> None:
    shared = [
        Message(role=Role.USER, content="who?"),
        calling("a", '{"n": 1, "m": 2}'),
        calling("b", '{"m": 2.0, "n": 1}'),
    ]
    for beginning in (b"one", b"two", b"one"):
        before, expected = beginning, list[bytes]()
        for message in shared:
            before = hashlib.blake2b(before + canonical(message).encode(), digest_size=16).digest()
            expected.append(before)
        assert digests(shared, beginning) == expected
        assert digests([message.model_copy() for message in shared], beginning) == expected


def test_many_beginnings_of_one_message_do_not_pile_up() -> None:
    message = Message(role=Role.USER, content="ok")
    reached = {digests([message], str(number).encode())[0] for number in range(2000)}
    assert len(reached) == 2000
    assert len(made_of(message).after) <= 256


@pytest.mark.parametrize("field", ["content", "reasoning", "tool_call_id", "name", "error"])
def test_every_field_of_a_message_tells_requests_apart(field: str) -> None:
    message = Message(role=Role.TOOL, content="x")
    other = message.model_copy(update={field: True if field == "error" else "y"})
    assert made_of(message).exact != made_of(other).exact
    assert made_of(message).exact == made_of(message.model_copy()).exact
    assert made_of(calling("a")).exact != made_of(calling("b")).exact


def test_answers_get_the_calls_own_ids_wherever_the_calls_are() -> None:
    first = sampled(None, "told_1", "call_0", "far")
    last = sampled(first, "told_2", "call_0", "near")
    given = [Message(role=Role.TOOL, tool_call_id=call_id) for call_id in ("told_1", "told_2", "written", "unknown")]
    renamed = with_own_ids([calling("written", name="here"), *given], last)[1:]
    assert [(message.tool_call_id, message.name) for message in renamed] == [
        ("call_0", "far"), ("call_0", "near"), ("written", "here"), ("unknown", None),
    ]  # fmt: skip
