"""A student's rows, corrected by what their environment advises."""

import json
from pathlib import Path

import numpy as np
import pytest
from forked import LIMITS, TRAIN, by_id, harness, model, rollouts, tabular, tasks
from pydantic import ValidationError

from agentrl.advantages.turns import turn_spans
from agentrl.environments.rooms.environment import Rooms
from agentrl.environments.scripted import NoExpertError
from agentrl.pipelines.handles import Model, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.dagger.correct import correct
from agentrl.pipelines.methods.fork.fork import fork
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import synthesize
from agentrl.schemas.trajectory import Role, Termination, Trajectory

__all__ = ["harness", "model", "rollouts", "tabular", "tasks"]


def test_an_adviser_labels_every_state_of_the_student(harness: Harness, model: Model, rollouts: Trajectories) -> None:
    done = harness.run(correct, {"mode": "label", **LIMITS}, trajectories=[rollouts], model=model)
    rows, parents = done["trajectories"].read(), by_id(rollouts)
    assert len(rows) == sum(row.n_steps for row in parents.values())
    assert done.metrics["diverged"] == done.metrics["too_long"] == 0
    assert done.metrics["foreign_tokens"] == sum(row.n_action_tokens for row in rows)
    for row in rows:
        _check_corrected(row, parents[row.parent_id or ""])
        assert (row.reward, row.success, row.n_steps) == (None, None, 1)
        message = row.messages[-1]
        room, goal = _where(row)
        best = Rooms().house
        if room == goal:
            assert message.content == "here"
        else:
            assert message.tool_calls[0].parsed()["door"] == best.shortest(best.numbers[room], best.numbers[goal])
    few = harness.run(correct, {"mode": "label", "k": 1, **LIMITS}, trajectories=[rollouts], model=model)
    assert len(few["trajectories"].ids()) == len(parents)


def _where(row: Trajectory) -> tuple[str, str]:
    from tabular import state_of

    return state_of(row.messages[:-1])


def _check_corrected(row: Trajectory, parent: Trajectory) -> None:
    """No token of the student is trained on, and the prefix is the student's."""
    assert (row.source, row.policy, row.tokenizer) == ("corrected", "expert", parent.tokenizer)
    assert row.input_ids[: row.fork_at] == parent.input_ids[: row.fork_at]
    assert not any(row.action_mask[: row.fork_at])
    assert row.fork_at in {start for start, _ in turn_spans(parent.messages, parent.action_mask)}
    assert row.action_mask[row.fork_at]
    assert np.isnan(row.logprobs).all()


def test_an_adviser_takes_over_and_solves_the_task(harness: Harness, model: Model, rollouts: Trajectories) -> None:
    parents = by_id(rollouts)
    done = harness.run(correct, {"mode": "switch", "k": 2, **LIMITS}, trajectories=[rollouts], model=model)
    rows = done["trajectories"].read()
    assert len(rows) == sum(min(2, row.n_steps) for row in parents.values())
    for row in rows:
        _check_corrected(row, parents[row.parent_id or ""])
        assert row.success or row.termination is not Termination.ANSWERED
    assert done.metrics["success"] > 0.9
    trained = harness.run(sft, TRAIN, trajectories=[done["trajectories"]], model=model)
    assert trained.metrics


def test_adviser_and_student_take_turns(harness: Harness, model: Model, rollouts: Trajectories) -> None:
    done = harness.run(correct, {"mode": "mix", "beta": 0.5, "k": 8, **LIMITS}, trajectories=[rollouts], model=model)
    rows, calls = done["trajectories"].read(), [0, 0]
    assert len(rows) == 32
    for row in rows:
        assert np.isnan(row.logprobs).all()
        for start, end in turn_spans(row.messages, row.action_mask):
            assert len(set(row.action_mask[start:end])) == 1
            calls[row.action_mask[start]] += 1
            number = next(position for position, message in enumerate(row.messages) if message.token_start == start)
            if row.action_mask[start]:
                assert _best(row, number)
    assert 0.35 < calls[1] / sum(calls) < 0.65
    for wrong in ({"mode": "mix"}, {"mode": "label", "beta": 0.5}):
        with pytest.raises(ValidationError, match="beta is the adviser's share"):
            harness.run(correct, wrong, trajectories=[rollouts], model=model)


def _best(row: Trajectory, number: int) -> bool:
    """Whether a message of a row is what the adviser says."""
    from tabular import state_of

    room, goal = state_of(row.messages[:number])
    message, home = row.messages[number], Rooms().house
    if room == goal:
        return message.content == "here"
    return json.loads(message.tool_calls[0].arguments)["door"] == home.shortest(home.numbers[room], home.numbers[goal])


def test_an_environment_without_an_adviser_is_refused_by_name(harness: Harness, model: Model) -> None:
    tasks = harness.run(generate, {"env": "lookup", "train": 1, "dev": 0, "heldout": 0})["train"]
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    with pytest.raises(NoExpertError, match="env 'lookup' has no adviser: its episodes need advise"):
        harness.run(correct, {"mode": "label", **LIMITS}, trajectories=[expert], model=model)


def test_a_row_whose_environment_went_otherwise_is_left_out(
    harness: Harness, model: Model, rollouts: Trajectories, tmp_path: Path
) -> None:
    row = next(row for row in rollouts.read() if row.n_steps > 2)
    number = next(n for n, message in enumerate(row.messages) if message.role is Role.TOOL)
    told = row.messages[number].model_copy(update={"content": "nowhere"})
    wrong = {"trajectory_id": "told", "messages": [*row.messages[:number], told, *row.messages[number + 1 :]]}
    given = harness.trajectories([row.model_copy(update=wrong)])
    done = harness.run(correct, {"mode": "label", **LIMITS}, trajectories=[given], model=model)
    assert (done.metrics["diverged"], done.metrics["rows"]) == (1, 0)
    forked = harness.run(fork, {"at": [0, 1], "k": 2, **LIMITS}, trajectories=[given], model=model)
    assert (forked.metrics["diverged"], forked.metrics["rows"]) == (2, 2)
