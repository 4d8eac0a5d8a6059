"""Answers by a JSON schema: kept to it where the engine can, and then no part of what is trained on."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from recorded_client import Client, told
from recording import ScriptedTokens, Served, check, open_episode, policy_for_tests, rewarded, sampled, served

from agentrl.engines.base import Sampling, SchemaError, Session, Turn
from agentrl.models.policy import Policy
from agentrl.recorder import recorder
from agentrl.recorder.episode import RecordedEpisode
from agentrl.recorder.sampler import Sampler
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, Trajectory

SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
ANSWER = '{"title": "hello"}'
TOOL = {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}
CHAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}}
RESPONSES = {"text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}}
MESSAGES = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
ASKING = [
    ("chat/completions", "messages", CHAT, "response_format.json_schema.schema"),
    ("responses", "input", RESPONSES, "text.format.schema"),
    ("messages", "messages", MESSAGES, "output_config.format.schema"),
]


@dataclass
class KeepsSchemas(ScriptedTokens):
    """Answers turns by a schema with :data:`ANSWER`, unless ``refuses`` says why not."""

    keeps_schemas: bool = True
    refuses: str = ""
    schemas: list[str | None] = field(default_factory=list)

    async def turn(
        self,
        session: Session,
        sampling: Sampling,
        *,
        stop: Sequence[int],
        seed: int,
        schema: str | None = None,
        **limits: Any,
    ) -> Turn:
        self.schemas.append(schema)
        if schema is not None and self.refuses:
            await asyncio.sleep(self.delay)
            raise SchemaError(self.refuses)
        says, self.says = self.says, (lambda _: ANSWER) if schema is not None else self.says
        try:
            return await super().turn(session, sampling, stop=stop, seed=seed, **limits)
        finally:
            self.says = says


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


def ask(server: Served, key: str, path: str, **body: Any) -> httpx.Response:
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    return httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body}, headers=headers, timeout=20)


def talk(
    server: Served, path: str, key: str, asking: dict[str, Any], answer: str = ANSWER, **more: Any
) -> list[Trajectory]:
    """A conversation of three turns, the second by what ``asking`` says, which is answered by ``answer``."""
    client, name = open_episode(server)
    user, answered = [{"role": "user", "content": text} for text in ("a", "b", "c")], ["free", answer]
    for number in range(3):
        earlier = [
            entry
            for before in range(number)
            for entry in (user[before], {"role": "assistant", "content": answered[before]})
        ]
        body = {key: [*earlier, user[number]], **(asking if number == 1 else {}), **more}
        response = ask(server, client.api_key, path, **body)
        assert response.status_code == 200, response.text
    return rewarded(server, client, name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "key", "asking", "_"), ASKING)
def test_tokens_by_a_schema_are_context(
    policy: Policy, tmp_path: Path, path: str, key: str, asking: dict[str, Any], _: str, stream: bool
) -> None:
    with served(tmp_path, policy, lambda _: "free", engine=KeepsSchemas) as server:
        [row] = talk(server, path, key, asking, stream=stream)
        constrained = [number for number, schema in enumerate(server.engine.schemas) if schema is not None]
    assert [json.loads(server.engine.schemas[number] or "") for number in constrained] == [SCHEMA], "one call, whole"
    check(policy, row)
    assert [tag for tag in row.tags if tag.startswith(("constrained", "not_json", NOT_TRAINED))] == ["constrained:1"]
    assert (row.n_steps, row.reward) == (3, 1.0)
    assert sampled(policy, row) == ["free<|im_end|>"] * 2
    turns = [message for message in row.messages if message.role is Role.ASSISTANT]
    assert [message.content for message in turns] == ["free", ANSWER, "free"]
    kept = slice(turns[1].token_start, turns[1].token_end)
    assert policy.tokenizer.decode(row.input_ids[kept]) == f"{ANSWER}<|im_end|>"
    assert not any(row.action_mask[kept])
    assert np.isnan(row.logprobs[kept]).all(), "no log-probs are claimed"


def test_a_row_of_such_answers_alone_is_rewarded_and_not_trained_on(policy: Policy, tmp_path: Path) -> None:
    user = {"role": "user", "content": "a"}
    with served(tmp_path, policy, lambda _: "free", engine=KeepsSchemas) as server:
        server.engine.version = 3
        client, name = open_episode(server)
        for messages in ([user], [user, {"role": "assistant", "content": ANSWER}, user]):
            assert ask(server, client.api_key, "chat/completions", messages=messages, **CHAT).status_code == 200
        [path] = tmp_path.glob("*/*.jsonl")
        ends = time.monotonic() + 30
        while True:  # that an answer was received is written after it was sent
            read = RecordedEpisode.read(path)
            assert read is not None
            [again] = read.rows()
            if again.n_steps == 2 or time.monotonic() > ends:
                break
            time.sleep(0.01)
        [row] = rewarded(server, client, name)
    check(policy, row)
    assert (row.n_steps, row.n_action_tokens, row.reward, row.policy_version) == (2, 0, 1.0, 3)
    assert {"constrained:2", NOT_TRAINED} <= set(row.tags), "training stages refuse a row without a token to train on"
    assert (again.input_ids, again.action_mask) == (row.input_ids, row.action_mask), "its file knows them too"


def test_a_title_by_a_schema_changes_nothing_of_the_work(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path, policy, str, turn_tokens=1000, room=8000, engine=KeepsSchemas) as server:
        client = Client(server, "claude_code_title")
        titles = [
            n for n, request in enumerate(client.requests) if "format" in request["body"].get("output_config", {})
        ]
        for number in range(len(client.requests)):
            response = client.send(number)
            assert response.status_code == 200
            if number in titles:
                text = "".join(event.get("delta", {}).get("text", "") for event in told(response.text))
                assert text == ANSWER
        rows = client.rows()
    assert titles
    side = [row for row in rows if row.agent == "side"]
    assert [("constrained:1" in row.tags, NOT_TRAINED in row.tags, row.reward) for row in side] == [(True, True, None)]
    assert all(row.reward == 1.0 and row.n_action_tokens for row in rows if row.agent != "side")


@pytest.mark.parametrize(
    ("change", "engine", "settings"),
    [
        ({}, ScriptedTokens, {}),
        ({}, KeepsSchemas, {"constrain": False}),
        ({"tools": [{"type": "function", "function": TOOL}]}, KeepsSchemas, {}),
        ({"response_format": {"type": "text"}}, KeepsSchemas, {}),
    ],
    ids=["the engine cannot", "all is to be trained on", "tools may be called", "text"],
)
def test_otherwise_a_schema_is_a_wish(
    policy: Policy, tmp_path: Path, change: dict[str, Any], engine: Any, settings: dict[str, Any]
) -> None:
    with served(tmp_path, policy, lambda _: "free", engine=engine, **settings) as server:
        more = {name: value for name, value in change.items() if name not in CHAT}
        [row] = talk(server, "chat/completions", "messages", {**CHAT, **change}, "free", **more)
        assert not [schema for schema in getattr(server.engine, "schemas", []) if schema is not None]
    check(policy, row)
    wished = change.get("response_format", CHAT["response_format"])["type"] != "text"
    assert [tag for tag in row.tags if tag.startswith(("constrained", "not_json"))] == ["not_json:1"] * wished


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "key", "asking", "name"), ASKING)
def test_a_schema_that_the_engine_refuses_is_named(
    policy: Policy, tmp_path: Path, path: str, key: str, asking: dict[str, Any], name: str, stream: bool
) -> None:
    with served(tmp_path, policy, lambda _: "free", engine=KeepsSchemas) as server:
        client, _ = open_episode(server)
        server.engine.refuses = "Grammar error: unknown type"
        body = {key: [{"role": "user", "content": "a"}], "stream": stream}
        response = ask(server, client.api_key, path, **body, **asking)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"] == f"{name}: Grammar error: unknown type"
        assert error.get("param", name) == name
        assert server.engine.open_sessions == 0
        assert ask(server, client.api_key, path, **body).status_code == 200


def test_a_stream_begins_though_the_engine_takes_its_time(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "REFUSED_S", 0.05)
    with served(tmp_path, policy, lambda _: "free", engine=KeepsSchemas, delay=0.5) as server:
        client, _ = open_episode(server)
        server.engine.refuses = "too late"
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        response = ask(server, client.api_key, "chat/completions", **body, **CHAT)
    assert response.status_code == 200
    assert "response_format.json_schema.schema: too late" in response.text


@pytest.mark.parametrize(
    ("asking", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema"}, {}),
        ({"type": "json_schema", "json_schema": {"name": "any", "schema": True}}, True),
    ],
)
def test_json_without_a_schema_is_any_object_or_value(
    policy: Policy, tmp_path: Path, asking: dict[str, Any], schema: Any
) -> None:
    with served(tmp_path, policy, lambda _: "free", engine=KeepsSchemas) as server:
        talk(server, "chat/completions", "messages", {"response_format": asking})
        assert [json.loads(given) for given in server.engine.schemas if given is not None] == [schema]


def test_no_answer_is_kept_to_a_schema_within_a_thought(policy: Policy) -> None:
    sampler = Sampler(KeepsSchemas(policy, str), policy, Sampling(), 60.0, 0)
    opening = policy.codec.opening([Message(role=Role.USER, content="hello")])
    assert sampler.keeps_schemas(opening)
    assert not sampler.keeps_schemas([*opening, *policy.codec.template.encode("<think>\n")])
