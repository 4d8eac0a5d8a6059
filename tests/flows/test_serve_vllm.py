"""``agentrl serve`` in front of a real vLLM server."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from test_generate import store_with_a_model
from test_serve import Serving

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.engines.check import own_logprobs
from agentrl.models.policy import Policy

pytestmark = pytest.mark.vllm


def test_vllm_is_recorded_token_by_token(tmp_path: Path) -> None:
    store = store_with_a_model(tmp_path)
    python = os.environ["VLLM_PYTHON"]
    serving = Serving(tmp_path, store, "--engine", f"{{type: vllm, python: {python}, dtype: float32}}")
    opened = httpx.post(serving.episodes, json={}).json()
    client = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "city of Ann?"}]
    for turn in range(3):
        ask: dict[str, Any] = {"model": "warm", "messages": messages, "max_completion_tokens": 12}
        if turn == 1:
            parts = [
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**ask, stream=True)
            ]
            message: dict[str, Any] = {"role": "assistant", "content": "".join(parts)}
        else:
            message = client.chat.completions.create(**ask).choices[0].message.model_dump(exclude_none=True)
        messages += [message, {"role": "user", "content": "and Bob?"}]
    url = opened["base_url"].removesuffix("/v1") + "/reward"
    head = {"authorization": f"Bearer {client.api_key}"}
    assert httpx.post(url, json={"reward": 1.0}, headers=head).is_success
    assert serving.end(signal.SIGTERM) == {"event": "stopped", "open": 0}
    rows = TrajectoryBuffer(store).get_many([opened["id"]])
    assert rows[0].n_steps >= 2
    [folder] = Path(store).glob("artifacts/warm/*/**/model")
    policy = Policy.load(folder)
    own = own_logprobs(policy.model, rows[0].input_ids).detach().numpy()
    mask = np.array(rows[0].action_mask)
    assert np.abs(own - np.array(rows[0].logprobs))[mask].max() < 1e-3
