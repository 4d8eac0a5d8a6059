"""Stored rows that are continued, and what their turns are worth."""

import itertools
from typing import Any

import numpy as np
import pytest
from forked import ERROR, LIMITS, by_id, harness, model, rollouts, tabular, task_of, tasks
from tabular import TabularEngine, exact, stumbling

from agentrl.advantages.turns import turn_spans
from agentrl.engines.configs import EmbeddedConfig
from agentrl.environments.rooms.environment import Rooms
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.dagger.correct import correct
from agentrl.pipelines.methods.fork.fork import fork
from agentrl.pipelines.methods.slicing.estimates import estimate
from agentrl.pipelines.methods.slicing.steps import value
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.rollouts.continuations import check_continuation, node
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.trajectory import NOT_TRAINED, Role, Trajectory

__all__ = ["harness", "model", "rollouts", "tabular", "tasks"]


def test_stored_rows_are_continued_from_the_turns_that_are_named(
    harness: Harness, model: Model, rollouts: Trajectories
) -> None:
    parents = by_id(rollouts)
    failed = [row for row in parents.values() if not row.success]
    states = {node(row, turn, task_of(row)).name for row in failed for turn in range(row.n_steps)}
    done = harness.run(fork, {"at": "failed", "k": 3, **LIMITS}, trajectories=[rollouts], model=model)
    rows = done["trajectories"].read()
    assert {row.group_id for row in rows} == states
    assert len(rows) == 3 * len(states), "a state that several rows share is continued once"
    assert done.metrics["sampled_tokens"] == sum(row.n_action_tokens for row in rows)
    replayed = sum(len(row.messages[: _first(row)]) // 2 for row in rows)
    assert done.metrics["environment_calls"] == replayed + sum(row.n_tool_calls for row in rows)
    for row in rows:
        assert (row.source, row.policy) == ("forked", model.name)
        parent = parents[row.parent_id or ""]
        turn = sum(message.role is Role.ASSISTANT for message in row.messages) - row.n_steps
        check_continuation(row, node(parent, turn, task_of(parent)).prefix)
    named = harness.run(fork, {"at": [0, -1], "k": 1, **LIMITS}, trajectories=[rollouts], model=model)
    turns = {(row.parent_id, row.fork_at) for row in named["trajectories"].read()}
    for name, at in turns:
        spans = turn_spans(parents[name].messages, parents[name].action_mask)
        assert at in {spans[0][0], spans[-1][0]}


def _first(row: Trajectory) -> int:
    """The number of the first message after the fork."""
    return next(position for position, message in enumerate(row.messages) if message.token_start == row.fork_at)


def test_text_of_an_expert_is_continued_and_so_are_continuations(harness: Harness, model: Model, tasks: Tasks) -> None:
    """An expert's rows have no tokens; they are tokenised. A continuation is continued from its own turns alone."""
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    once = harness.run(fork, {"at": [1], "k": 1, **LIMITS}, trajectories=[expert], model=model)["trajectories"]
    assert len(once.ids()) == 4
    twice = harness.run(fork, {"at": "all", "k": 1, **LIMITS}, trajectories=[once], model=model)["trajectories"]
    starts = {row.trajectory_id: row.fork_at for row in once.read()}
    assert twice.ids()
    assert all(row.fork_at >= starts[row.parent_id or ""] for row in twice.read())
    with pytest.raises(ValueError, match="has no log-probs, so its uncertain turns are not known"):
        harness.run(fork, {"at": "uncertain", **LIMITS}, trajectories=[expert], model=model)


def test_uncertain_turns_are_those_of_unlikely_tokens(harness: Harness, model: Model, rollouts: Trajectories) -> None:
    row = next(row for row in rollouts.read() if row.n_steps > 3)
    start, end = turn_spans(row.messages, row.action_mask)[2]
    logprobs = [-2.0 if start <= position < end else logprob for position, logprob in enumerate(row.logprobs)]
    given = harness.trajectories([row.model_copy(update={"trajectory_id": "unsure", "logprobs": logprobs})])
    config = {"at": "uncertain", "turns": 1, "k": 2, **LIMITS}
    rows = harness.run(fork, config, trajectories=[given], model=model)["trajectories"].read()
    assert {row.fork_at for row in rows} == {start}
    assert len(rows) == 2


def test_stochastic_environments_are_refused_with_the_remedy(harness: Harness, model: Model) -> None:
    slippery = {"type": "rooms", "slip": 0.2}
    tasks = harness.run(generate, {"env": slippery, "train": 2, "dev": 0, "heldout": 0})["train"]
    rows = harness.run(sample, {"samples": 1, **LIMITS}, model=model, tasks=tasks)["trajectories"]
    for stage, config in ((fork, LIMITS), (value, LIMITS), (correct, {})):
        with pytest.raises(ValueError, match=r"cannot be continued: it may answer .* as slip of rooms"):
            harness.run(stage, config, trajectories=[rows], model=model)


def test_rows_that_policies_are_measured_on_are_refused_unless_nothing_is_trained_on_what_is_made(
    harness: Harness, model: Model, rollouts: Trajectories
) -> None:
    renamed = [{"trajectory_id": f"held-{n}", "split": "heldout"} for n in range(2)]
    held = harness.trajectories(
        [row.model_copy(update=new) for row, new in zip(rollouts.read()[:2], renamed, strict=True)]
    )
    text = r"2 of 18 rows are not of the train split, held-0 is of 'heldout': nothing is made .* trajectories.select"
    for stage in (fork, value, correct):
        with pytest.raises(ValueError, match=text):
            harness.run(stage, LIMITS, trajectories=[rollouts, held], model=model)
    config = {"at": [0], "k": 2, "measure": True, **LIMITS}
    rows = harness.run(fork, config, trajectories=[held], model=model)["trajectories"]
    assert rows.ids()
    assert all(NOT_TRAINED in row.tags for row in rows.read())
    assert not list(rows.trained_on())


def test_a_resumed_stage_keeps_what_was_sampled(
    harness: Harness, model: Model, rollouts: Trajectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed has the first shard in the buffer: it is read, and the rest is sampled."""
    from agentrl.pipelines.parts import continuing

    monkeypatch.setattr(continuing, "NODES_AT_ONCE", 2)
    given = harness.trajectories(
        [row.model_copy(update={"trajectory_id": f"r-{n}"}) for n, row in enumerate(rollouts.read()[:2])]
    )
    number, config = harness._count, {"at": "all", "k": 2, **LIMITS}
    whole = harness.run(fork, config, trajectories=[given], model=model)["trajectories"].read()
    kept = [row for row in whole if row.trajectory_id in {row.trajectory_id for row in whole[:4]}]
    context = harness._context

    def before(stage: str) -> Any:
        result = context(stage)
        renamed = [
            row.model_copy(update={"trajectory_id": result.trajectory_id(position), "episode_id": "kept"})
            for position, row in enumerate(kept)
        ]
        result.append(renamed, shard=0)
        return result

    monkeypatch.setattr(harness, "_context", before)
    again = harness.run(fork, config, trajectories=[given], model=model)["trajectories"].read()
    assert [row.input_ids for row in again] == [row.input_ids for row in whole]
    assert [row.episode_id == "kept" for row in again] == [True] * 4 + [False] * (len(again) - 4)
    assert number < harness._count


def test_values_are_means_over_continuations_of_both_sides(
    harness: Harness, model: Model, rollouts: Trajectories
) -> None:
    done = harness.run(value, {"where": "failed", "k": 4, **LIMITS}, trajectories=[rollouts], model=model)
    steps, parents = done["steps"].read(), by_id(rollouts)
    failed = {name for name, row in parents.items() if not row.success}
    assert {step.trajectory_id for step in steps} == failed
    assert done.metrics["valued_turns"] == len(steps) == sum(parents[name].n_steps for name in failed)
    groups: dict[str, list[Trajectory]] = {}
    for row in done["trajectories"].read():
        groups.setdefault(row.group_id or "", []).append(row)
    for step in steps:
        row = parents[step.trajectory_id]
        spans = turn_spans(row.messages, row.action_mask)
        assert (step.token_start, step.token_end) == spans[step.turn]
        assert (step.by, step.policy) == ("continuation", model.name)
        before = groups[node(row, step.turn, task_of(row)).name]
        assert step.v == np.mean([row.reward for row in before])
        if step.turn == row.n_steps - 1:
            assert (step.q, step.n, step.low, step.high) == (0.0, 1, 0.0, 0.0), "the end of a row is known"
        else:
            after = groups[node(row, step.turn + 1, task_of(row)).name]
            assert (step.q, step.n) == (np.mean([row.reward for row in after]), 4)
            assert (step.low, step.high) == estimate([row.scored_reward() for row in after], [1] * 4)[2:]
    for name, mine in itertools.groupby(steps, key=lambda step: step.trajectory_id):
        several = list(mine)
        assert sum(step.progress for step in several) == pytest.approx(parents[name].scored_reward() - several[0].v)


def test_bisection_values_the_turn_that_lost_with_few_continuations(
    harness: Harness, model: Model, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adviser walks well, and answers too early after all: the last turn lost."""
    monkeypatch.setattr(EmbeddedConfig, "build", lambda self, policy: TabularEngine(policy.codec, stumbling(0.2)))
    rows = []
    for number, task in enumerate(tasks.read()):
        good = demonstrate(Rooms(), task, 0.0, 0, "good")
        if task.level > 2:
            early = [*good.messages[:-3], good.messages[-1]]
            lost = {"trajectory_id": f"early-{number}", "reward": 0.0, "success": False, "n_steps": task.level}
            rows.append(good.model_copy(update={**lost, "messages": early}))
    given = harness.trajectories(rows)
    done = harness.run(value, {"where": "bisect", "k": 8, **LIMITS}, trajectories=[given], model=model)
    named = {step.trajectory_id: step for step in done["steps"].read()}
    levels = {row.trajectory_id: row.n_steps for row in rows}
    assert named
    assert len(named) == done.metrics["valued_turns"], "each row names one turn"
    assert all(step.turn == levels[name] - 1 for name, step in named.items())
    assert done.metrics["states"] <= sum(levels.values())
    draws: dict[str, list[Trajectory]] = {}
    for row in done["trajectories"].read():
        draws.setdefault(row.group_id or "", []).append(row)
    assert {len(group) for group in draws.values()} == {8, 16}, "the state before the turn is continued again"
    assert all(sorted(row.sample_index for row in group) == list(range(len(group))) for group in draws.values())
    parents = {row.trajectory_id: row for row in rows}
    for name, step in named.items():
        again = [group for group in draws.values() if len(group) == 16 and group[0].parent_id == name]
        fresh = [row.scored_reward() for row in again[0] if row.sample_index >= 8]
        assert step.v == np.mean(fresh), f"the search's own draws are not counted in {parents[name].prompt}"


def test_unscored_rows_are_left_out_and_counted(harness: Harness, model: Model, rollouts: Trajectories) -> None:
    row = rollouts.read()[0]
    unscored = {"trajectory_id": "unscored", "reward": None, "success": None}
    given = harness.trajectories([row.model_copy(update=unscored)])
    done = harness.run(value, {"where": "all", "k": 1, **LIMITS}, trajectories=[given], model=model)
    assert (done.metrics["unscored"], done.metrics["valued_turns"]) == (1, 0)


@pytest.mark.slow
def test_exact_values_lie_in_the_intervals(harness: Harness, model: Model) -> None:
    """400 states of rooms, sixteen continuations each: 93 to 97 % of the exact values lie in the 95 % interval."""
    policy = stumbling(ERROR)
    tasks = harness.run(generate, {"env": "rooms", "train": 150, "dev": 0, "heldout": 0})["train"]
    rows = harness.run(sample, {"samples": 1, **LIMITS}, model=model, tasks=tasks)["trajectories"]
    done = harness.run(value, {"where": "all", "k": 16, **LIMITS}, trajectories=[rows], model=model)
    parents = by_id(rows)
    states: dict[str, bool] = {}
    for step in done["steps"].read():
        row = parents[step.trajectory_id]
        if step.turn < row.n_steps - 1:
            true = exact(row, step.turn + 1, policy)
            states[node(row, step.turn + 1, task_of(row)).name] = step.low <= true <= step.high
    chosen = list(states.values())[:400]
    assert len(chosen) == 400
    assert 0.93 <= sum(chosen) / 400 <= 0.97
