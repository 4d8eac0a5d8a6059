import hashlib
from collections import Counter

import pytest
from architectures import POLICIES, lookup_tasks
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engines.base import Sampling
from agentrl.environments import load_environment
from agentrl.pipelines.methods.agentq.preferences import step_pairs, trajectory_pairs
from agentrl.rollouts.rationalize import is_grounded, strip_hint, with_hint
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.trajectory import Message, Role, Trajectory
from agentrl.statistics.intervals import wilson


def rollout(name: str, turns: list[list[int]], reward: float) -> Trajectory:
    """Prompt [0, 0], then turns with observation [9] between them."""
    ids, mask = [0, 0], [False, False]
    for number, turn in enumerate(turns):
        ids += ([9] if number else []) + turn
        mask += ([False] if number else []) + [True] * len(turn)
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="model", env="e", split="train", prompt="p",
        reward=reward, success=reward > 0, termination="answered", messages=[], tokenizer="k",
        n_tokens=len(ids), input_ids=ids, action_mask=mask, logprobs=[0.0] * len(ids),
    )  # fmt: skip


def test_step_pair_covers_the_first_differing_step_only() -> None:
    good, bad = rollout("a", [[1, 2], [3, 4], [5]], 1.0), rollout("b", [[1, 2], [3, 7], [6, 6]], 0.0)
    [pair] = step_pairs([good, bad], margin=0.5, limit=4)
    assert (pair.chosen_id, pair.rejected_id) == ("a", "b")
    assert pair.chosen_ids == [0, 0, 1, 2, 9, 3, 4]
    assert pair.rejected_ids == [0, 0, 1, 2, 9, 3, 7]
    assert pair.chosen_mask == pair.rejected_mask == [False] * 5 + [True] * 2
    assert pair.shared_prefix == 6
    assert (pair.chosen_reward, pair.rejected_reward) == (1.0, 0.0)


def test_the_value_of_a_step_is_the_mean_reward_through_it() -> None:
    rows = [
        rollout("a", [[1], [2]], 1.0),
        rollout("b", [[1], [3]], 0.0),
        rollout("c", [[4], [2]], 0.0),
        rollout("d", [[4], [5]], 0.0),
    ]
    pairs = step_pairs(rows, margin=0.25, limit=9)
    values = [(pair.chosen_id, pair.rejected_id, pair.chosen_reward, pair.rejected_reward) for pair in pairs]
    assert values == [("a", "b", 1.0, 0.0), ("a", "c", 0.5, 0.0)]
    assert step_pairs(rows, margin=0.75, limit=9) == pairs[:1]
    counts: Counter[str] = Counter()
    assert step_pairs(rows, margin=0.25, limit=1, counts=counts) == pairs[:1]
    assert counts == {"pairs_beyond_per_task": 1, "pairs_too_close": 1, "choices_without_value": 0}
    counts.clear()
    step_pairs(rows, margin=0.75, limit=9, counts=counts)
    assert +counts == {"pairs_too_close": 2}, "1 against 4, and 2 against 5 after 4"


def test_values_whose_intervals_overlap_make_a_pair_only_if_they_need_not_be_apart() -> None:
    rows = [rollout("a", [[1]], 1.0), rollout("b", [[2]], 0.0)]
    told = {"turn": 0, "token_start": 2, "token_end": 3, "v": 0.5, "n": 5, "by": "continuation", "policy": "k"}
    values = {
        (name, 0): StepValue(trajectory_id=name, q=q, low=low, high=high, **told)
        for name, q, low, high in (("a", 0.6, 0.2, 0.9), ("b", 0.4, 0.1, 0.8))
    }
    assert step_pairs(rows, 0.01, 9, values) == []
    [pair] = step_pairs(rows, 0.01, 9, values, apart=False)
    assert (pair.chosen_id, pair.chosen_reward, pair.rejected_reward) == ("a", 0.6, 0.4)
    assert step_pairs(rows, 0.3, 9, values, apart=False) == [], "by the margin all the same"
    counts: Counter[str] = Counter()
    assert step_pairs(rows, 0.01, 9, {("a", 0): values["a", 0]}, counts=counts) == []
    assert +counts == {"choices_without_value": 1}


def test_pairs_without_values_keep_their_bytes() -> None:
    """Values of steps came later: without them, pairs are what they were."""
    rows = [
        rollout("a", [[1], [2, 6]], 1.0),
        rollout("b", [[1], [3]], 0.0),
        rollout("c", [[4, 4], [2]], 0.25),
        rollout("d", [[4, 4], [5]], 0.0),
    ]
    text = "".join(pair.model_dump_json() for pair in step_pairs(rows, margin=0.125, limit=9))
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == "4c38a1b6b744a51f"


def test_turns_that_differ_in_length_only_are_different_choices() -> None:
    [pair] = step_pairs([rollout("a", [[1, 8]], 1.0), rollout("b", [[1, 2, 8]], 0.0)], margin=0.1, limit=1)
    assert pair.shared_prefix == 3
    assert sum(pair.chosen_mask) == 2
    assert sum(pair.rejected_mask) == 3


def test_equal_rollouts_and_equal_rewards_make_no_pair() -> None:
    assert step_pairs([rollout("a", [[1]], 1.0), rollout("b", [[1]], 0.0)], 0.1, 9) == []
    assert step_pairs([rollout("a", [[1]], 1.0), rollout("b", [[2]], 1.0)], 0.1, 9) == []


def test_trajectory_pairs_take_best_against_worst() -> None:
    rows = [rollout("a", [[1], [2]], 0.0), rollout("b", [[1]], 1.0), rollout("c", [[3, 3]], 1.0)]
    pairs = trajectory_pairs(rows, margin=0.5, limit=3)
    assert [(pair.chosen_id, pair.rejected_id) for pair in pairs] == [("b", "a")]
    assert pairs[0].chosen_mask == rows[1].action_mask
    assert pairs[0].rejected_mask == rows[0].action_mask, "observations stay masked"
    counts: Counter[str] = Counter()
    assert trajectory_pairs(rows, margin=0.5, limit=0, counts=counts) == []
    assert counts == {"pairs_beyond_per_task": 1}


def test_wilson_interval_against_published_numbers() -> None:
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_share(case: tuple[int, int]) -> None:
    low, high = wilson(*case)
    assert 0 <= low <= case[0] / case[1] <= high <= 1


def test_a_stripped_hint_leaves_no_trace_and_the_same_actions() -> None:
    policy, environment = POLICIES["qwen"](), load_environment("lookup")
    from agentrl.engines.transformers import TransformersEngine

    rollouts = RolloutRunner(policy, TransformersEngine(policy.model), environment, Sampling(max_tokens=80))
    tasks = lookup_tasks(8)
    hinted = rollouts.run([Attempt(t, 0, "({answer})") for t in tasks], 0, [f"h-{n}" for n in range(8)], "hinted")
    for task, run in zip(tasks, hinted, strict=True):
        opening = [Message(role=Role.USER, content=task.prompt)]
        assert run.messages[0].content == with_hint(opening, task, "({answer})")[0].content
        plain = strip_hint(run, task, "({answer})", policy.codec, "p")
        start = plain.action_mask.index(True)
        assert plain.input_ids[:start] == policy.codec.opening(opening, task.tools)
        assert plain.input_ids[start:] == run.input_ids[run.action_mask.index(True) :]
        assert plain.messages[0].content == task.prompt
        assert plain.parent_id == run.trajectory_id
        assert len(plain.input_ids) == len(plain.action_mask) == len(plain.logprobs)
        [span], [hint] = plain.spans, run.spans
        assert span.version == hint.version == policy.version
        assert plain.input_ids[span.start : span.end] == run.input_ids[hint.start : hint.end]
        assert sum(plain.action_mask[span.start : span.end]) == plain.n_action_tokens


def test_an_answer_that_no_tool_returned_is_not_grounded() -> None:
    [task] = lookup_tasks(1)
    assert not is_grounded(rollout("a", [[1]], 1.0), task)
