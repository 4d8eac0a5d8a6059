"""Signals on tokens beside the reward: observations in the second stream (ECHO), and a teacher (distillation)."""

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError

from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.online.observed import Observed
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.stages.grpo import grpo, online
from agentrl.pipelines.stages.train import offline, sft
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.schemas.note import Note, NoteScope
from agentrl.schemas.training import CE_WEIGHTS
from agentrl.schemas.trajectory import Message, Role, Trajectory
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs

LIMITS = {"max_turn_tokens": 24, "max_tokens": 120}
SMALL = {"iterations": 2, "tasks": 3, "samples": 4, "optimizer": {"lr": 1e-3}, "checkpoints": {"last": 0}, **LIMITS}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("signals"))


@pytest.fixture(scope="module")
def rollouts(harness: Harness, warm: Model, tasks: Tasks) -> Trajectories:
    return harness.run(sample, {"samples": 4, "sampling": LIMITS}, model=warm, tasks=tasks)["trajectories"]


@pytest.fixture(scope="module")
def taught(harness: Harness, warm: Model, tasks: Tasks) -> Model:
    """A teacher: the policy, after it has seen the right way once more."""
    right = harness.run(synthesize, {"noise": 0.0}, tasks=tasks)["trajectories"]
    return harness.run(sft, {"steps": 20, "batch": 6, "optimizer": {"lr": 2e-3}}, trajectories=[right], model=warm)[
        "model"
    ]


def weights_of(result: Result) -> dict[str, torch.Tensor]:
    return Policy.load(result["model"].path).model.state_dict()


def same_weights(first: Result, other: Result) -> bool:
    return all(torch.equal(value, weights_of(other)[name]) for name, value in weights_of(first).items())


# -- observations


def test_only_the_bodies_of_observations_weigh(warm: Model, rollouts: Trajectories) -> None:
    policy = Policy.load(warm.path)
    seen = Observed({"tool": 0.1}, policy.tokenizer.decode)
    bodies = 0
    for row in rollouts.read():
        result = seen.weights(row)
        assert not result[np.array(row.action_mask)].any()
        heard = [
            message.content for message in row.messages if message.role is Role.TOOL and message.token_start is not None
        ]
        bodies += len(heard)
        text = policy.tokenizer.decode([token for token, weight in zip(row.input_ids, result, strict=True) if weight])
        assert text == "".join(heard)
        assert set(result.tolist()) <= {0.0, float(np.float32(0.1))}
        fork = row.model_copy(update={"fork_at": len(row.input_ids) - 1})
        assert not seen.weights(fork)[:-1].any(), "the parent has what a fork shares with it"
    assert bodies > len(rollouts.ids())
    assert seen.unplaced == 0
    assert not Observed({"user": 1.0}, policy.tokenizer.decode).weights(rollouts.read()[0]).any(), (
        "openings are no answers"
    )


def test_bodies_of_several_messages_and_of_broken_characters_are_found() -> None:
    """Two answers that were encoded together, one of them in characters of several tokens; a third was changed."""
    policy = tiny_policy([[Message(role=Role.USER, content="hello there")]], 0)
    texts = ["né ü☃", "plain text", "gone"]
    answers = [Message(role=Role.TOOL, content=text, tool_call_id=str(n)) for n, text in enumerate(texts)]
    opening = policy.codec.opening([Message(role=Role.USER, content="hello")])
    turn = policy.codec.assistant(Message(role=Role.ASSISTANT, content="there"))
    heard = policy.codec.observations([*answers[:2], answers[2].model_copy(update={"content": "other"})])
    start, end = len(opening) + len(turn), len(opening) + len(turn) + len(heard)
    spans = zip(answers, (start, end, end), strict=True)
    spanned = [item.model_copy(update={"token_start": first, "token_end": end}) for item, first in spans]
    row = Trajectory(
        trajectory_id="r", episode_id="r", task_id="t", source="model", env="e", split="train", prompt="hello",
        reward=0.0, success=False, termination="answered",
        messages=[
            Message(role=Role.USER, content="hello", token_start=0, token_end=len(opening)),
            Message(role=Role.ASSISTANT, content="there", token_start=len(opening), token_end=start),
            *spanned,
        ],
        input_ids=[*opening, *turn, *heard],
        action_mask=[*[False] * len(opening), *[True] * len(turn), *[False] * len(heard)],
    )  # fmt: skip
    seen = Observed({"tool": 1.0}, policy.tokenizer.decode)
    result = seen.weights(row)
    chosen = [token for token, weight in zip(row.input_ids, result, strict=True) if weight]
    assert policy.tokenizer.decode(chosen) == "né ü☃plain text"
    assert seen.unplaced == 1


@pytest.mark.parametrize("stage", [online, offline], ids=lambda stage: stage.name)
def test_observations_of_weight_zero_leave_grpo_as_it_is(
    harness: Harness, warm: Model, tasks: Tasks, rollouts: Trajectories, stage: Any
) -> None:
    made = [trained(harness, stage, warm, tasks, rollouts, observe) for observe in ({}, {"tool": 0.0})]
    assert same_weights(*made)
    assert made[0]["metrics"].table().equals(made[1]["metrics"].table())
    name = "batches" if stage is online else "rows"
    assert CE_WEIGHTS not in pq.read_schema(made[1][name].path).names


def trained(
    harness: Harness, stage: Any, warm: Model, tasks: Tasks, rollouts: Trajectories, observe: dict[str, float]
) -> Result:
    if stage is online:
        return harness.run(online, {**SMALL, "iterations": 1, "observe": observe}, model=warm, tasks=tasks)
    config = {"steps": 1, "batch": 64, "optimizer": {"lr": 1e-3}, "observe": observe}
    return harness.run(offline, config, trajectories=[rollouts], model=warm)


@pytest.mark.parametrize("stage", [online, offline], ids=lambda stage: stage.name)
def test_observations_are_learnt_beside_the_reward_and_do_not_dilute_it(
    harness: Harness, warm: Model, tasks: Tasks, rollouts: Trajectories, stage: Any
) -> None:
    """The rows of the first stream, and what their loss is divided by, are those of GRPO."""
    plain = trained(harness, stage, warm, tasks, rollouts, {})
    echo = trained(harness, stage, warm, tasks, rollouts, {"tool": 0.5})
    name = "batches" if stage is online else "rows"
    ours, theirs = (made[name].table().to_pylist() for made in (echo, plain))
    first = [row for row in ours if any(row["mask"])]
    assert [[row[key] for key in ("row_id", "mask", "weights", "input_ids")] for row in first] == [
        [_again(row["row_id"], first), *(row[key] for key in ("mask", "weights", "input_ids"))] for row in theirs
    ]
    assert all(len(row[CE_WEIGHTS]) == len(row["input_ids"]) for row in ours)
    alone = [row for row in ours if not any(row["mask"])]
    assert all(any(row[CE_WEIGHTS]) for row in alone)
    assert len(ours) == sum(any(row[CE_WEIGHTS]) or any(row["mask"]) for row in ours)
    [metrics], [before] = (made["metrics"].table().to_pylist() for made in (echo, plain))
    assert metrics["ce_loss"] > 0
    if stage is online:  # the other begins its rows again until a step is full
        assert metrics["tokens"] == before["tokens"]
        assert metrics["ce_tokens"] == sum(weight > 0 for row in ours for weight in row[CE_WEIGHTS])
        assert metrics["observations_unplaced"] == 0
    assert surprise(echo, ours) < surprise(plain, ours), "it knows better what tools answer"


def _again(name: str, rows: list[dict[str, Any]]) -> str:
    """The row of another run of the same stage that has the same number."""
    return next(row["row_id"] for row in rows if row["row_id"][-6:] == name[-6:])


def surprise(made: Result, rows: list[dict[str, Any]]) -> float:
    """Mean ``-log p`` of the observations."""
    seen = [
        {**{key: value for key, value in row.items() if key not in ("iteration", "step", CE_WEIGHTS)},
         "mask": [weight > 0 for weight in row[CE_WEIGHTS]]}
        for row in rows if any(row[CE_WEIGHTS])
    ]  # fmt: skip
    import pyarrow as pa

    given = TrainingRows.of_table(pa.Table.from_pylist(seen))
    logprobs = batch_logprobs(Policy.load(made["model"].path), given)
    return -sum(item.sum() for item in logprobs) / sum(map(sum, (row["mask"] for row in seen)))


def test_weights_of_observations_are_checked(harness: Harness) -> None:
    for wrong in ({"tool": -0.1}, {"assistant": 0.1}, {"tool": float("nan")}):
        with pytest.raises(ValidationError, match="observe"):
            online.config.model_validate({"observe": wrong})


# -- a teacher


def gap(model: Model, teacher: Model, rows: list[Trajectory]) -> float:
    """Mean over the action tokens of rollouts of the divergence between two models, by their differences squared."""
    from agentrl.schemas.training import TrainingRow

    plain = [
        TrainingRow(row_id=row.trajectory_id, input_ids=row.input_ids, mask=row.action_mask, weights=row.logprobs)
        for row in rows
    ]
    given = TrainingRows.of(plain)
    first, other = (batch_logprobs(Policy.load(path.path), given) for path in (model, teacher))
    return float(np.mean(np.concatenate([a - b for a, b in zip(first, other, strict=True)]) ** 2))


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(harness: Harness, warm: Model, taught: Model, tasks: Tasks) -> None:
    config = {**SMALL, "iterations": 6, "tasks": 6, "samples": 16, "algorithm": {"type": "distill"}}
    made = harness.run(online, config, model=warm, tasks=tasks, teacher=taught)
    curve = [row["teacher_kl"] for row in made["metrics"].table().to_pylist()]
    assert curve[0] > 0
    assert sum(curve[-2:]) < sum(curve[:2])
    rows = made["trajectories"].read()
    assert gap(made["model"], taught, rows) < gap(warm, taught, rows)


def test_stored_rollouts_are_distilled_from_by_the_same_advantages(
    harness: Harness, warm: Model, taught: Model, rollouts: Trajectories
) -> None:
    config = {"steps": 1, "batch": 64, "algorithm": {"type": "distill", "outcome": 0.5}}
    made = harness.run(offline, config, trajectories=[rollouts], model=warm, teacher=taught)
    rows = {row.trajectory_id: row for row in rollouts.read()}
    plain = harness.run(
        offline, {**config, "algorithm": {"type": "distill"}}, trajectories=[rollouts], model=warm, teacher=taught
    )
    result = {row["row_id"]: row for row in plain["rows"].table().to_pylist()}
    given = TrainingRows.of_table(plain["rows"].table())
    theirs = batch_logprobs(Policy.load(taught.path), given)
    for name, log_teacher in zip(given.ids(), theirs, strict=True):
        mask = np.array(rows[name].action_mask)
        expected = log_teacher[mask] - np.array(rows[name].logprobs)[mask]
        assert np.array(result[name]["weights"])[mask] == pytest.approx(expected, abs=1e-4)
    assert plain.metrics["teacher_kl"] > 0
    assert made["rows"].table()["weights"] != plain["rows"].table()["weights"]


@pytest.mark.slow
def test_the_model_itself_teaches_if_it_sees_the_answer(
    harness: Harness, warm: Model, tasks: Tasks, rollouts: Trajectories
) -> None:
    config = {**SMALL, "iterations": 1, "algorithm": {"type": "distill"}, "teacher_context": "answer"}
    [metrics] = harness.run(online, config, model=warm, tasks=tasks)["metrics"].table().to_pylist()
    assert metrics["grad_norm"] > 0
    stored = {"steps": 1, "batch": 64, "algorithm": {"type": "distill"}, "teacher_context": "answer"}
    by_answer = harness.run(offline, stored, trajectories=[rollouts], model=warm).metrics["teacher_kl"]
    [first, *_] = tasks.read()
    notes = harness.notes([_note(first.task_id)])
    stored["teacher_context"] = "notes"
    by_notes = harness.run(offline, stored, trajectories=[rollouts], model=warm, notes=notes)
    assert by_notes.metrics["teacher_kl"] not in (0, by_answer)
    weights = {row["row_id"]: max(map(abs, row["weights"])) for row in by_notes["rows"].table().to_pylist()}
    noted = {row.trajectory_id for row in rollouts.read() if row.task_id == first.task_id}
    others = [weight for name, weight in weights.items() if name not in noted]
    assert min(weights[name] for name in noted) > 100 * max(others, default=0.0), "a note reaches its own task only"


def _note(task_id: str) -> Note:
    return Note(
        note_id="n", scope=NoteScope.TASK, task_id=task_id, env="lookup", split="train", text="look again",
        made_from="r", by="env",
    )  # fmt: skip


def test_a_teacher_that_cannot_teach_is_refused(
    harness: Harness, warm: Model, taught: Model, tasks: Tasks, rollouts: Trajectories
) -> None:
    distill = {**SMALL, "algorithm": {"type": "distill"}}
    with pytest.raises(ValueError, match=r"wire inputs\.teacher to a model, or set teacher_context"):
        harness.run(online, distill, model=warm, tasks=tasks)
    with pytest.raises(ValueError, match=r"inputs\.teacher is wired, and algorithm grpo asks for none"):
        harness.run(online, SMALL, model=warm, tasks=tasks, teacher=taught)
    with pytest.raises(ValueError, match=r"teacher_context: notes needs notes; wire inputs\.notes"):
        harness.run(online, {**distill, "teacher_context": "notes"}, model=warm, tasks=tasks)
    with pytest.raises(ValueError, match="no teacher sees them"):
        harness.run(online, distill, model=warm, tasks=tasks, teacher=taught, notes=harness.notes([]))
    other = tiny_policy([[Message(role=Role.USER, content="zebra quagga")]], 0)
    foreign = harness.model(other.save)
    with pytest.raises(ValueError, match=r"inputs\.teacher: .* has another tokenizer than the student .*train\.sft"):
        harness.run(online, distill, model=warm, tasks=tasks, teacher=foreign)
    stored = {"steps": 1, "batch": 4, "algorithm": {"type": "distill"}}
    with pytest.raises(ValueError, match="has another tokenizer"):
        harness.run(offline, stored, trajectories=[rollouts], model=warm, teacher=foreign)
    for stage in (online, grpo, offline):
        with pytest.raises(ValidationError, match="teacher_context is set, and algorithm grpo asks for no teacher"):
            stage.config.model_validate({"teacher_context": "answer"})
