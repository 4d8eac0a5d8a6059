"""A client that sends what a coding agent sent when it was recorded: Claude Code 2.1.197, Codex 0.169.0, OpenCode
1.18.33. The policy says what the scripted model said to them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from recording import Served

from agentrl.recorder.chat import ChatRequest
from agentrl.recorder.messages import MessagesRequest
from agentrl.recorder.responses import ResponsesRequest
from agentrl.recorder.wire import read
from agentrl.schemas.trajectory import Message, Role, Trajectory

DATA = Path(__file__).parent / "harness"
PROTOCOLS: dict[str, Any] = {"messages": MessagesRequest, "responses": ResponsesRequest, "completions": ChatRequest}


class Client:
    """Sends the requests of a file again. Ids that the scripted model gave are replaced by those of the recorder, as
    the client would have repeated them. ``turns`` counts what was sampled."""

    def __init__(self, server: Served, name: str) -> None:
        self.requests = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
        self.requests = [request for request in self.requests if request["method"] == "POST"]
        for request in self.requests:
            request["path"] = request["path"].removeprefix("/episodes/E1")
        self.server, self.ids = server, dict[str, str]()
        self.opened = httpx.post(f"{server.url}/episodes", json={"task_id": name}).json()
        self.next_said: Message | str = "done"
        self.turns = 0
        server.engine.says = self._says

    def _says(self, _: str) -> Message | str:
        self.turns += 1
        return self.next_said

    def send(
        self, number: int, timeout: float = 20, answer: Message | str | None = None, **changed: Any
    ) -> httpx.Response:
        """``answer`` is what the policy says; None: what the scripted model said."""
        request = self.requests[number]
        self.next_said = answer_to(self.requests, number) if answer is None else answer
        text = json.dumps({**request["body"], **changed})
        for theirs, ours in self.ids.items():
            text = text.replace(json.dumps(theirs), json.dumps(ours))
        headers = {name: value for name, value in request["headers"].items() if name.lower()[:2] in ("x-", "se")}
        headers |= {"content-type": "application/json", "x-api-key": self.opened["api_key"]}
        url = f"{self.opened['anthropic_base_url']}{request['path']}"
        response = httpx.post(url, content=text, headers=headers, timeout=timeout)
        if response.is_success and "overloaded_error" not in response.text:
            self._learn(self.next_said, told(response.text))
        return response

    def send_all(self) -> None:
        for number in range(len(self.requests)):
            assert self.send(number).status_code == 200

    def _learn(self, message: Message | str, events: list[dict[str, Any]]) -> None:
        theirs = [call.id for call in message.tool_calls] if isinstance(message, Message) else []
        self.ids.update(zip(theirs, list(call_ids(events)), strict=True))
        if isinstance(message, Message) and message.reasoning and (signature := signature_of(events)):
            self.ids[message.name or ""] = signature

    def rows(self, reward: float = 1.0) -> list[Trajectory]:
        url = f"{self.server.url}/episodes/{self.opened['id']}/reward"
        httpx.post(url, json={"reward": reward}, headers={"x-api-key": self.opened["api_key"]}).raise_for_status()
        return [row for row in self.server.flush() if row.episode_id == self.opened["id"]]


def told(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines] or [json.loads(text)]


def call_ids(events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        if event.get("type") == "content_block_start" and event["content_block"]["type"] == "tool_use":
            yield event["content_block"]["id"]
        if event.get("type") == "response.output_item.done" and event["item"]["type"] == "function_call":
            yield event["item"]["call_id"]
        for choice in event.get("choices", []):
            yield from (call["id"] for call in choice["delta"].get("tool_calls", []))
        yield from (block["id"] for block in event.get("content", []) if block["type"] == "tool_use")


def signature_of(events: list[dict[str, Any]]) -> str:
    deltas = [event["delta"] for event in events if event.get("type") == "content_block_delta"]
    return "".join(delta.get("signature", "") for delta in deltas)


def answer_to(requests: list[dict[str, Any]], number: int) -> Message | str:
    """What the scripted model said: the turn that a later request repeats after the conversation of this one."""
    conversation = messages_of(requests[number])
    for later in requests[number + 1 :]:
        whole = messages_of(later)
        if len(whole) > len(conversation) and [key(item) for item in whole[: len(conversation)]] == [
            key(message) for message in conversation
        ]:
            message = whole[len(conversation)]
            return message if message.role is Role.ASSISTANT else "done"
    return "done"


def messages_of(request: dict[str, Any]) -> list[Message]:
    kind = PROTOCOLS[request["path"].partition("?")[0].rpartition("/")[2]]
    asked = read(kind, json.dumps(request["body"]).encode()).asked()
    messages = list(asked.messages)
    if request["path"].startswith("/v1/messages"):
        given = [message["content"] for message in request["body"]["messages"] if isinstance(message["content"], list)]
        blocks = [block for content in given for block in content if block["type"] == "thinking"]
        signatures = iter([block["signature"] for block in blocks])
        messages = [
            message.model_copy(update={"name": next(signatures)}) if message.reasoning else message
            for message in messages
        ]
    return messages


def key(message: Message) -> tuple[Any, ...]:
    return message.role, message.content, [(call.name, call.arguments) for call in message.tool_calls]


def tags(row: Trajectory, beginning: str) -> list[str]:
    return [tag for tag in row.tags if tag.startswith(beginning)]
