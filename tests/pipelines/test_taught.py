"""A student's rows, corrected by a teacher model."""

from typing import Any

import numpy as np
import pytest
from forked import ERROR, LIMITS, TRAIN, by_id, harness, model, rollouts, spoken_to, tabular, tasks
from pydantic import ValidationError
from tabular import TabularEngine, stumbling
from test_corrections import _best

from agentrl.advantages.turns import turn_spans
from agentrl.engines.configs import EmbeddedConfig
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.pipelines.handles import Model, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.dagger.correct import CorrectConfig, correct
from agentrl.pipelines.stages.train import offline, sft
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

__all__ = ["harness", "model", "rollouts", "tabular", "tasks"]


@pytest.fixture
def teacher(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A teacher who always finds the way, beside a student who stumbles."""
    knowing = harness.model(spoken_to().save)

    def build(self: Any, policy: Any) -> TabularEngine:
        return TabularEngine(policy.codec, stumbling(0.0 if policy.name == knowing.name else ERROR))

    monkeypatch.setattr(EmbeddedConfig, "build", build)
    return knowing


def check(row: Trajectory, parent: Trajectory, teacher: Model) -> None:
    """No token of the student is trained on, the prefix is the student's, and nothing has log-probs."""
    assert (row.source, row.policy, row.tokenizer) == ("corrected", teacher.name, parent.tokenizer)
    assert row.input_ids[: row.fork_at] == parent.input_ids[: row.fork_at]
    assert not any(row.action_mask[: row.fork_at])
    assert row.fork_at in {start for start, _ in turn_spans(parent.messages, parent.action_mask)}
    assert row.action_mask[row.fork_at]
    assert np.isnan(row.logprobs).all()
    assert row.n_action_tokens == sum(row.action_mask)


def test_a_teacher_labels_every_state_of_the_student(
    harness: Harness, model: Model, teacher: Model, rollouts: Trajectories
) -> None:
    given = {"trajectories": [rollouts], "model": model}
    done = harness.run(correct, {"mode": "label", **LIMITS}, teacher=teacher, **given)
    rows, parents = done["trajectories"].read(), by_id(rollouts)
    assert len(rows) == sum(row.n_steps for row in parents.values())
    assert (done.metrics["diverged"], done.metrics["foreign_tokens"]) == (0, sum(row.n_action_tokens for row in rows))
    for row in rows:
        check(row, parents[row.parent_id or ""], teacher)
        assert (row.reward, row.success, row.n_steps, row.termination) == (None, None, 1, Termination.CANCELLED)
        assert row.messages[-1].role is Role.ASSISTANT
        assert row.messages[-1].token_end == row.n_tokens
        assert _best(row, len(row.messages) - 1)
    advised = harness.run(correct, {"mode": "label", **LIMITS}, **given)["trajectories"].read()
    assert [row.input_ids for row in rows] == [row.input_ids for row in advised], "both know the shortest way"
    assert harness.run(sft, TRAIN, trajectories=[done["trajectories"]], model=model).metrics


def test_a_teacher_takes_over_and_solves_the_task(
    harness: Harness, model: Model, teacher: Model, rollouts: Trajectories
) -> None:
    config = {"mode": "switch", "k": 2, **LIMITS}
    done = harness.run(correct, config, trajectories=[rollouts], model=model, teacher=teacher)
    parents = by_id(rollouts)
    rows = done["trajectories"].read()
    assert len(rows) == sum(min(2, row.n_steps) for row in parents.values())
    for row in rows:
        check(row, parents[row.parent_id or ""], teacher)
        assert row.success or row.termination is not Termination.ANSWERED
    assert done.metrics["success"] > 0.9
    with pytest.raises(Exception, match="logprobs not finite"):
        harness.run(
            offline, {**TRAIN, "algorithm": {"type": "reinforce++"}}, trajectories=[done["trajectories"], rollouts],
            model=model,
        )  # fmt: skip


def test_the_share_of_a_teacher_is_annealed(
    harness: Harness, model: Model, teacher: Model, rollouts: Trajectories
) -> None:
    config = {"mode": "mix", "beta": [1.0, 0.0], "k": 3, **LIMITS}
    rows = harness.run(correct, config, trajectories=[rollouts], model=model, teacher=teacher)["trajectories"].read()
    turns = [[0, 0], [0, 0], [0, 0]]
    for row in rows:
        assert np.isnan(row.logprobs).all()
        for start, _ in turn_spans(row.messages, row.action_mask):
            turns[row.sample_index][row.action_mask[start]] += 1
            number = next(position for position, message in enumerate(row.messages) if message.token_start == start)
            assert not row.action_mask[start] or _best(row, number)
    assert turns[0][0] == 0, "the first rollout of each task is the teacher's"
    assert turns[2][1] == 0, "the last one is the student's"
    assert min(turns[1]) > 0
    assert CorrectConfig(mode="mix", beta=(1.0, 0.0), k=3).shares() == [1.0, 0.5, 0.0]


def test_a_teacher_with_another_tokenizer_is_refused(harness: Harness, model: Model, rollouts: Trajectories) -> None:
    other = tiny_policy([[Message(role=Role.USER, content="zebra quagga")]], 0, TinySize(context=256))
    with pytest.raises(
        ValueError, match=r"inputs\.teacher: .* has another tokenizer than the student .* Take a teacher"
    ):
        harness.run(correct, LIMITS, trajectories=[rollouts], model=model, teacher=harness.model(other.save))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mode": "mix", "beta": [1.0, 0.0]}, "changes over the k rollouts of a task; set k to 2 or more"),
        ({"mode": "mix", "beta": 1.5}, "beta is a share, from 0 to 1"),
        ({"mode": "mix", "beta": 0.0}, "leaves the adviser no turn"),
        ({"mode": "label", "beta": [1.0, 0.0]}, "beta is the adviser's share"),
    ],
)
def test_shares_that_cannot_be_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorrectConfig.model_validate(config)


def test_an_engine_for_nobody_is_refused(harness: Harness, model: Model, rollouts: Trajectories) -> None:
    config = {"teacher_engine": {"type": "transformers", "schedule": "free"}, **LIMITS}
    with pytest.raises(
        ValueError, match=r"teacher_engine is set, but there is no teacher to ask; wire inputs\.teacher"
    ):
        harness.run(correct, config, trajectories=[rollouts], model=model)
