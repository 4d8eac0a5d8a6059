"""Stored rows that are continued: prefixes, masks, budgets, and environments that answer otherwise."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular import TabularEngine, stumbling

from agentrl.engines.base import Sampling
from agentrl.environments.base import Environment
from agentrl.environments.rooms.environment import Rooms, RoomsConfig
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.rollouts.continuations import attempts, check_continuation, check_replayable, node, node_name
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

TASKS = Rooms().tasks({"train": 24}, 0)["train"]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy([demonstrate(Rooms(), task, 0.3, 0, "t").messages for task in TASKS], seed=0)


def runner(policy: Policy, environment: Environment | None = None, error: float = 0.6) -> RolloutRunner:
    engine: Any = TabularEngine(policy.codec, stumbling(error))
    return RolloutRunner(policy, engine, environment or Rooms(), Sampling(max_tokens=400))


@pytest.fixture(scope="module")
def parents(policy: Policy) -> list[Trajectory]:
    names = [f"p-{number}" for number in range(len(TASKS))]
    rows = runner(policy).run([Attempt(task) for task in TASKS], 0, names)
    assert {row.termination for row in rows} >= {Termination.ANSWERED}
    return rows


def continued(policy: Policy, row: Trajectory, task: Task, turn: int, samples: int, seed: int = 0) -> list[Trajectory]:
    wanted = attempts([node(row, turn, task)], samples, lambda number: f"f-{number}")
    return runner(policy).run(list(wanted.values()), seed, list(wanted), source="forked")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_continuation_keeps_to_its_parent_and_each_sampled_token_is_true_once(
    policy: Policy, parents: list[Trajectory], data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, len(parents) - 1))
    parent = parents[number]
    turn = data.draw(st.integers(0, parent.n_steps - 1))
    acts = runner(policy)
    wanted = attempts([node(parent, turn, TASKS[number])], 3, lambda number: f"f-{number}")
    rows = acts.run(list(wanted.values()), data.draw(st.integers(0, 99)), list(wanted), source="forked")
    assert acts.counts["diverged"] == 0
    texts = [message for message in parent.messages if message.role is Role.ASSISTANT]
    for row in rows:
        check_continuation(row, wanted[row.trajectory_id].prefix)
        assert (row.parent_id, row.fork_at) == (parent.trajectory_id, texts[turn].token_start)
        assert row.input_ids[: row.fork_at] == parent.input_ids[: row.fork_at]
        assert not any(row.action_mask[: row.fork_at])
        assert row.n_steps == sum(message.role is Role.ASSISTANT for message in row.messages) - turn
        assert row.n_tool_calls + turn == sum(message.role is Role.TOOL for message in row.messages)
        assert row.spans[0].start == row.fork_at
    assert {row.group_id for row in rows} == {node_name(parent.task_id, parent.input_ids[: rows[0].fork_at])}
    budget = sum(
        len(acts.policy.codec.assistant(message)) for row in rows for message in row.messages if _is_new(message, row)
    )
    assert sum(row.n_action_tokens for row in rows) == budget


def _is_new(message: Any, row: Trajectory) -> bool:
    return message.role is Role.ASSISTANT and message.token_start >= row.fork_at


def test_the_same_seed_continues_to_the_same_rows(policy: Policy, parents: list[Trajectory]) -> None:
    first, other, third = (continued(policy, parents[0], TASKS[0], 0, 4, seed) for seed in (1, 1, 2))
    assert [row.input_ids for row in first] == [row.input_ids for row in other]
    assert [row.input_ids for row in first] != [row.input_ids for row in third]


def test_a_state_that_two_rows_share_has_one_name(policy: Policy, parents: list[Trajectory]) -> None:
    names = {node(row, 0, task).name for row, task in zip(parents, TASKS, strict=True)}
    assert len(names) == len(TASKS)
    again = parents[0].model_copy(update={"trajectory_id": "other"})
    assert node(again, 0, TASKS[0]).name == node(parents[0], 0, TASKS[0]).name
    with pytest.raises(ValueError, match=r"p-0 has [0-9]+ turns, so it cannot be continued from turn 99"):
        node(parents[0], 99, TASKS[0])
    with pytest.raises(ValueError, match="does not say where its turns lie"):
        node(demonstrate(Rooms(), TASKS[0], 0.0, 0, "text"), 0, TASKS[0])


def test_an_environment_that_answers_otherwise_drops_the_continuation(
    policy: Policy, parents: list[Trajectory]
) -> None:
    """The stored row says that a door led to another room than it does."""
    position, parent = next((n, row) for n, row in enumerate(parents) if row.n_tool_calls > 1)
    number = next(n for n, message in enumerate(parent.messages) if message.role is Role.TOOL)
    told = parent.messages[number].model_copy(update={"content": "nowhere"})
    wrong = parent.model_copy(update={"messages": [*parent.messages[:number], told, *parent.messages[number + 1 :]]})
    acts = runner(policy)
    wanted = attempts(
        [node(wrong, 1, TASKS[position]), node(wrong, 0, TASKS[position])], 2, lambda number: f"f-{number}"
    )
    rows = acts.run(list(wanted.values()), 0, list(wanted), source="forked")
    assert [("diverged" in row.tags, row.n_action_tokens > 0) for row in rows] == [(True, False)] * 2 + [
        (False, True)
    ] * 2
    assert acts.counts == {"diverged": 2}


def test_what_cannot_be_made_again_is_refused_by_name() -> None:
    slippery: dict[str, Any] = {"rooms": Rooms(), 'rooms{"slip":0.2}': Rooms(RoomsConfig(slip=0.2))}
    with pytest.raises(ValueError, match=r"""'rooms{"slip":0.2}' cannot be continued.*set replayable = True"""):
        check_replayable(slippery)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent_id": "q"}, "is of parent q"),
        ({"input_ids": [1] * 400}, "does not begin with the tokens of its parent"),
        ({"action_mask": [True] * 400}, "is trained on tokens of its parent"),
        (
            {"messages": [Message(role=Role.ASSISTANT, token_start=1, token_end=2)]},
            "does not go on with a turn at token",
        ),
    ],
)
def test_a_broken_continuation_is_refused(
    policy: Policy, parents: list[Trajectory], change: dict[str, Any], message: str
) -> None:
    [row] = continued(policy, parents[0], TASKS[0], 0, 1)
    with pytest.raises(ValueError, match=f"f-0 {message}"):
        check_continuation(row.model_copy(update=change), node(parents[0], 0, TASKS[0]).prefix)
