"""OpenAI's Responses: requests read, answers written, whole or as a stream."""

import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.recorder.chat import (
    ROLES,
    AnswerFormat,
    FunctionTool,
    TextPart,
    as_json,
    choice_of,
    text_of,
    tools_of,
)
from agentrl.recorder.repeated import once_of, read_once
from agentrl.recorder.wire import (
    COMMENT,
    MOST,
    NOBODY,
    Answered,
    ApiError,
    Caller,
    OpenAIRequest,
    Reply,
    TurnRequest,
    openai_refusal,
)
from agentrl.schemas.trajectory import Message, Role, ToolCall


class Said(BaseModel):
    """A message; ``type`` may be left out."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = "{}"


class FunctionCallOutput(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]
    is_error: bool | None = None


class Reasoning(BaseModel):
    """Reasoning that the client hands back. What the policy sampled is known here, so only its id is read, which names
    the turn."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]
    id: str | None = None


Item = FunctionCall | FunctionCallOutput | Reasoning | Said


class ResponsesTool(FunctionTool):
    type: Literal["function"]


class NamespaceTool(BaseModel):
    """Functions under a common name. The policy reads each as ``<namespace>__<function>``; a call of it is told in the
    client's form. What is in it beside functions cannot be called here."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["namespace"]
    name: str
    tools: list["ResponsesTool | OtherTool"] = []


class OtherTool(BaseModel):
    """A tool that the server would run itself, or a grammar. No policy can call it here."""

    model_config = ConfigDict(extra="ignore")

    type: Literal[
        "custom", "web_search", "web_search_preview", "file_search", "code_interpreter", "local_shell",
        "shell", "apply_patch", "tool_search", "image_generation", "computer_use_preview", "mcp",
    ]  # fmt: skip


class TextOptions(BaseModel):
    """``verbosity`` changes nothing here."""

    model_config = ConfigDict(extra="ignore")

    format: AnswerFormat | None = None


SUMMARY = ("summary", "generate_summary")
"""Fields of ``reasoning`` that ask for a summary. It is the reasoning itself: nothing here makes a shorter one."""


class ResponsesRequest(OpenAIRequest):
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[ResponsesTool | NamespaceTool | OtherTool], read_once()] | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MOST)
    stream_options: dict[str, Any] | None = None
    previous_response_id: str | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None

    def asked(self, caller: Caller = NOBODY) -> TurnRequest:
        items = [Said(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        echo = {name: getattr(self, name) for name in ("instructions", "metadata", "temperature", "top_p", "user")}
        tools, namespaces, dropped, given_tools = _tools_read(self.tools) if self.tools else ("[]", {}, 0, [])
        named = [item.id for item in items if isinstance(item, Reasoning) and (item.id or "").startswith("rs_")]
        return TurnRequest(
            model=self.model,
            messages=_messages(items),
            tools=tools,
            namespaces=namespaces,
            named=(named[-1] or "").removeprefix("rs_") if named else None,
            schema=self.text.format.schema_in("text.format") if self.text and self.text.format else None,
            ignored=(*self.ignored(), *(["reasoning"] if self._wants_of_reasoning() else [])),
            dropped_tools=dropped,
            caller=caller,
            tool_choice=choice_of(self.tool_choice, self.parallel_tool_calls),
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_output_tokens,
            stream=bool(self.stream),
            previous=self.previous_response_id,
            instructions=self.instructions,
            echo={
                **echo,
                "tools": given_tools,
                "tool_choice": self.tool_choice or "auto",
                "parallel_tool_calls": self.parallel_tool_calls is not False,
                "max_output_tokens": self.max_output_tokens,
                "previous_response_id": self.previous_response_id,
                "reasoning": self.reasoning,
            },
        )

    def _wants_of_reasoning(self) -> bool:
        """Whether more than a summary is asked for, such as an effort, which says nothing here."""
        return any(value for name, value in (self.reasoning or {}).items() if name not in SUMMARY)


def _callable(
    tools: Sequence[ResponsesTool | NamespaceTool | OtherTool],
) -> tuple[list[FunctionTool], dict[str, tuple[str, str]], int]:
    """The functions that a policy can call, those of namespaces by their flat names, which are listed, and how many
    tools it cannot call: others, and one whose flat name another function has."""
    functions = [tool for tool in tools if isinstance(tool, ResponsesTool)]
    flat: list[FunctionTool] = list(functions)
    names, namespaces = {tool.name for tool in functions}, dict[str, tuple[str, str]]()
    given = 0
    for tool in tools:
        if not isinstance(tool, NamespaceTool):
            given += 1
            continue
        given += len(tool.tools)
        for inner in tool.tools:
            if isinstance(inner, ResponsesTool) and (name := _flat(tool.name, inner.name)) not in names:
                names.add(name)
                namespaces[name] = (tool.name, inner.name)
                flat.append(FunctionTool(name=name, description=inner.description, parameters=inner.parameters))
    return flat, namespaces, given - len(flat)


def _read_tools(
    tools: Sequence[ResponsesTool | NamespaceTool | OtherTool],
) -> tuple[str, dict[str, tuple[str, str]], int, list[dict[str, Any]]]:
    """JSON of tools, as a trajectory has them, what :func:`_callable` says of them, and the tools as they came."""
    functions, namespaces, dropped = _callable(tools)
    return tools_of(functions), namespaces, dropped, [tool.model_dump(mode="json") for tool in tools]


_tools_read = once_of(_read_tools, lambda read: 2 * len(read[0]))


def _flat(namespace: str | None, name: str) -> str:
    """The name by which a policy knows a function."""
    return f"{namespace}__{name}" if namespace else name


def _messages(items: Sequence[Item]) -> list[Message]:
    """Items as messages: reasoning, text and calls that follow each other are one turn of the assistant."""
    messages: list[Message] = []
    saying = False
    for item in items:
        assistant = isinstance(item, FunctionCall | Reasoning) or (isinstance(item, Said) and item.role == "assistant")
        if assistant and not saying:
            messages.append(Message(role=Role.ASSISTANT))
        saying = assistant
        if isinstance(item, FunctionCall):
            call = ToolCall(id=item.call_id, name=_flat(item.namespace, item.name), arguments=as_json(item.arguments))
            messages[-1] = messages[-1].model_copy(update={"tool_calls": [*messages[-1].tool_calls, call]})
        elif isinstance(item, FunctionCallOutput):
            text, error = text_of(item.output), item.is_error
            messages.append(Message(role=Role.TOOL, content=text, tool_call_id=item.call_id, error=error))
        elif isinstance(item, Said) and assistant:
            content = messages[-1].content + text_of(item.content)
            messages[-1] = messages[-1].model_copy(update={"content": content})
        elif isinstance(item, Said):
            messages.append(Message(role=ROLES[item.role], content=text_of(item.content)))
    return messages


def _head(asked: TurnRequest, name: str, created: int) -> dict[str, Any]:
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "model": asked.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "store": True,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        **asked.echo,
    }


def _text_item(name: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [_part(text)] if status == "completed" else []
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _other_items(asked: TurnRequest, answer: Answered) -> Iterator[dict[str, Any]]:
    if answer.message.reasoning:
        content = [{"type": "reasoning_text", "text": answer.message.reasoning}]
        summary = [{"type": "summary_text", "text": answer.message.reasoning}] if _wants_summary(asked) else []
        item = {"type": "reasoning", "id": f"rs_{answer.name}", "summary": summary, "content": content}
        yield {**item, "status": "completed"}
    for number, call in enumerate(answer.message.tool_calls):
        namespace, name = asked.namespaces.get(call.name, (None, call.name))
        yield {
            "type": "function_call",
            "id": f"fc_{answer.name}_{number}",
            "call_id": call.id,
            "name": name,
            **({"namespace": namespace} if namespace else {}),
            "arguments": call.arguments,
            "status": "completed",
        }


def _wants_summary(asked: TurnRequest) -> bool:
    return any((asked.echo.get("reasoning") or {}).get(name) for name in SUMMARY)


def _done(asked: TurnRequest, answer: Answered, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
    cut = answer.finish == "length"
    return {
        **_head(asked, answer.name, answer.created),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(output),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }


def whole(asked: TurnRequest, answer: Answered) -> dict[str, Any]:
    """The body of an answer."""
    others = list(_other_items(asked, answer))
    texts = [_text_item(answer.name, answer.message.content)] if answer.message.content or not others else []
    before = [item for item in others if item["type"] == "reasoning"]
    return _done(asked, answer, [*before, *texts, *(item for item in others if item not in before)])


async def events(asked: TurnRequest, reply: Reply) -> AsyncIterator[bytes]:
    """The stream of an answer: text as it is sampled, then reasoning and calls, each complete."""
    name, numbers = reply.name, itertools.count()

    def event(kind: str, **values: Any) -> bytes:
        body = {"type": kind, "sequence_number": next(numbers), **values}
        return f"event: {kind}\n".encode() + b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"

    head = _head(asked, name, reply.created)
    yield event("response.created", response=head)
    yield event("response.in_progress", response=head)
    output: list[dict[str, Any]] = []
    where = {"item_id": f"msg_{name}", "output_index": 0, "content_index": 0}
    async for text in reply.deltas():
        if not output:
            for sent in _begun(event, name, where):
                yield sent
            output.append(_text_item(name, "", "in_progress"))
        yield event("response.output_text.delta", **where, delta=text, logprobs=[])
    answer = await reply.answered()
    others = list(_other_items(asked, answer))
    if not output and not others:
        for sent in _begun(event, name, where):
            yield sent
        output.append(_text_item(name, "", "in_progress"))
    if output:
        output[0] = _text_item(name, answer.message.content)
        yield event("response.output_text.done", **where, text=answer.message.content, logprobs=[])
        yield event("response.content_part.done", **where, part=_part(answer.message.content))
        yield event("response.output_item.done", output_index=0, item=output[0])
    for item in others:
        for sent in _item(event, item, len(output)):
            yield sent
        output.append(item)
    kind = "response.incomplete" if answer.finish == "length" else "response.completed"
    yield event(kind, response=_done(asked, answer, output))


def _begun(event: Any, name: str, where: dict[str, Any]) -> Iterator[bytes]:
    yield event("response.output_item.added", output_index=0, item=_text_item(name, "", "in_progress"))
    yield event("response.content_part.added", **where, part=_part(""))


def _item(event: Any, item: dict[str, Any], index: int) -> Iterator[bytes]:
    if item["type"] == "function_call":
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield event("response.output_item.added", output_index=index, item=begun)
        where = {"item_id": item["id"], "output_index": index}
        yield event("response.function_call_arguments.delta", **where, delta=item["arguments"])
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield event("response.function_call_arguments.done", **where, **done)
    else:
        yield event("response.output_item.added", output_index=index, item={**item, "summary": []})
        for number, part in enumerate(item["summary"]):
            where = {"item_id": item["id"], "output_index": index, "summary_index": number}
            yield event("response.reasoning_summary_part.added", **where, part={**part, "text": ""})
            yield event("response.reasoning_summary_text.delta", **where, delta=part["text"])
            yield event("response.reasoning_summary_text.done", **where, text=part["text"])
            yield event("response.reasoning_summary_part.done", **where, part=part)
    yield event("response.output_item.done", output_index=index, item=item)


REQUEST, PING, refusal = ResponsesRequest, COMMENT, openai_refusal


def failed(error: ApiError) -> bytes:
    """The event of an error in the middle of a stream."""
    body = {"type": "error", "sequence_number": 1 << 30, "message": error.message, "code": error.code, "param": None}
    return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
