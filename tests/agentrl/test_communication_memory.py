"""What ``communication: bfloat16`` adds to the memory of a rank: the estimate, against two real ranks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import held_by_ranks
import pytest
import torch
from shapes import LLAMA_8B, model_folder, shape_of
from small_models import small_model
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.placement import limits
from agentrl.placement.memory import GIB, TrainingPlan, shape_of_config, training


def added(shape: Any, plan: TrainingPlan) -> float:
    return training(shape, replace(plan, in_bfloat16=True)).total - training(shape, plan).total


def test_it_adds_a_bucket_and_a_buffer(tmp_path: Path) -> None:
    """Of 8 billion parameters on 8 ranks: 50 million gradients and half a layer of 218 million in bfloat16. A trace of
    that step holds .29 GiB more in its forward pass, and no more at its peak."""
    shape = shape_of(model_folder(tmp_path / "model", LLAMA_8B))
    plan = TrainingPlan(4096, bfloat16=True, checkpointing=True, zero=3, ranks=8)
    head = 128_256 * 4096
    assert shape.matrix == head
    assert added(shape, plan) == 2 * (50_000_000 + 218_112_000 // 2)
    assert added(shape, plan) / GIB == pytest.approx(0.30, abs=0.01)
    assert added(shape, replace(plan, lora_rank=16)) == 2 * (218_112_000 // 2 + head / 8 - 50_000_000)


def test_a_matrix_that_is_the_embedding_is_not_cast() -> None:
    tied, own = (shape_of_config(small_model(kind).config) for kind in ("qwen2", "llama"))
    assert tied.largest == own.largest == own.matrix
    assert tied.matrix == 32 * 48


@pytest.mark.slow
def test_two_ranks_hold_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose output matrix is most of it."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    Policy(LlamaForCausalLM(config), train_tokenizer(["some text"], 300), "model").save(tmp_path / "start")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, held_by_ranks.__file__, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    held = json.loads(done.stdout.splitlines()[-1])

    def more(of: str, trained: str) -> int:
        return int(held["bfloat16"][trained][of] - held["float32"][trained][of])

    bucket = 2 * held_by_ranks.REDUCED
    assert more("states", "full") == pytest.approx(bucket, rel=0.01)
    assert more("states", "adapters") == pytest.approx(-bucket, rel=0.01)
    monkeypatch.setattr(limits, "SMALL", 0)
    monkeypatch.setattr(limits, "REDUCED", held_by_ranks.REDUCED)
    plan = TrainingPlan(held_by_ranks.TOKENS, bfloat16=True, checkpointing=True, zero=3, ranks=held_by_ranks.RANKS)
    shape = shape_of(tmp_path / "start")
    assert added(shape, plan) == pytest.approx(more("peak", "full"), rel=0.15)
    estimate = added(shape, replace(plan, lora_rank=4))
    assert estimate / 3 < more("peak", "adapters") < estimate, "what is cast before it is gathered is there too early"
