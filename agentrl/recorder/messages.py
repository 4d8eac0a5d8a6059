"""Anthropic's Messages: requests read, answers written, whole or as a stream."""

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from agentrl.recorder.chat import MOST_STOPS, AnswerFormat, FunctionTool, tools_of
from agentrl.recorder.repeated import once_of, read_once
from agentrl.recorder.wire import (
    MOST,
    NOBODY,
    Answered,
    ApiError,
    ApiRequest,
    Caller,
    OverflowingError,
    Reply,
    TurnRequest,
)
from agentrl.schemas.trajectory import Message, Role, ToolCall

BILLING = "x-anthropic-billing-header:"
"""A block of the system prompt that begins so is left out: it differs from session to session, and says nothing."""

KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}  # fmt: skip


class Block(BaseModel):
    """``cache_control`` and ``citations`` change nothing."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    """Reasoning that the client hands back. Its signature is the id of the turn here."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = {}


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


Blocks = list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]]

SAYS = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class GivenMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["user", "assistant", "system"]
    content: str | Blocks

    @field_validator("content")
    @classmethod
    def _said_by(cls, content: "str | Blocks", info: ValidationInfo) -> "str | Blocks":
        for number, block in enumerate([] if isinstance(content, str) else content):
            if "role" in info.data and not isinstance(block, SAYS[info.data["role"]]):
                raise ValueError(f"block {number} is a {block.type}, which no {info.data['role']} says")
        return content

    @cached_property
    def messages(self) -> list[Message]:
        """See :meth:`_messages`."""
        return list(self._messages())

    def _messages(self) -> Iterator[Message]:
        """Answers of tools, each as a message of its own, and what is said beside them."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                text = _joined(block.content)
                yield Message(role=Role.TOOL, content=text, tool_call_id=block.tool_use_id, error=block.is_error)
        texts = [block.text for block in blocks if isinstance(block, TextBlock)]
        if self.role == "assistant":
            thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
            uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
            calls = [ToolCall(id=use.id, name=use.name, arguments=json.dumps(use.input)) for use in uses]
            yield Message(role=Role.ASSISTANT, content="".join(texts), reasoning=thoughts or None, tool_calls=calls)
        elif texts:
            yield Message(role=Role(self.role), content="\n".join(texts))


class MessagesTool(BaseModel):
    """A tool of another ``type`` than ``custom`` is one that the server or the model's maker defines."""

    model_config = ConfigDict(extra="ignore")

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] = {}


class ToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def wish(self) -> str:
        if self.type == "tool":
            return f"function:{self.name}"
        single = "single" if self.disable_parallel_tool_use else "auto"
        return {"auto": single, "any": "required", "none": "none"}[self.type]


class OutputConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")

    format: AnswerFormat | None = None
    effort: str | None = None


class ContextEdit(BaseModel):
    """Thinking that is kept is what is done here anyway; another edit would change what the policy reads."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(BaseModel):
    model_config = ConfigDict(extra="forbid")

    edits: list[ContextEdit] = []


def _read_tools(tools: list[MessagesTool]) -> tuple[str, int]:
    """JSON of tools, as a trajectory has them, and how many a policy cannot call."""
    custom = [tool for tool in tools if tool.type in (None, "custom")]
    functions = [
        FunctionTool(name=tool.name, description=tool.description, parameters=tool.input_schema) for tool in custom
    ]
    return tools_of(functions), len(tools) - len(custom)


_tools_read = once_of(_read_tools, lambda read: len(read[0]))


class MessagesRequest(ApiRequest):
    messages: list[Annotated[GivenMessage, read_once()]] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessagesTool], read_once()] | None = None
    tool_choice: ToolChoice | None = None
    max_tokens: int | None = Field(None, ge=1, le=MOST)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MOST)
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    def asked(self, caller: Caller = NOBODY) -> TurnRequest:
        tools, dropped_tools = _tools_read(self.tools) if self.tools else ("[]", 0)
        output = self.output_config
        said_nothing = {"thinking": self.thinking, "effort": output.effort if output else None}
        return TurnRequest(
            model=self.model,
            messages=[message for given in self.messages for message in given.messages],
            tools=tools,
            tool_choice=self.tool_choice.wish() if self.tool_choice else "auto",
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=tuple(filter(None, self.stop_sequences or [])),
            stream=bool(self.stream),
            instructions=self._system() or None,
            named=self._named(),
            schema=output.format.schema_in("output_config.format") if output and output.format else None,
            ignored=(*self.ignored(), *(name for name, value in said_nothing.items() if value)),
            dropped_tools=dropped_tools,
            caller=caller,
        )

    def _system(self) -> str:
        if isinstance(self.system, str):
            return self.system
        blocks = self.system or []
        return _joined(blocks[1:] if blocks and blocks[0].text.startswith(BILLING) else blocks)

    def _named(self) -> str | None:
        """The turn that the last thinking block belongs to."""
        for given in reversed(self.messages):
            for block in [] if isinstance(given.content, str) else reversed(given.content):
                if isinstance(block, ThinkingBlock) and block.signature:
                    return block.signature
        return None


REQUEST = MessagesRequest


def _joined(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or [])


def refusal(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error. Clients know how to shorten a conversation whose prompt is too long, and that an
    overloaded server is to be asked again."""
    status, message = error.status, error.message
    if isinstance(error, OverflowingError):
        message = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
    if error.code == "engine_failed":
        status = 529
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": message}}


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    none = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": sampled, **none}


def _head(asked: TurnRequest, name: str, prompt: int, sampled: int) -> dict[str, Any]:
    head = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": asked.model, "content": []}
    return {**head, "stop_reason": None, "stop_sequence": None, "usage": _usage(prompt, sampled)}


def _ending(answer: Answered) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish]
    return {"stop_reason": "stop_sequence" if answer.stopped_by else reason, "stop_sequence": answer.stopped_by}


def whole(asked: TurnRequest, answer: Answered) -> dict[str, Any]:
    """The body of an answer."""
    message, content = answer.message, list[dict[str, Any]]()
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": answer.name})
    if message.content:
        content.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        use = {"id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        content.append({"type": "tool_use", **use})
    head = _head(asked, answer.name, answer.prompt_tokens, answer.sampled_tokens)
    return {**head, "content": content, **_ending(answer)}


async def events(asked: TurnRequest, reply: Reply) -> AsyncIterator[bytes]:
    """The stream of an answer: text as it is sampled, a call when it is complete."""
    prompt = await reply.begun()
    yield _event("message_start", message=_head(asked, reply.name, prompt, 0))
    numbers = itertools.count()
    text_number, thought = -1, False
    async for text in reply.deltas():
        if text_number < 0:
            if reply.reasoning:
                thought = True
                for event in _thinking(next(numbers), reply.reasoning, reply.name):
                    yield event
            text_number = next(numbers)
            yield _event("content_block_start", index=text_number, content_block={"type": "text", "text": ""})
        yield _event("content_block_delta", index=text_number, delta={"type": "text_delta", "text": text})
    if text_number >= 0:
        yield _event("content_block_stop", index=text_number)
    answer = await reply.answered()
    if answer.message.reasoning and not thought:
        for event in _thinking(next(numbers), answer.message.reasoning, answer.name):
            yield event
    for call in answer.message.tool_calls:
        number = next(numbers)
        use = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield _event("content_block_start", index=number, content_block=use)
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield _event("content_block_delta", index=number, delta=delta)
        yield _event("content_block_stop", index=number)
    usage = _usage(answer.prompt_tokens, answer.sampled_tokens)
    yield _event("message_delta", delta=_ending(answer), usage=usage)
    yield _event("message_stop")


def _thinking(number: int, thoughts: str, name: str) -> Iterator[bytes]:
    start = {"type": "thinking", "thinking": "", "signature": ""}
    yield _event("content_block_start", index=number, content_block=start)
    yield _event("content_block_delta", index=number, delta={"type": "thinking_delta", "thinking": thoughts})
    yield _event("content_block_delta", index=number, delta={"type": "signature_delta", "signature": name})
    yield _event("content_block_stop", index=number)


def _event(kind: str, **values: Any) -> bytes:
    body = json.dumps({"type": kind, **values}, ensure_ascii=False)
    return f"event: {kind}\ndata: {body}\n\n".encode()


PING = _event("ping")
"""What keeps a stream alive."""


def failed(error: ApiError) -> bytes:
    """The event of an error in the middle of a stream."""
    return _event("error", error=refusal(error)[1]["error"])
