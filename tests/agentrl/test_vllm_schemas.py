"""Answers by a JSON schema of a real vLLM server, behind the recorder."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from recording import Served, check, open_episode, policy_for_tests, rewarded, sampled, served

from agentrl.engines.blocking import blocking
from agentrl.engines.check import own_logprobs
from agentrl.engines.configs import VLLMConfig
from agentrl.engines.vllm import VLLMEngine
from agentrl.models.policy import Policy
from agentrl.schemas.trajectory import Role

pytestmark = pytest.mark.vllm

CITIES = {"enum": ["Rome", "Oslo"]}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[VLLMEngine]:
    made = VLLMConfig(dtype="float32", python=os.environ["VLLM_PYTHON"]).build(policy)
    assert isinstance(made, VLLMEngine)
    yield made
    blocking(made.close())


def ask(server: Served, key: str, conversation: list[dict[str, Any]], schema: Any = None) -> httpx.Response:
    wished = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}} if schema else None
    body = {"model": "tiny", "messages": conversation, "response_format": wished, "max_tokens": 12}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=120)


def test_what_is_kept_to_a_schema_is_context_of_what_the_policy_says(
    policy: Policy, engine: VLLMEngine, tmp_path: Path
) -> None:
    conversation: list[dict[str, Any]] = []
    with served(tmp_path, policy, str, engine=lambda *_: engine, room=200) as server:
        client, name = open_episode(server)
        for schema in (None, CITIES, None):
            conversation.append({"role": "user", "content": "What is the city of Ann?"})
            answer = ask(server, client.api_key, conversation, schema)
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            if schema:
                assert (choice["message"]["content"] in ('"Rome"', '"Oslo"'), choice["finish_reason"]) == (True, "stop")
            conversation.append({"role": "assistant", "content": choice["message"]["content"] or ""})
        [row] = rewarded(server, client, name)
    check(policy, row)
    assert [tag for tag in row.tags if tag.startswith(("constrained", "not_json"))] == ["constrained:1"]
    turns = [message for message in row.messages if message.role is Role.ASSISTANT]
    assert not any(row.action_mask[turns[1].token_start : turns[1].token_end])
    assert len(sampled(policy, row)) == 2
    mask = np.array(row.action_mask)
    own = own_logprobs(policy.model, row.input_ids).detach().numpy()
    assert np.abs(own[mask] - np.array(row.logprobs)[mask]).max() < 1e-3, "log-probs are the policy's own"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_a_schema_that_vllm_refuses_is_named_and_no_server_suffers(
    policy: Policy, engine: VLLMEngine, tmp_path: Path, schema: dict[str, Any], reason: str
) -> None:
    question = [{"role": "user", "content": "hello"}]
    with served(tmp_path, policy, str, engine=lambda *_: engine, room=200) as server:
        client, _ = open_episode(server)
        answer = ask(server, client.api_key, question, schema)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format.json_schema.schema")
        assert reason in answer.json()["error"]["message"]
        assert ask(server, client.api_key, question).status_code == 200
    assert [replica.state for replica in engine.replicas] == ["serving"]
