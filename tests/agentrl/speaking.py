"""Servers that speak vLLM's routes and fail on demand, and turns that are asked of them."""

import asyncio
import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from json_server import JsonHandler

from agentrl.engines.base import Sampling
from agentrl.engines.servers import ADAPT
from agentrl.engines.vllm import VLLMEngine
from agentrl.models.policy import Policy

ROUTES = ["/inference/v1/generate", "/pause", "/resume", "/collective_rpc", "/update_weight_version"]


class Speaking(ThreadingHTTPServer):
    """Answers turns of three tokens. ``faults`` are taken one for each request to generate; ``shift`` is added to the
    log-probs that it scores."""

    daemon_threads = True

    def __init__(
        self, policy: Policy, address: tuple[str, int] = ("127.0.0.1", 0), handler: "type[Handler] | None" = None
    ) -> None:
        super().__init__(address, handler or Handler)
        self.policy, self.routes = policy, list(ROUTES)
        self.label, self.loads, self.faults, self.asked, self.shift = "default", [], [], [], 0.0
        self.loads_fail = 0
        self.adapters: dict[str, Any] = {}
        self.paths: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()


@contextmanager
def speaking(policy: Policy) -> Iterator[list[Speaking]]:
    """Two servers, which end with the block."""
    made = [Speaking(policy), Speaking(policy)]
    yield made
    for row in made:
        row.shutdown()
        row.server_close()


class Handler(JsonHandler):
    server: Speaking

    def get(self) -> None:
        self.say(
            {
                "/health": None,
                "/weight_info": {"weight_version": self.server.label},
                "/openapi.json": {"paths": dict.fromkeys(self.server.routes)},
                "/v1/models": {"data": [{"id": name, "max_model_len": 256} for name in ["", *self.server.adapters]]},
            }[self.path]
        )

    def post(self, asked: dict[str, Any]) -> None:
        path = self.path.partition("?")[0]
        self.server.paths.append(path)
        if path == ADAPT and path not in self.server.routes:
            return self.say({"detail": "Not Found"}, 404)
        if path == ADAPT:
            from peft import PeftModel

            base = copy.deepcopy(self.server.policy.model)
            self.server.adapters[asked["lora_name"]] = PeftModel.from_pretrained(base, asked["lora_path"])
            return self.send(b"Success: it was added.")
        if path == "/v1/unload_lora_adapter":
            del self.server.adapters[asked["lora_name"]]
            return self.send(b"Success: it was removed.")
        if path == "/inference/v1/generate":
            return self.generate(asked)
        if path == "/update_weight_version":
            self.server.label = asked["new_version"]
        if path == "/collective_rpc":
            self.server.loads.append(asked["kwargs"]["weights_path"])
            if self.server.loads_fail:
                self.server.loads_fail -= 1
                return self.say("no such folder", 500)
        return self.say({})

    def generate(self, body: dict[str, Any]) -> None:
        model = self.server.policy.model
        if "model" in body:
            if body["model"] not in self.server.adapters:
                return self.say({"error": "no such model"}, 404)
            model = self.server.adapters[body["model"]]
        if "prompt_logprobs" in body["sampling_params"]:
            return self.say(self.scored(model, body["token_ids"]))
        self.server.asked.append(body)
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "hang":
            time.sleep(5)
        if isinstance(fault, threading.Event):
            fault.wait(60)
        if fault == "garbage":
            return self.send(b"<html>")
        if fault == "half":
            return self.send(b'{"choices"', length=1000)
        if isinstance(fault, str) and fault.startswith("Grammar"):
            return self.say({"error": {"message": fault, "type": "BadRequestError", "param": None, "code": 400}}, 400)
        if isinstance(fault, int):
            return self.say({"error": "busy"}, fault)
        made = {"token_ids": [7, 8, 2], "finish_reason": "stop"}
        made |= {"logprobs": {"content": [{"logprob": -1.0}] * 3}}
        made |= {"weight_versions": [{"version": self.server.label, "start": 0, "end": 3}]}
        return self.say({"choices": [made]})

    def scored(self, model: Any, ids: list[int]) -> dict[str, Any]:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        result = [None] + [
            {str(token): {"logprob": float(logits[position, token]) + self.server.shift}}
            for position, token in enumerate(ids[1:])
        ]
        item = {"weight_versions": [{"version": self.server.label, "start": 0, "end": 1}]}
        return {"choices": [item], "prompt_logprobs": result}


async def turn(engine: VLLMEngine, root: str = "", time_limit: float | None = None) -> Any:
    session = engine.open(root=root)
    session.observe([5, 6])
    return await engine.turn(session, Sampling(), stop=[2], seed=0, time_limit=time_limit)


async def settled(engine: VLLMEngine) -> None:
    for _ in range(200):
        if all(replica.state == "serving" for replica in engine.replicas):
            return
        await asyncio.sleep(0.05)
    raise AssertionError([replica.state for replica in engine.replicas])
