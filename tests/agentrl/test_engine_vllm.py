"""The vLLM engine on real servers, and in process if these tests run where vLLM is installed. `make test-vllm` builds
that environment and runs them both ways."""

import asyncio
import copy
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from architectures import ENV, expert_runs, lookup_tasks

from agentrl.algorithms.sft import SFT
from agentrl.chat.codec import tokenize
from agentrl.engines.base import EngineError, Sampling, SchemaError, Session, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import VLLMConfig
from agentrl.engines.vllm import VLLMEngine
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.online.teacher import Teacher
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Message, Role
from agentrl.training.loop import fit
from agentrl.training.lora import add_lora
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer

pytestmark = pytest.mark.vllm

TOLERANCE = 1e-4
"""Mean absolute difference between log-probs of vLLM and of the trainer, in float32."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A tiny policy that has learned to call tools."""
    runs = expert_runs(64)
    made = tiny_policy([run.messages for run in runs], seed=0)
    rows = [tokenize(run, made.codec, made.tokenizer_fingerprint) for run in runs]
    data = TrainingRows.of(
        [
            TrainingRow(
                row_id=row.trajectory_id,
                input_ids=row.input_ids,
                mask=row.action_mask,
                weights=[1.0] * row.n_tokens,
            )
            for row in rows
        ]
    )
    trainer = Trainer(made, SFT(), OptimizerConfig(lr=5e-3, schedule="cosine", warmup=10), 80)
    with tempfile.TemporaryDirectory() as folder:
        fit(trainer, data, 8, 0, Path(folder) / "checkpoint.pt", lambda _: None)
    made.model.config.max_position_embeddings = 256  # room for turns that are long enough to be cut
    made.model.eval()
    return made


IN_PROCESS = find_spec("vllm") is not None


def children() -> list[psutil.Process]:
    """Processes that this one and its children started, but Python's own keeper of shared memory."""
    result = psutil.Process().children(recursive=True)
    return [item for item in result if "resource_tracker" not in " ".join(item.cmdline())]


@contextmanager
def built(policy: Policy) -> Iterator[VLLMEngine]:
    """An engine, of which no process is left at the end."""
    if IN_PROCESS:
        config = VLLMConfig(dtype="float32", in_process=True)
    else:
        python = os.environ.get("VLLM_PYTHON")
        assert python, "VLLM_PYTHON names the interpreter of an environment with vLLM; `make test-vllm` sets it"
        config = VLLMConfig(dtype="float32", python=python)
    before = set(children())
    made = config.build(policy)
    assert isinstance(made, VLLMEngine)
    started = set(children()) - before
    assert started
    try:
        yield made
    finally:
        blocking(made.close())
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def engine(policy: Policy) -> Iterator[VLLMEngine]:
    with built(policy) as made:
        yield made


async def sampled(engine: VLLMEngine, number: int, length: int, time_limit: float | None = None) -> tuple[Session, str]:
    """A session of three given tokens and a turn of at most ``length``, and how the turn ended."""
    session = engine.open((number,))
    session.observe([5 + number, 6, 7])
    sampling = Sampling(max_turn_tokens=length, max_tokens=250)
    turn = await engine.turn(session, sampling, stop=[], seed=number, time_limit=time_limit)
    session.act(turn)
    return session, turn.stop


@torch.inference_mode()
def recomputed(policy: Policy, ids: list[int]) -> list[float]:
    """Log-probs of ``ids[1:]`` by one plain forward pass of the trainer's model."""
    tokens = torch.tensor([ids])
    logits = policy.model(tokens).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].tolist()


def mean_gap(actual: list[float], wanted: list[float]) -> float:
    assert len(actual) == len(wanted) > 0
    return sum(abs(first - other) for first, other in zip(actual, wanted, strict=True)) / len(actual)


def changed(policy: Policy, seed: int) -> Policy:
    """The policy with other weights."""
    model = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return Policy(model, policy.tokenizer, "changed", version=policy.version + 1)


def test_rollouts_with_tools_have_the_trainers_log_probs(policy: Policy, engine: VLLMEngine) -> None:
    runner = RolloutRunner(policy, engine, ENV, Sampling())
    attempts = [Attempt(task, index) for task in lookup_tasks(12) for index in range(2)]
    rows = runner.run(attempts, 0, [f"r{number}" for number in range(len(attempts))])
    assert sum(row.n_tool_calls for row in rows) >= len(rows) // 2
    gaps: list[float] = []
    for row in rows:
        wanted = recomputed(policy, row.input_ids)
        acts = [position for position, action in enumerate(row.action_mask) if action]
        gaps += [abs(row.logprobs[position] - wanted[position - 1]) for position in acts]
        assert {span.version for span in row.spans} == {policy.version}
        again = policy.codec
        assert row.input_ids[: row.messages[1].token_start or 0] == again.opening(row.messages[:1], row.tools)
    assert sum(gaps) / len(gaps) <= TOLERANCE


def test_score_gives_the_trainers_log_probs(policy: Policy, engine: VLLMEngine) -> None:
    ids = tokenize(expert_runs(1)[0], policy.codec, "digest").input_ids
    assert mean_gap(blocking(engine.score(ids)), recomputed(policy, ids)) <= TOLERANCE
    assert mean_gap(blocking(engine.score(ids, 10)), recomputed(policy, ids)[9:]) <= TOLERANCE


def test_a_teacher_behind_vllm_says_what_one_in_this_process_says(policy: Policy, engine: VLLMEngine) -> None:
    rows = [tokenize(run, policy.codec, "digest") for run in expert_runs(4)]
    theirs, ours = (Teacher(policy, policy, item).logprobs(rows) for item in (engine, None))
    for first, other, row in zip(theirs, ours, rows, strict=True):
        assert mean_gap(first[row.action_mask].tolist(), other[row.action_mask].tolist()) <= TOLERANCE
        assert not first[[not acts for acts in row.action_mask]].any()


def test_sampling_records_the_distribution_it_drew_from(policy: Policy, engine: VLLMEngine) -> None:
    [task] = lookup_tasks(1)
    prompt = policy.codec.opening([Message(role=Role.USER, content=task.prompt)], task.tools)

    def turn(sampling: Sampling, seed: int = 1) -> Session:
        async def sample() -> Session:
            session = engine.open()
            session.observe(prompt)
            session.act(await engine.turn(session, sampling, stop=[policy.codec.stop_ids[0]], seed=seed))
            return session

        return blocking(sample())

    cold = turn(Sampling(temperature=0.5))
    with torch.inference_mode():
        logits = policy.model(torch.tensor([cold.ids])).logits[0, :-1].float() / 0.5
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(cold.ids)[1:, None])[:, 0].tolist()[len(prompt) - 1 :]
    assert mean_gap(cold.logprobs[len(prompt) :], wanted) <= TOLERANCE
    greedy = turn(Sampling(temperature=0))
    assert set(greedy.logprobs[len(prompt) :]) == {0.0}
    assert turn(Sampling(), seed=5).ids == turn(Sampling(), seed=5).ids
    assert len(turn(Sampling(max_turn_tokens=3)).ids) == len(prompt) + 3


def test_a_turn_whose_time_is_over_keeps_what_was_sampled(policy: Policy, engine: VLLMEngine) -> None:
    async def together() -> list[tuple[Session, str]]:
        return await asyncio.gather(*(sampled(engine, number, 240, 0.1) for number in range(16)))

    made = blocking(together())
    assert "cut" in [stop for _, stop in made]
    for session, stop in made:
        assert (len(session.ids) == 243) is (stop == "length")
        if len(session.ids) > 3:
            assert mean_gap(session.logprobs[3:], recomputed(policy, session.ids)[2:]) <= TOLERANCE


def test_more_prompts_than_fit_one_step_are_all_computed(policy: Policy, engine: VLLMEngine) -> None:
    """With prompts in parts and a seed for each request, vLLM 0.32 ends on a CPU."""

    async def one(number: int) -> Session:
        session = engine.open((number,))
        session.observe([5 + (7 * position + number) % 400 for position in range(200)])
        session.act(await engine.turn(session, Sampling(max_turn_tokens=4, max_tokens=250), stop=[], seed=number))
        return session

    async def together() -> list[Session]:
        return await asyncio.gather(*(one(number) for number in range(64)))

    sessions = blocking(together())
    assert engine.replicas[0].restarts == 0
    for session in sessions:
        assert mean_gap(session.logprobs[200:], recomputed(policy, session.ids)[199:]) <= TOLERANCE


def test_more_tokens_than_the_servers_hold_are_refused(engine: VLLMEngine) -> None:
    session = engine.open()
    session.observe([5, 6, 7])
    with pytest.raises(EngineError, match="vLLM's context is 256"):
        blocking(engine.turn(session, Sampling(max_turn_tokens=4000, max_tokens=4000), stop=[], seed=0))


def test_a_turn_is_kept_to_its_schema_and_one_that_is_refused_harms_no_replica(
    policy: Policy, engine: VLLMEngine
) -> None:
    session = engine.open()
    session.observe([5, 6, 7])
    how: dict[str, Any] = {"stop": policy.codec.stop_ids[:1], "seed": 1}
    turn = blocking(engine.turn(session, Sampling(), schema='{"const": "Rome"}', **how))
    assert (policy.tokenizer.decode(turn.ids[:-1]), turn.stop) == ('"Rome"', "stop")
    assert turn.logprobs[-1] == 0.0, "log-probs are of what the schema leaves to say: here its end"
    with pytest.raises(SchemaError, match="Invalid type: nonsense"):
        blocking(engine.turn(session, Sampling(), schema='{"type": "nonsense"}', **how))
    assert {replica.state for replica in engine.replicas} == {"serving"}


def test_weights_that_change_in_mid_request_label_each_token_truly(policy: Policy, engine: VLLMEngine) -> None:
    """Every span, scored under the weights of its version, gives the log-probs that were recorded."""
    other = changed(policy, 1)
    by_version = {engine.version: policy, engine.version + 1: other}

    async def sample() -> list[tuple[Session, str]]:
        running = [asyncio.create_task(sampled(engine, number, 220)) for number in range(16)]
        await asyncio.sleep(0.3)
        await engine.load(Weights(engine.version + 1, other.model))
        return await asyncio.gather(*running)

    sessions = [session for session, _ in blocking(sample())]
    assert any(len(session.spans) == 2 for session in sessions), "the weights came too early or too late"
    for session in sessions:
        assert len(session.ids) == 3 + 220
        assert session.spans[0].start == 3
        assert session.spans[-1].end == len(session.ids)
        for span in session.spans:
            wanted = recomputed(by_version[span.version], session.ids)[span.start - 1 : span.end - 1]
            result = session.logprobs[span.start : span.end]
            assert max(abs(a - b) for a, b in zip(result, wanted, strict=True)) <= 1e-3
            assert mean_gap(result, wanted) <= TOLERANCE
    print("loads took", [round(seconds, 3) for seconds in engine.loads], "s")


def test_weights_of_another_shape_are_refused_before_a_server_sees_them(policy: Policy, engine: VLLMEngine) -> None:
    broken = copy.deepcopy(policy.model)
    broken.model.norm.weight = torch.nn.Parameter(torch.ones(7))
    version = engine.version
    with pytest.raises(EngineError, match="have other tensors than those"):
        blocking(engine.load(Weights(version + 1, broken)))
    assert engine.version == version
    assert len(blocking(engine.score([5, 6, 7]))) == 2


def test_what_is_killed_comes_back_with_the_current_weights(policy: Policy, engine: VLLMEngine) -> None:
    """Turns under way are asked again; none is lost, and none is made twice."""
    other = changed(policy, 2)
    version = engine.version + 1

    async def sample() -> list[tuple[Session, str]]:
        await engine.load(Weights(version, other.model))
        running = [asyncio.create_task(sampled(engine, number, 200)) for number in range(8)]
        await asyncio.sleep(0.05)
        for process in children():  # stopped first, so that turns of which some remain cannot end meanwhile
            process.send_signal(signal.SIGSTOP)
        running += [asyncio.create_task(sampled(engine, number, 200)) for number in range(8, 16)]
        await asyncio.sleep(0.5)
        for process in children():
            process.send_signal(signal.SIGKILL)
        return await asyncio.gather(*running)

    sessions = blocking(sample())
    assert engine.replicas[0].restarts == 1
    for session, _ in sessions:
        assert len(session.ids) == 3 + 200
        assert [span.version for span in session.spans] == [version]
        assert mean_gap(session.logprobs[3:], recomputed(other, session.ids)[2:]) <= TOLERANCE


def test_adapters_label_each_turn_truly_and_come_back_with_a_server_that_is_killed(policy: Policy) -> None:
    """Turns under way go on with the adapter that they began with; later ones have the new one."""
    made = Policy(copy.deepcopy(policy.model), policy.tokenizer, "adapted")
    add_lora(made, LoRA(rank=4, alpha=8), 0)
    before = set(children())
    with built(made) as engine:
        first = Policy(copy.deepcopy(made.model), policy.tokenizer, "first")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in made.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))

        async def sample() -> list[list[tuple[Session, str]]]:
            running = [asyncio.create_task(sampled(engine, number, 220)) for number in range(8)]
            await asyncio.sleep(0.2)
            await engine.load(Weights(1, made.model))
            assert not all(process.done() for process in running), "the adapter came too late"
            later = await asyncio.gather(
                *(sampled(engine, number, 220) for number in range(8)), engine.score([5, 6, 7])
            )
            earlier = await asyncio.gather(*running)
            for process in set(children()) - before:
                process.send_signal(signal.SIGKILL)
            again = await asyncio.gather(*(sampled(engine, number, 220) for number in range(8)))
            return [earlier, later[:8], again]

        for version, sessions in zip((0, 1, 1), blocking(sample()), strict=True):
            for session, _ in sessions:
                assert [span.version for span in session.spans] == [version]
                assert len(session.ids) == 3 + 220
                gaps = [mean_gap(session.logprobs[3:], recomputed(item, session.ids)[2:]) for item in (first, made)]
                assert gaps[version] <= TOLERANCE < gaps[1 - version]
        assert engine.replicas[0].restarts == 1
        print("the adapter took", [round(seconds, 3) for seconds in engine.loads], "s")


STARTS = """
import os, sys
from agentrl.engines.configs import VLLMConfig
from agentrl.models.policy import Policy

if __name__ == "__main__":
    where = {"python": sys.argv[2]} if sys.argv[2:] else {"in_process": True}
    engine = VLLMConfig(dtype="float32", **where).build(Policy.load(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_is_killed(policy: Policy, tmp_path: Path, number: signal.Signals) -> None:
    policy.save(tmp_path / "model")
    (tmp_path / "starts.py").write_text(STARTS)
    python = [] if IN_PROCESS else [os.environ["VLLM_PYTHON"]]
    command = [sys.executable, str(tmp_path / "starts.py"), str(tmp_path / "model"), *python]
    root = str(Path(__file__).parents[2])
    starter = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    assert starter.stdout
    while (line := starter.stdout.readline()) != "ready\n":
        assert line, "it ended while it started"
    left = psutil.Process(starter.pid).children(recursive=True)
    assert left
    starter.send_signal(number)
    starter.wait()
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(not IN_PROCESS, reason="the example imports vLLM: `make test-vllm` runs it where that is installed")
def test_a_model_folder_answers_in_transformers_and_in_vllm_as_the_page_shows(policy: Policy, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/vllm.md").read_text()
    match = re.search(r"```python\n(# ask.py.*?)```.*?```console\n\$ [^\n]*FOLDER \"(.*?)\"\n(.*?)```", page, re.DOTALL)
    assert match
    code, question, shown = match.groups()
    (tmp_path / "ask.py").write_text(code)
    policy.save(tmp_path / "model")
    command = [sys.executable, str(tmp_path / "ask.py"), str(tmp_path / "model"), question]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-2000:]
    texts = [line for line in ran.stdout.splitlines() if line.startswith(("transformers: ", "vLLM: "))]
    assert texts == shown.splitlines()
