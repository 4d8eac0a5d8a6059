"""What agents of a team are credited with, computed by hand."""

import pytest

from agentrl.algorithms.rloo import RLOO
from agentrl.online.agents import by_agent
from agentrl.online.credit import assign
from agentrl.rollouts.team import Team
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

TASK = Task(task_id="t", env="rooms", split="train", prompt="attic to vault?")


def row(name: str, agent: str, reward: float | None, tokens: int = 2, **more: object) -> Trajectory:
    """A row whose agent read one token, and sampled so many."""
    messages = [
        Message(role=Role.USER, content="q", token_start=0, token_end=1),
        Message(role=Role.ASSISTANT, content=f"{name} {{so}}", token_start=1, token_end=1 + tokens),
    ]
    given = {
        "trajectory_id": name, "episode_id": name, "task_id": "t", "group_id": "g", "source": "team", "env": "rooms",
        "split": "train", "prompt": "q", "reward": reward, "success": None if reward is None else reward > 0,
        "termination": Termination.ANSWERED, "messages": messages, "input_ids": [1] * (1 + tokens), "agent": agent,
        "action_mask": [False] + [True] * tokens, "logprobs": [float("nan")] + [-0.5] * tokens,
        "n_action_tokens": tokens, **more,
    }  # fmt: skip
    return Trajectory.model_validate(given)


def advantages(rows: list[Trajectory], credit: str) -> list[float]:
    return [round(value, 6) for value in assign(RLOO(credit=credit), rows).advantages]  # type: ignore[arg-type]


def test_joint_advantages_count_an_episode_once() -> None:
    """Three episodes with the rewards 1, 0 and 0: each has its reward less the mean of the two others, 1, -1/2, -1/2,
    and both of its agents have that. Counted as six rows, the first would have 1 - 1/5 = 0.8."""
    rows = [
        row(f"e{number}.{segment}" if segment else f"e{number}", agent, reward, episode_id=f"e{number}",
            segment=segment)
        for number, reward in enumerate([1.0, 0.0, 0.0])
        for segment, agent in enumerate(["planner", "walker"])
    ]  # fmt: skip
    assert advantages(rows, "joint") == advantages(rows, "whole") == [1, 1, -0.5, -0.5, -0.5, -0.5]
    assert Team().credited(rows) == rows


def test_marginal_advantages_compare_an_agent_with_its_alternatives_alone() -> None:
    """After the first words one of two walks succeeds, after the second both do. The walks have 1 - 0, 0 - 1 and twice
    1 - 1; the words have the means 1/2 and 1, so 1/2 - 1 and 1 - 1/2."""
    team = Team(acts=2)
    assert team.rollouts(2) == 6
    spoken = [attempt.index for attempt in team.attempts(TASK, "g", [], 6)]
    words = [row(f"r{index}", "planner", None) for index in spoken]
    acts = team.attempts(TASK, "g", words, 6)
    assert [attempt.index for attempt in acts] == [2, 3, 4, 5]
    heard = [attempt.hint.format(answer="none") for attempt in acts]
    assert heard == [f"planner: r{number} {{so}}" for number in (0, 0, 1, 1)], "braces are no template"
    walks = [
        row(f"r{attempt.index}", "main", reward) for attempt, reward in zip(acts, [1.0, 0.0, 1.0, 1.0], strict=True)
    ]
    made = team.credited([*words, *walks])
    assert team.attempts(TASK, "g", made, 6) == []
    assert [(each.agent, each.group_id, each.reward) for each in made] == [
        ("planner", "g", 0.5), ("planner", "g", 1.0), ("walker", "r2", 1.0), ("walker", "r2", 0.0),
        ("walker", "r4", 1.0), ("walker", "r4", 1.0),
    ]  # fmt: skip
    for credit in ("whole", "fork_turn"):
        assert advantages(made, credit) == [-0.5, 0.5, 1, -1, 0, 0]
    metrics = by_agent(made, advantages(made, "whole"))
    assert metrics == {
        "credit_planner": pytest.approx(1 / 3), "credit_walker": pytest.approx(2 / 3),
        "surprise_planner": 0.5, "surprise_walker": 0.5,
    }  # fmt: skip


def test_words_after_which_nothing_was_scored_have_no_reward() -> None:
    failed = row("r0", "planner", None, termination=Termination.INFRA_ERROR)
    walks = [row(f"r{number}", "main", reward) for number, reward in ((2, 1.0), (3, 1.0), (4, None), (5, None))]
    made = Team(acts=2).credited([failed, row("r1", "planner", None), *walks])
    assert [each.reward for each in made[:2]] == [None, None]
    assert by_agent([failed], [0.0]) == {}
