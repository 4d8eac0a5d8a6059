"""Stored rows in the dialects of other model families reach train.kto and train.offline: written ones as their
templates write them, sampled ones as they were sampled."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from architectures import expert_runs, lookup_tasks

from agentrl.chat.codec import ChatCodec
from agentrl.models.policy import Policy
from agentrl.models.tiny import TinySize, init_model
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.train import kto, offline
from agentrl.pipelines.stages.trajectories import sample
from agentrl.schemas.trajectory import Message, Role
from benchmarks.chat_families import tokenizer_of

FAMILIES = {"llama3_2": "llama-3", "lfm2_2_5": "learned", "qwen3": "qwen3", "qwen2_5": "hermes"}
CONFIG: dict[str, Any] = {"steps": 1, "batch": 4}


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    """An untrained model of another family, found from its folder as any model is."""
    tokenizer = tokenizer_of(request.param)
    return Policy(init_model(tokenizer, 0, TinySize(context=1024)), tokenizer, request.param)


def turns(codec: ChatCodec, row: dict[str, Any], tools: str) -> list[Message]:
    """What the masked tokens of a training row say, read as sampled turns are."""
    matches, start = [], 0
    for acts, run in groupby(row["mask"]):
        end = start + len(list(run))
        if acts:
            parsed = codec.parse(row["input_ids"][start:end], row["input_ids"][:start], tools)
            assert parsed.error is None
            matches.append(parsed.message)
        start = end
    return matches


def meaning(messages: list[Message]) -> list[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    return [(message.content, [(call.name, call.parsed()) for call in message.tool_calls]) for message in messages]


def outcomes(harness: Harness, given: Trajectories) -> Trajectories:
    """Copies of rows, of which every other one succeeds."""
    rows = [
        row.model_copy(update={"trajectory_id": f"{row.trajectory_id}-x", "reward": n % 2, "success": bool(n % 2)})
        for n, row in enumerate(given.read())
    ]
    return harness.trajectories(rows)


def test_written_rows_reach_kto_as_their_family_writes_them(tmp_path: Path, policy: Policy) -> None:
    harness, written = Harness(tmp_path), expert_runs(4, noise=0.0)
    model = harness.model(policy.save)
    given = outcomes(harness, harness.trajectories(written))
    trained = harness.run(kto, CONFIG, trajectories=[given], model=model)
    assert trained.metrics["dialect"].partition(" ")[0] == FAMILIES[policy.name]
    rows = {row["row_id"]: row for row in trained["rows"].table().to_pylist()}
    assert len(rows) == 4
    assert {row["label"] for row in rows.values()} == {1, -1}
    for entry in written:
        texts = [message for message in entry.messages if message.role is Role.ASSISTANT]
        assert meaning(turns(policy.codec, rows[f"{entry.trajectory_id}-x"], entry.tools)) == meaning(texts)


@pytest.mark.parametrize("stage", [kto, offline], ids=lambda stage: stage.name)
def test_sampled_rows_reach_training_as_they_were_sampled(tmp_path: Path, policy: Policy, stage: Any) -> None:
    harness = Harness(tmp_path)
    model, tasks = harness.model(policy.save), harness.tasks(lookup_tasks(2))
    sampling = {"max_turn_tokens": 8, "max_tokens": 900}
    made = harness.run(sample, {"samples": 2, "sampling": sampling}, model=model, tasks=tasks)
    assert made.metrics["dialect"].partition(" ")[0] == FAMILIES[policy.name]
    given = outcomes(harness, made["trajectories"])
    trained = harness.run(stage, CONFIG, trajectories=[given], model=model)
    rows = {row["row_id"]: row for row in trained["rows"].table().to_pylist()}
    assert len(rows) == 4
    for entry in given.read():
        assert rows[entry.trajectory_id]["input_ids"] == entry.input_ids
        assert rows[entry.trajectory_id]["mask"] == entry.action_mask
    assert "dialect" not in trained.metrics, "nothing was encoded again"


@pytest.mark.parametrize("stage", [kto, offline], ids=lambda stage: stage.name)
def test_rows_of_one_family_are_refused_for_a_model_of_another(tmp_path: Path, stage: Any) -> None:
    harness, made = Harness(tmp_path), {}
    for name in ("qwen2_5", "llama3_2"):
        tokenizer = tokenizer_of(name)
        made[name] = harness.model(Policy(init_model(tokenizer, 0, TinySize(context=1024)), tokenizer, name).save)
    config = {"samples": 2, "sampling": {"max_turn_tokens": 8, "max_tokens": 900}}
    rows = harness.run(sample, config, model=made["qwen2_5"], tasks=harness.tasks(lookup_tasks(1)))["trajectories"]
    with pytest.raises(ValueError, match=r"was tokenised by .*, and the model .* uses .*train the model that sampled"):
        harness.run(stage, CONFIG, trajectories=[outcomes(harness, rows)], model=made["llama3_2"])
