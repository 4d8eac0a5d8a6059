"""Traces of training steps over tensors without values, against what real steps hold."""

import json
import os
import subprocess
import sys
from typing import Any

import held_by_ranks
import pytest
import torch
from held_by_ranks import Live
from shapes import LLAMA_8B
from small_models import small_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from agentrl.algorithms.sft import SFT
from agentrl.models.policy import Policy
from agentrl.pipelines.plan.traces import traced_step
from agentrl.training.job import DeepSpeed
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.step import Trainer
from agentrl.training.traced import TracedJob, _rows, trace

LENGTHS = [60, 64]
DENSE = LlamaConfig(
    vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = Qwen3MoeConfig(  # type: ignore[call-arg]  # the library's own annotations
    vocab_size=2048, hidden_size=128, intermediate_size=384, moe_intermediate_size=64, num_experts=8,
    num_experts_per_tok=2, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=64,
)  # fmt: skip
SHALLOW = LlamaConfig(**{**DENSE.to_dict(), "num_hidden_layers": 1})


def held(config: PreTrainedConfig, job: TracedJob) -> int:
    """The bytes of live tensors at the peak of the third real step in this process."""
    live = Live()
    with live:
        policy = Policy(AutoModelForCausalLM.from_config(config), None, "real", plain=False)  # type: ignore[arg-type]
        trainer = Trainer(policy, SFT(), job.optimizer, 3)
        rows = _rows(job)
        for _ in range(3):
            live.begin()
            trainer.step(rows)
    return live.peak


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        (SHALLOW, OptimizerConfig(micro_tokens=64, precision="bfloat16")),
        pytest.param(
            DENSE,
            OptimizerConfig(micro_tokens=64, precision="bfloat16", gradient_checkpointing=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            DENSE, OptimizerConfig(micro_tokens=64, precision="bfloat16", lora=LoRA(rank=4)), marks=pytest.mark.slow
        ),
        pytest.param(EXPERTS, OptimizerConfig(micro_tokens=64, precision="bfloat16"), marks=pytest.mark.slow),
    ],
    ids=["all weights", "checkpointing", "adapters", "experts"],
)
def test_a_trace_holds_what_a_real_step_holds(
    config: PreTrainedConfig, optimizer: OptimizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if optimizer.lora:
        pytest.importorskip("peft")
    monkeypatch.setattr("agentrl.models.policy.processor_has_bfloat16", lambda: True)
    layers = config.num_hidden_layers
    job = TracedJob(config=config.to_dict(), layers=layers, optimizer=optimizer, rows=LENGTHS)
    assert max(trace(job).peaks.values()) == pytest.approx(held(config, job), rel=0.05)


def test_what_cannot_be_traced_is_refused_before_anything_starts() -> None:
    optimizer = OptimizerConfig()
    with pytest.raises(ValueError, match="offloaded"):
        traced_step(DENSE, optimizer, DeepSpeed(zero=3, offload_optimizer="cpu"), 8, 64, None)
    mixed = small_model("llama").config
    mixed.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"layers of llama are of several kinds \(full_attention, sliding_attention\)"):
        traced_step(mixed, optimizer, None, 0, 64, None)


TRACES = """
import sys
from agentrl.placement import limits
from agentrl.training import traced
limits.SMALL, limits.REDUCED = {small}, {reduced}
traced.main()
"""


def traces(jobs: list[TracedJob], small: int = 16_000_000, reduced: int = 50_000_000) -> list[dict[str, Any]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    given = json.dumps([job.model_dump(mode="json") for job in jobs])
    command = [sys.executable, "-c", TRACES.format(small=small, reduced=reduced)]
    done = subprocess.run(command, input=given, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_all_ranks_exchange_the_same_in_the_same_order(world: int) -> None:
    """With other numbers of rows on each of them: the first ranks compute two micro batches, the last a spare one."""
    pytest.importorskip("deepspeed")
    jobs = [
        TracedJob(
            config=DENSE.to_dict(), layers=3, optimizer=OptimizerConfig(micro_tokens=8, precision="bfloat16"),
            rows=[8 - number % 3 for number in range(world + 3)], own=False, deepspeed=DeepSpeed(zero=3), rank=rank,
            world=world,
        )
        for rank in (0, 2, 3, world - 1)
    ]  # fmt: skip
    answers = traces(jobs)
    assert answers[0]["moved"]["reduce_scatter_base"][0] > 0
    assert len({answer["order"] for answer in answers}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_a_trace_holds_what_two_real_ranks_hold(adapters: bool, tmp_path: Any) -> None:
    """Moments included: ranks are seen from their third step on, in forward and backward passes."""
    pytest.importorskip("deepspeed")
    from agentrl.models.tiny import train_tokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DENSE)
    Policy(model, train_tokenizer(["some text"], 300), "model").save(tmp_path / "start")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, held_by_ranks.__file__, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    real = json.loads(done.stdout.splitlines()[-1])["float32"]["adapters" if adapters else "full"]["peak"]
    optimizer, spread = held_by_ranks.settings("float32", adapters)
    job = TracedJob(
        config=DENSE.to_dict(), layers=3, optimizer=optimizer, rows=[held_by_ranks.TOKENS] * 4, own=False,
        deepspeed=spread, world=held_by_ranks.RANKS,
    )  # fmt: skip
    [answer] = traces([job], 0, held_by_ranks.REDUCED)
    assert max(answer["peaks"]["forward"], answer["peaks"]["backward"]) == pytest.approx(real, rel=0.05)


@pytest.mark.slow
def test_few_layers_say_what_many_hold() -> None:
    """Eight billion parameters on eight ranks: what eight and ten layers say of thirteen."""
    pytest.importorskip("deepspeed")
    config = {**LLAMA_8B, "num_hidden_layers": 13, "vocab_size": 8192}
    del config["architectures"]
    from transformers import AutoConfig

    optimizer = OptimizerConfig(micro_tokens=512, precision="bfloat16", gradient_checkpointing=True)
    spread = DeepSpeed(zero=3)
    few = traced_step(AutoConfig.for_model(**config), optimizer, spread, 8, 512, None)
    job = TracedJob(config=config, layers=13, optimizer=optimizer, rows=[512, 512], deepspeed=spread, world=8)
    [whole] = traces([job])
    assert max(few.peaks.values()) == pytest.approx(max(whole["peaks"].values()), rel=0.03)
    assert min(few.ahead.values()) > 0, "the next layer is gathered while one computes, in both directions"
    assert few.moved["reduce_scatter_base"][1] == pytest.approx(whole["moved"]["reduce_scatter_base"][1], rel=0.01)
