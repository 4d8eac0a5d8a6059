"""OpenAI's chat completions: requests read, answers written, whole or as a stream."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.recorder.repeated import once_of, read_once
from agentrl.recorder.wire import (
    COMMENT,
    MOST,
    NOBODY,
    Answered,
    AnswerSchema,
    ApiError,
    Caller,
    OpenAIRequest,
    Reply,
    TurnRequest,
    openai_refusal,
)
from agentrl.schemas.json_text import is_json
from agentrl.schemas.trajectory import Message, Role, ToolCall

ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}

MOST_STOPS = 64


class TextPart(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: str = "{}"


class Call(BaseModel):
    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """Fields that clients repeat out of an answer, such as ``refusal``, are read and say nothing. ``is_error``, which
    OpenAI does not have, says of a tool's message whether the tool failed."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    is_error: bool | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    @cached_property
    def message(self) -> Message:
        calls = [
            ToolCall(id=call.id, name=call.function.name, arguments=as_json(call.function.arguments))
            for call in self.tool_calls or []
        ]
        return Message(
            role=ROLES[self.role],
            content=text_of(self.content),
            reasoning=self.reasoning_content or self.reasoning,
            tool_calls=calls,
            tool_call_id=self.tool_call_id,
            name=self.name,
            error=self.is_error if self.role == "tool" else None,
        )


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: FunctionTool


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GivenSchema(BaseModel):
    """Any JSON is good without a schema. ``name`` and ``strict`` change nothing."""

    model_config = ConfigDict(extra="ignore")

    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class AnswerFormat(GivenSchema):
    """Chat completions have the schema one level deeper than the other protocols."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: GivenSchema | None = None

    def schema_in(self, field: str) -> AnswerSchema | None:
        """The schema that this format asks for, as that ``field`` of the request; None if it asks for text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return AnswerSchema('{"type": "object"}', f"{field}.type")
        inner, path = (self.json_schema, "json_schema.schema") if self.json_schema else (self, "schema")
        given = {} if inner.schema_ is None else inner.schema_
        return AnswerSchema(json.dumps(given), f"{field}.{path}")


class ChatRequest(OpenAIRequest):
    messages: list[Annotated[ChatMessage, read_once()]] = Field(min_length=1)
    tools: Annotated[list[ChatTool], read_once()] | None = None
    top_k: int | None = Field(None, ge=0, le=MOST)
    max_tokens: int | None = Field(None, ge=1, le=MOST)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: Literal[1] | None = None
    stream_options: StreamOptions | None = None
    response_format: AnswerFormat | None = None
    logprobs: Literal[False] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None

    def asked(self, caller: Caller = NOBODY) -> TurnRequest:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return TurnRequest(
            model=self.model,
            messages=[message.message for message in self.messages],
            tools=_tools_text(self.tools) if self.tools else "[]",
            tool_choice=choice_of(self.tool_choice, self.parallel_tool_calls),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            seed=self.seed,
            stop=tuple(filter(None, stop)),
            stream=bool(self.stream),
            usage_in_stream=bool(self.stream_options and self.stream_options.include_usage),
            schema=self.response_format.schema_in("response_format") if self.response_format else None,
            ignored=self.ignored(),
            caller=caller,
        )


def text_of(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


def as_json(arguments: str) -> str:
    """Arguments as JSON text; what is no JSON that every reader takes becomes a JSON string."""
    return arguments if is_json(arguments) else json.dumps(arguments)


def tools_of(functions: Sequence[FunctionTool]) -> str:
    """JSON of tools, as a trajectory has them."""
    keys = ("name", "description", "parameters")
    given = [{key: value for key in keys if (value := getattr(function, key)) is not None} for function in functions]
    return json.dumps([{"type": "function", "function": function} for function in given])


def _read_tools(tools: list[ChatTool]) -> str:
    return tools_of([tool.function for tool in tools])


_tools_text = once_of(_read_tools, len)


def choice_of(choice: str | dict[str, Any] | None, parallel: bool | None) -> str:
    """``auto``, or what the client would like. Tokens are sampled as the policy says them, so that a choice is not
    enforced; a turn that does not meet it is counted."""
    if isinstance(choice, dict):
        function = choice.get("function")
        named = choice.get("name") or (function.get("name") if isinstance(function, dict) else None)
        if not named or not isinstance(named, str):
            raise ApiError(400, f"tool_choice: {choice!r} names no function", param="tool_choice")
        return f"function:{named}"
    return "single" if parallel is False and choice in (None, "auto") else choice or "auto"


def usage(answer: Answered) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }


def _calls(message: Message) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]


def whole(asked: TurnRequest, answer: Answered) -> dict[str, Any]:
    """The body of an answer."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content or None, "refusal": None}
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if answer.message.tool_calls:
        message["tool_calls"] = _calls(answer.message)
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
    head = {"id": f"chatcmpl-{answer.name}", "object": "chat.completion", "created": answer.created}
    return {**head, "model": answer.model, "choices": [choice], "usage": usage(answer)}


async def events(asked: TurnRequest, reply: Reply) -> AsyncIterator[bytes]:
    """The stream of an answer: text as it is sampled, a call as one delta when it is complete."""
    head = {
        "id": f"chatcmpl-{reply.name}",
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": asked.model,
    }

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]})

    yield chunk({"role": "assistant", "content": ""})
    async for text in reply.deltas():
        yield chunk({"content": text})
    answer = await reply.answered()
    for delta in _last(answer.message):
        yield chunk(delta)
    yield chunk({}, answer.finish)
    if asked.usage_in_stream:
        yield _event({**head, "choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


def _last(message: Message) -> Iterator[dict[str, Any]]:
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}
    for number, call in enumerate(_calls(message)):
        yield {"tool_calls": [{"index": number, **call}]}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


REQUEST, PING, refusal = ChatRequest, COMMENT, openai_refusal


def failed(error: ApiError) -> bytes:
    """The event of an error in the middle of a stream."""
    return _event(refusal(error)[1])
