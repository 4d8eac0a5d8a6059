"""Long rows as segments: nothing is trained on twice or lost, and no segment is longer than the limit."""

import math
from typing import Any

import pytest

from agentrl.chat.codec import tokenize
from agentrl.environments import load_environment
from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.compress.segment import segment
from agentrl.pipelines.stages.train import offline, sft
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.trajectory import Role, Trajectory

ENV = load_environment("rooms")


def walks(number: int = 16) -> list[Trajectory]:
    """Walks of up to twelve turns, of an expert that errs."""
    tasks = ENV.tasks({"train": number}, 0)["train"]
    return [demonstrate(ENV, task, 0.6, 1, f"w-{n:03d}") for n, task in enumerate(tasks)]


@pytest.fixture
def harness(tmp_path: Any) -> Harness:
    return Harness(tmp_path)


def said(row: Trajectory, policy: Any, trained: bool) -> list[str]:
    """The assistant's turns, as text of their tokens: those that are trained on, or the others."""
    turns = [message for message in row.messages if message.role is Role.ASSISTANT]
    assert all(turn.token_start is not None for turn in turns)
    return [
        policy.tokenizer.decode(row.input_ids[turn.token_start : turn.token_end])
        for turn in turns
        if row.action_mask[turn.token_start] == trained
    ]


@pytest.mark.parametrize(("by", "limit"), [("drop", 90), ("schema", 160)])
def test_segments_fit_and_train_each_turn_once(harness: Harness, by: str, limit: int) -> None:
    rows = walks()
    policy = tiny_policy([row.messages for row in rows], 0)
    whole = [tokenize(row, policy.codec, policy.tokenizer_fingerprint) for row in rows]
    sampled = [
        row.model_copy(update={"logprobs": [-0.5 if acted else math.nan for acted in row.action_mask]}) for row in whole
    ]
    given, model = harness.trajectories(sampled), harness.model(policy.save)
    made = harness.run(segment, {"limit": limit, "keep_last": 2, "by": by}, trajectories=[given], model=model)
    chosen = made["trajectories"].read()
    longer = [row for row in sampled if row.n_tokens > limit]
    assert made.metrics["cut"] == len(longer) > 3
    assert made.metrics["fitting"] == len(sampled) - len(longer)
    assert {row.trajectory_id for row in chosen if row.parent_id is None} == {
        row.trajectory_id for row in sampled if row.n_tokens <= limit
    }
    for old in longer:
        parts = [row for row in chosen if row.parent_id == old.trajectory_id]
        assert len(parts) > 1
        assert [row.segment for row in parts] == list(range(len(parts)))
        assert {row.episode_id for row in parts} == {old.episode_id}
        assert {(row.success, row.reward, row.source) for row in parts} == {(old.success, old.reward, "segmented")}
        assert all(row.n_tokens == len(row.input_ids) <= limit for row in parts)
        assert all(map(math.isnan, (logprob for row in parts for logprob in row.logprobs)))
        assert [turn for row in parts for turn in said(row, policy, True)] == said(old, policy, True)
        assert sum(row.n_action_tokens for row in parts) == old.n_action_tokens, "no token is counted twice"
        assert sum(row.n_steps for row in parts) == old.n_steps
        assert sum(row.n_tool_calls for row in parts) == old.n_tool_calls
        before = 0
        for row in parts[1:]:
            before += parts[row.segment - 1].n_steps
            shown = said(row, policy, False)
            assert shown == said(old, policy, True)[before - len(shown) : before], "the steps just before"
            calls = [call for message in row.messages for call in message.tool_calls]
            assert ("So far:" in row.messages[0].content) == (by == "schema" and len(calls) < old.n_tool_calls)
            assert row.messages[0].content.startswith(old.prompt)


@pytest.mark.slow
def test_segments_are_for_supervised_training_alone(harness: Harness) -> None:
    rows = walks()
    policy = tiny_policy([row.messages for row in rows], 0)
    given, model = harness.trajectories(rows), harness.model(policy.save)
    made = harness.run(segment, {"limit": 90}, trajectories=[given], model=model)
    config: dict[str, Any] = {"steps": 1, "batch": 4}
    trained = harness.run(sft, config, trajectories=[made["trajectories"]], model=model)
    assert trained.metrics["rows"] == len(made["trajectories"].ids()) > len(rows)
    config["algorithm"] = {"type": "reinforce++"}
    with pytest.raises(Exception, match="logprobs not finite"):
        harness.run(offline, config, trajectories=[made["trajectories"]], model=model)


def test_what_stands_for_steps_that_are_left_out_names_their_calls(harness: Harness) -> None:
    row = max(walks(), key=lambda row: row.n_steps)
    policy = tiny_policy([row.messages], 0)
    limit = int(0.75 * tokenize(row, policy.codec, policy.tokenizer_fingerprint).n_tokens)
    made = harness.run(
        segment, {"limit": limit, "keep_last": 0, "by": "schema"},
        trajectories=[harness.trajectories([row])], model=harness.model(policy.save),
    )["trajectories"].read()  # fmt: skip
    first = next(message for message in row.messages if message.tool_calls)
    answer = row.messages[row.messages.index(first) + 1]
    lines = made[1].messages[0].content.splitlines()
    assert lines[:3] == [row.prompt, "", "So far:"]
    assert lines[3] == f"go {first.tool_calls[0].arguments} -> {answer.content}"


def test_a_turn_that_was_not_trained_on_is_not_trained_on_in_a_segment(harness: Harness) -> None:
    row = max(walks(), key=lambda row: row.n_steps)
    policy = tiny_policy([row.messages], 0)
    whole = tokenize(row, policy.codec, policy.tokenizer_fingerprint)
    second = [message for message in whole.messages if message.role is Role.ASSISTANT][1]
    mask = [acted and position >= second.token_start for position, acted in enumerate(whole.action_mask)]
    fork = whole.model_copy(update={"action_mask": mask, "n_action_tokens": sum(mask)})
    made = harness.run(
        segment, {"limit": 80}, trajectories=[harness.trajectories([fork])], model=harness.model(policy.save)
    )["trajectories"].read()
    assert sum(row.n_action_tokens for row in made) == sum(mask)


def test_rows_that_are_measured_on_are_not_cut(harness: Harness) -> None:
    rows = [row.model_copy(update={"split": "heldout"}) for row in walks(2)]
    policy = tiny_policy([row.messages for row in rows], 0)
    with pytest.raises(ValueError, match="2 of 2 rows are not of the train split, w-000 is of 'heldout'"):
        harness.run(segment, {"limit": 90}, trajectories=[harness.trajectories(rows)], model=harness.model(policy.save))


def test_a_row_with_a_step_that_does_not_fit_is_left_out_and_counted(harness: Harness) -> None:
    rows = walks(8)
    policy = tiny_policy([row.messages for row in rows], 0)
    made = harness.run(
        segment, {"limit": 32}, trajectories=[harness.trajectories(rows)], model=harness.model(policy.save)
    )
    assert made.metrics["step_too_long"] > 3
    assert made.metrics["step_too_long"] + made.metrics["fitting"] == len(rows)
    assert len(made["trajectories"].ids()) == made.metrics["fitting"]
