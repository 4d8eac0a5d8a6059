"""Exactness: what is stored is what was sampled, with every engine and in five model families.

- ``transformers`` and ``vllm``: each request and each answer of the engine is kept, rows go to a buffer and are read
  back, and every token, log-probability and flag of the mask is compared. The log-probabilities are compared with those
  of the trainer, in float32. Families are chat templates of the TRL wheel, each with a tiny model that has learned to
  call tools in it. One vLLM server serves all of them, one after the other: each is a new version of its weights.
- ``openai``: an endpoint that plays the scripted expert. Its rows are text and have no token ids, so messages are
  compared.

    python benchmarks/exactness.py                # 2,000 episodes of each family with each engine
    SCALE=small python benchmarks/exactness.py
    VLLM_PYTHON=.venv-vllm/bin/python ...         # an environment that has vLLM; without it that engine is left out
    ENGINES=vllm ...                              # these only; transformers,vllm,openai are all
    CHECK=1 ...                                   # exit code 1 if a target is missed
"""

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from chat_families import tokenizer_of
from transformers.utils import logging

from agentrl.algorithms.sft import SFT
from agentrl.chat.codec import tokenize
from agentrl.chat.dialects import find_dialect
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.engines.base import Engine, Sampling, Session, Turn
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import EmbeddedConfig, OpenAIConfig, VLLMConfig
from agentrl.environments import load_environment
from agentrl.models.policy import Policy
from agentrl.models.tiny import TinySize, init_model
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.runner import Attempt, Limits, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Role, Trajectory
from agentrl.training.loop import fit
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs
from agentrl.training.step import Trainer

SMALL = os.environ.get("SCALE") == "small"
EPISODES = 48 if SMALL else 2000
GROUP = 8
FAMILIES = {"qwen3": False, "llama3_2": False, "gemma4_v5": False, "lfm2_2_5": True, "qwen2_5": False}
"""Chat templates; true for the one that the tokenizer's own response template reads."""

VOCABULARY = 1024
"""Rows of all embeddings, more than any of the tokenizers needs: vLLM loads weights of one shape only."""

LEARNT = 8
"""Tasks that the models have learned by heart, so that they call tools after a minute of training."""

CONTEXT = 1536
SAMPLING = Sampling(max_turn_tokens=64, max_tokens=CONTEXT)
GAP = 1e-4


def judged(what: str, figure: float, target: float, unit: str, above: bool = True) -> bool:
    met = figure >= target if above else figure <= target
    shown = f"{figure:10,.2f}" if figure == 0 or abs(figure) >= 0.01 else f"{figure:10.1e}"
    print(f"{what:66s} {shown}{unit}   target {target:,g}{unit}   {'met' if met else 'MISSED'}", flush=True)
    return met


def train(policy: Policy, shown: list[Trajectory], steps: int, batch: int = 32, lr: float = 5e-3) -> None:
    """Teach a policy the demonstrations, in its own dialect."""
    rows = []
    for number, raw in enumerate(shown):
        row = tokenize(raw, policy.codec, policy.tokenizer_fingerprint)
        weights = [1.0] * row.n_tokens
        name = row.trajectory_id
        rows.append(
            TrainingRow(row_id=name, unit=number, input_ids=row.input_ids, mask=row.action_mask, weights=weights)
        )
    trainer = Trainer(policy, SFT(), OptimizerConfig(lr=lr, schedule="cosine", warmup=20), steps)
    with TemporaryDirectory() as folder:
        fit(trainer, TrainingRows.of(rows), batch, 0, Path(folder) / "checkpoint.pt", lambda metrics: None)


class Witness:
    """An engine that keeps, for each row, what it was asked and what it answered."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self.said: dict[tuple[int, ...], list[tuple[list[int], Turn]]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def turn(self, session: Session, sampling: Sampling, **options: Any) -> Turn:
        before = list(session.ids)
        turn = await self.inner.turn(session, sampling, **options)
        self.said[session.key].append((before, Turn(list(turn.ids), list(turn.logprobs), list(turn.spans), turn.stop)))
        return turn


def unequal(item: Any, other: Any, kind: Any = np.int64) -> int:
    """Places at which two sequences differ; what only one of them has differs too."""
    first, second = np.asarray(item, kind), np.asarray(other, kind)
    shared = min(len(first), len(second))
    return int((first[:shared] != second[:shared]).sum()) + abs(len(first) - len(second))


def differing(text: list[tuple[list[int], Turn]], row: dict[str, Any]) -> int:
    """Tokens, log-probabilities and flags of a stored row that are not those of the engine."""
    count = 0
    sampled = np.zeros(len(row["input_ids"]), bool)
    for before, turn in text:
        start, end = len(before), len(before) + len(turn.ids)
        count += unequal(row["input_ids"][:start], before)
        count += unequal(row["input_ids"][start:end], turn.ids)
        count += unequal(row["logprobs"][start:end], turn.logprobs, np.float32)
        sampled[start:end] = True
    return count + unequal(row["action_mask"], sampled, bool)


def trainers_gaps(policy: Policy, rows: list[dict[str, Any]]) -> np.ndarray:
    """Absolute differences between recorded log-probabilities and the trainer's."""
    kept = [row for row in rows if any(row["action_mask"])]
    training = [
        TrainingRow(row_id=str(number), input_ids=ids, mask=row["action_mask"], weights=[0.0] * len(ids))
        for number, row in enumerate(kept)
        for ids in [row["input_ids"]]
    ]
    wanted = batch_logprobs(policy, TrainingRows.of(training))
    return np.concatenate(
        [
            np.abs(np.asarray(row["logprobs"], np.float64) - own)[np.asarray(row["action_mask"], bool)]
            for row, own in zip(kept, wanted, strict=True)
        ]
    )


def family_policies(shown: list[Trajectory], steps: int) -> dict[str, Policy]:
    """A tiny model of each family, of equal shapes, with versions from 0 on."""
    made = {}
    for version, (name, response_template) in enumerate(FAMILIES.items()):
        tokenizer = tokenizer_of(name, response_template)
        model = init_model(tokenizer, 0, TinySize(context=CONTEXT))
        model.resize_token_embeddings(VOCABULARY)
        policy = Policy(model, tokenizer, name, version)
        policy.codec = find_dialect(tokenizer)
        train(policy, shown, steps, 8)
        policy.model.eval()
        made[name] = policy
    return made


def stored_as_sampled(
    backend: str, engine_of: Callable[[Policy], Engine], policies: dict[str, Policy], tasks: list[Task]
) -> bool:
    print(backend, flush=True)
    differ, gaps = 0, []
    environment = load_environment("lookup")
    attempts = [Attempt(task, index) for task in tasks for index in range(GROUP)]
    with TemporaryDirectory() as store:
        buffer = TrajectoryBuffer(store)
        for name, policy in policies.items():
            witness = Witness(engine_of(policy))
            runner = RolloutRunner(policy, witness, environment, SAMPLING)
            ids = [f"{name}-{number}" for number in range(len(attempts))]
            started = time.perf_counter()
            made = runner.run(attempts, 0, ids)
            took = time.perf_counter() - started
            buffer.append(made, stage=name, fingerprint=name)
            rows = buffer.read(ids, ["input_ids", "action_mask", "logprobs"]).to_pylist()
            wrong = sum(differing(witness.said[number,], row) for number, row in enumerate(rows))
            part = trainers_gaps(policy, rows)
            calls, tokens = sum(row.n_tool_calls for row in made), sum(len(row["input_ids"]) for row in rows)
            print(
                f"  {name} ({policy.codec.dialect}): {len(rows):,} episodes, {calls:,} tool calls, {len(part):,} of "
                f"{tokens:,} tokens sampled, in {took:.1f} s; {wrong} differ; log-probs differ by {part.mean():.1e} on "
                f"average, {part.max():.1e} at most",
                flush=True,
            )
            differ += wrong
            gaps.append(part)
    exact = judged(f"{backend}: sampled and stored, what differs", differ, 0, "", above=False)
    gap = float(np.concatenate(gaps).mean())
    return judged(f"{backend}: log-probs against the trainer's, mean difference", gap, GAP, "", above=False) and exact


class Expert(ThreadingHTTPServer):
    """An endpoint whose answers are the scripted expert's. It keeps what it said, by conversation."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, shown: list[Trajectory]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.turns = {row.prompt: [m for m in row.messages if m.role is Role.ASSISTANT] for row in shown}
        self.asked = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    server: Expert
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        self.server.asked += 1
        asked = next(message["content"] for message in messages if message["role"] == "user")
        turn = self.server.turns[asked][sum(message["role"] == "assistant" for message in messages)]
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
        message = {"role": "assistant", "content": turn.content or None} | ({"tool_calls": calls} if calls else {})
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def messages_of_an_endpoint(tasks: list[Task], shown: list[Trajectory]) -> bool:
    """Rows of an endpoint carry no ids: every message is what the expert said, or what its tools answered."""
    os.environ["EXPERT_KEY"] = "none"
    server = Expert(shown)
    config = OpenAIConfig(
        model="expert", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="${EXPERT_KEY}", concurrency=64
    )
    runner = RolloutRunner(
        None, config.build(None), load_environment("lookup"), Sampling(max_turn_tokens=64), limits=Limits(in_flight=64)
    )
    attempts = [Attempt(task, index) for task in tasks for index in range(GROUP)]
    ids = [str(number) for number in range(len(attempts))]
    started = time.perf_counter()
    print("openai", flush=True)
    with TemporaryDirectory() as store:
        buffer = TrajectoryBuffer(store)
        buffer.append(runner.run(attempts, 0, ids), stage="expert", fingerprint="expert")
        rows = buffer.get_many(ids)
    took = time.perf_counter() - started
    blocking(runner.engine.close())
    server.shutdown()
    server.server_close()
    wanted = {row.task_id: row.messages for row in shown}
    differ = with_ids = 0
    for row in rows:
        with_ids += bool(row.input_ids)
        first, other = ([_meaning(m) for m in messages] for messages in (row.messages, wanted[row.task_id]))
        differ += sum(a != b for a, b in zip(first, other, strict=False)) + abs(len(first) - len(other))
    ends = dict(Counter(str(row.termination) for row in rows))
    print(
        f"  {len(rows):,} episodes, {sum(len(row.messages) for row in rows):,} messages, {server.asked:,} requests in "
        f"{took:.1f} s; {ends}; {with_ids} rows carry token ids: an endpoint gives text"
    )
    return judged("openai: messages said and stored, what differs", differ, 0, "", above=False)


def _meaning(message: Any) -> tuple[Any, ...]:
    return message.role, message.content, [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


def with_vllm(policies: dict[str, Policy], tasks: list[Task]) -> bool:
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        print("vllm: left out, VLLM_PYTHON names no environment that has it (`make test-vllm` makes one)")
        return True
    engine = VLLMConfig(dtype="float32", python=python).build(next(iter(policies.values())))
    try:
        return stored_as_sampled("vllm", lambda policy: engine, policies, tasks)
    finally:
        blocking(engine.close())


def main() -> int:
    logging.set_verbosity_error()
    environment = load_environment("lookup")
    tasks = environment.tasks({"train": max(EPISODES // GROUP * len(FAMILIES), 256)}, 0)["train"]
    shown = [demonstrate(environment, task, 0.0, 0, f"expert-{n}") for n, task in enumerate(tasks)]
    few = tasks[: EPISODES // GROUP]
    engines = os.environ.get("ENGINES", "transformers,vllm,openai").split(",")
    policies = family_policies(shown[:LEARNT], 20 if SMALL else 80) if engines != ["openai"] else {}
    met = []
    if "transformers" in engines:
        met.append(stored_as_sampled("transformers", EmbeddedConfig().build, policies, few))
    if "vllm" in engines:
        met.append(with_vllm(policies, few))
    if "openai" in engines:
        met.append(messages_of_an_endpoint(tasks[: EPISODES // GROUP * len(FAMILIES)], shown))
    return int(os.environ.get("CHECK") == "1" and not all(met))


if __name__ == "__main__":
    sys.exit(main())
