"""Rollouts whose context is compressed: rows are what the engine saw, and an episode of several rows counts once."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.environments import load_environment
from agentrl.models.policy import Policy
from agentrl.online.observed import Observed
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.eto.outcome import outcome
from agentrl.pipelines.methods.fork.fork import fork
from agentrl.pipelines.parts.shards import Shards
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.evaluate import evaluate
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.pipelines.stages.online_log import OnlineLog
from agentrl.pipelines.stages.score import score
from agentrl.pipelines.stages.trajectories import SampleConfig, reject, sample
from agentrl.rollouts.runner import RolloutRunner
from agentrl.rollouts.segments import SUMMARY, by_episode, episode_of, firsts, name_of, whole
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Role, Termination, Trajectory
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs

LIMITS = {"max_turn_tokens": 24, "max_tokens": 120}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("compression"))


@pytest.fixture(scope="module")
def limit(warm: Model, tasks: Tasks) -> int:
    """Of a prompt: the longest one of a task, and a short step."""
    policy = Policy.load(warm.path)
    runner = RolloutRunner(policy, TransformersEngine(policy.model), load_environment("lookup"), Sampling())
    return max(len(policy.codec.opening(*opening)) for opening in runner.openings(tasks.read())) + 20


def sampled(harness: Harness, warm: Model, tasks: Tasks, limit: int, **compress: Any) -> Any:
    config = {"samples": 4, "sampling": {**LIMITS, "compress": {"limit": limit, **compress}}}
    return harness.run(sample, config, model=warm, tasks=tasks)


@pytest.mark.parametrize("by", ["drop", "schema", "summary"])
def test_each_answer_is_observed_in_one_segment(
    harness: Harness, warm: Model, tasks: Tasks, limit: int, by: str
) -> None:
    """The first one that has its tokens. If no summary was asked for, that is the segment after the one that the
    answer ended."""
    made = sampled(harness, warm, tasks, limit + 36 * (by == "schema"), by=by)
    tokenizer = Policy.load(warm.path).tokenizer
    seen = Observed({"tool": 1.0}, tokenizer.decode)
    later = 0
    for parts in by_episode(made["trajectories"].read()):
        without_tokens: set[str | None] = set()
        for part in parts:
            weights, answers = seen.weights(part), [message for message in part.messages if message.role is Role.TOOL]
            new = [
                answer
                for answer in answers
                if (answer.token_start or 0) > (part.action_mask.index(True) if part.segment else 0)
                or (answer.token_start is not None and answer.tool_call_id in without_tokens)
            ]
            later += sum(message.tool_call_id in without_tokens for message in new)
            texts = [token for token, weight in zip(part.input_ids, weights, strict=True) if weight]
            assert tokenizer.decode(texts) == "".join(message.content for message in new)
            without_tokens = {answer.tool_call_id for answer in answers if answer.token_start is None}
    assert (later > 0) == (by != "summary")
    assert seen.unplaced == 0


@pytest.mark.parametrize("by", ["drop", "schema", "summary"])
def test_rows_are_what_the_engine_saw(harness: Harness, warm: Model, tasks: Tasks, limit: int, by: str) -> None:
    made = sampled(harness, warm, tasks, limit + 16 * (by == "schema"), by=by)
    rows = made["trajectories"].read()
    episodes = by_episode(rows)
    assert len(episodes) == made.metrics["rows"] == 4 * len(tasks.read())
    assert made.metrics["segments"] == len(rows) > len(episodes)
    assert sum(row.scored_success() for row in firsts(rows)) / len(episodes) == pytest.approx(made.metrics["success"])
    policy = Policy.load(warm.path)
    asked = [
        TrainingRow(row_id="", unit=n, input_ids=row.input_ids, mask=row.action_mask, weights=[0.0] * row.n_tokens)
        for n, row in enumerate(rows)
    ]
    for row, scored in zip(rows, batch_logprobs(policy, TrainingRows.of(asked), 8192), strict=True):
        mask = np.array(row.action_mask)
        np.testing.assert_allclose(np.array(row.logprobs)[mask], scored[mask], atol=1e-4)
    for parts in episodes:
        name = parts[0].episode_id
        assert [row.trajectory_id for row in parts] == [name, *(f"{name}.{n}" for n in range(1, len(parts)))]
        assert {episode_of(row.trajectory_id) for row in parts} == {name}
        assert len({(row.reward, row.success, row.termination, row.final_state) for row in parts}) == 1
        assert json.loads(parts[0].sampling)["compress"]["by"] == by
        for row, after in zip(parts, [*parts[1:], None], strict=True):
            _check_segment(row, after, by, policy, json.loads(row.sampling)["compress"]["limit"])


def _check_segment(row: Trajectory, after: Trajectory | None, by: str, policy: Policy, limit: int) -> None:
    turns = [message for message in row.messages if message.role is Role.ASSISTANT]
    own = [text for text in turns if row.action_mask[text.token_start or 0]]
    sums_up = [
        message for message, before in zip(row.messages[1:], row.messages, strict=False) if before.name == SUMMARY
    ]
    assert all((message.token_start or 0) <= limit for message in own if message not in sums_up), "no longer prompt"
    assert row.n_steps == len(own) - len(sums_up), (
        "a summary is no step, and a turn that stands there again is another's"
    )
    calls = sum(len(message.tool_calls) for message in own if message not in sums_up)
    assert calls == row.n_tool_calls or row.termination is Termination.MAX_STEPS, "what was said last is not done"
    assert row.n_action_tokens == sum((message.token_end or 0) - (message.token_start or 0) for message in own), (
        "summaries too"
    )
    if after is None:
        return
    assert bool(sums_up) == (by == "summary")
    again = [
        message
        for message in after.messages
        if message.role is Role.ASSISTANT and not after.action_mask[message.token_start or 0]
    ]
    text = after.messages[0].content.partition("So far:\n")[2]
    if by == "summary":
        assert text == sums_up[0].content.strip()
    elif by == "drop":
        assert not text
    for message in again:  # the tokens that were sampled, not the message encoded anew
        ids = after.input_ids[message.token_start : message.token_end]
        assert any(ids == row.input_ids[old.token_start : old.token_end] for old in turns)
        assert message.reward is None


def test_an_evaluation_counts_attempts(harness: Harness, warm: Model, tasks: Tasks, limit: int) -> None:
    config = {**LIMITS, "samples": 2, "compress": {"limit": limit}}
    made = harness.run(evaluate, config, model=warm, tasks=tasks)
    rows = made["trajectories"].read()
    overall = {result["decoding"]: result for result in made["results"].table().to_pylist() if result["level"] == -1}
    number = len(tasks.read())
    assert (overall["sampled"]["attempts"], overall["greedy"]["attempts"]) == (2 * number, number)
    assert len(rows) > 3 * number
    scored = [whole(parts) for parts in by_episode(rows) if "sampled" in parts[0].tags]
    assert overall["sampled"]["successes"] == sum(row.scored_success() for row in scored)
    assert overall["sampled"]["steps"] == pytest.approx(np.mean([row.n_steps for row in scored]))
    assert overall["sampled"]["tokens"] == pytest.approx(np.mean([row.n_tokens for row in scored]))


def test_rejection_keeps_whole_episodes_and_pairs_leave_them_out(
    harness: Harness, warm: Model, tasks: Tasks, limit: int
) -> None:
    made = sampled(harness, warm, tasks, limit)["trajectories"]
    parts = Counter(row.episode_id for row in made.read())
    kept = harness.run(reject, {"keep": 4}, trajectories=[made])["trajectories"].read()
    assert any(row.segment for row in kept)
    for rows in by_episode(kept):
        assert len(rows) == parts[rows[0].episode_id]
    episodes: dict[str, set[str]] = {}
    for row in kept:
        episodes.setdefault(row.task_id, set()).add(row.episode_id)
    item = harness.run(reject, {"keep": 1}, trajectories=[made])["trajectories"].read()
    assert len(firsts(item)) == len(episodes) == len({row.task_id for row in item})
    paired = harness.run(outcome, trajectories=[made])
    assert paired.metrics["segments_left_out"] == sum(number for number in parts.values() if number > 1)


def test_a_score_is_that_of_the_whole_episode(harness: Harness, warm: Model, tasks: Tasks, limit: int) -> None:
    made = sampled(harness, warm, tasks, limit)["trajectories"]
    done = harness.run(score, {"rewards": [{"type": "exact"}]}, trajectories=[made], tasks=[tasks])
    result = {row["trajectory_id"]: row["success"] for row in done["scores"].table().to_pylist()}
    rows = made.read()
    assert set(result) == {row.trajectory_id for row in rows}
    assert {row.trajectory_id: row.success for row in rows} == result, "the answer stands in the last segment"
    assert done.metrics["rows"] == len(firsts(rows)) < len(rows)


def test_a_later_segment_is_not_continued(harness: Harness, warm: Model, tasks: Tasks, limit: int) -> None:
    made = sampled(harness, warm, tasks, limit)["trajectories"]
    with pytest.raises(ValueError, match="is a later segment of its episode"):
        harness.run(fork, {"k": 1}, trajectories=[made], tasks=[tasks], model=warm)


def test_an_online_run_learns_from_episodes(harness: Harness, warm: Model, tasks: Tasks, limit: int) -> None:
    config = {
        "iterations": 2, "tasks": 3, "samples": 4, "updates": 2, "optimizer": {"lr": 1e-3}, "checkpoints": {"last": 0},
        "compress": {"limit": limit, "segments": 2}, **LIMITS,
    }  # fmt: skip
    made = harness.run(online, config, model=warm, tasks=tasks)
    rows = {row.trajectory_id: row for row in made["trajectories"].read()}
    assert sum(item["rows"] for item in made["coverage"].table().to_pylist()) == 24 == len(firsts(rows.values()))
    assert len(rows) > 24
    advantages: dict[str, set[float]] = {}
    steps = made["steps"].table().to_pylist()
    assert {step["trajectory_id"] for step in steps} == set(rows)
    for entry in steps:
        row = rows[entry["trajectory_id"]]
        if row.n_action_tokens:
            advantages.setdefault(row.episode_id, set()).add(round(entry["advantage"], 9))
        assert not (entry["trained"] and row.termination is Termination.MAX_CONTEXT)
    assert all(len(each) == 1 for each in advantages.values())
    assert any(row.termination is Termination.MAX_CONTEXT for row in rows.values())
    for number, metric in enumerate(made["metrics"].table().to_pylist()):
        mine = firsts(row for row in rows.values() if row.policy_version == number)
        assert metric["success"] == pytest.approx(np.mean([row.scored_success() for row in mine]))
        assert (metric["out_of_context"] or 0) == sum(row.termination is Termination.MAX_CONTEXT for row in mine)
        for group in {row.group_id for row in mine}:
            mean = np.mean([next(iter(advantages[row.episode_id])) for row in mine if row.group_id == group])
            assert mean == pytest.approx(0, abs=1e-6), "over episodes, not over rows"
    batches = made["batches"].table().to_pylist()
    places = {(batch["step"], batch["iteration"], batch["row_id"]) for batch in batches}
    updates = {row: step for step, _, row in places}
    assert all(updates[name] == updates[episode_of(name)] for name in updates if episode_of(name) in updates)


def test_a_killed_run_goes_on_with_whole_episodes(
    harness: Harness, warm: Model, tasks: Tasks, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"samples": 2, "shard_tasks": 3, "sampling": {**LIMITS, "compress": {"limit": limit}}}
    config = SampleConfig.model_validate(asked)

    def run(context: Context) -> list[Trajectory]:
        made: Any = sample(context, config, tasks=tasks, model=warm)
        return list(made["trajectories"].read())

    at_once = run(harness._context("at_once"))
    killed = harness._context("killed")
    append = Shards.append

    def dying(shards: Shards, rows: Any, shard: int) -> None:
        if shard:
            raise RuntimeError("killed")
        append(shards, rows, shard)

    with monkeypatch.context() as patched:
        patched.setattr(Shards, "append", dying)
        with pytest.raises(RuntimeError, match="killed"):
            run(killed)
    half = killed.row_ids()
    assert 0 < len(half) < len(at_once)
    resumed = run(killed)
    assert len(resumed) == len(at_once) > 12
    assert [row.input_ids for row in resumed] == [row.input_ids for row in at_once]
    assert [row.segment for row in resumed] == [row.segment for row in at_once]


def test_the_log_of_an_online_run_keeps_segments_together(
    harness: Harness, warm: Model, tasks: Tasks, limit: int
) -> None:
    made = by_episode(sampled(harness, warm, tasks, limit)["trajectories"].read())
    parts = next(rows for rows in made if len(rows) > 1)
    context = harness._context("log")
    name = context.trajectory_id(0)
    rows = [row.model_copy(update={"trajectory_id": name_of(name, row.segment), "episode_id": name}) for row in parts]
    OnlineLog(context).keep(rows)
    after_a_kill = OnlineLog(context)
    result = after_a_kill.under_way([name, context.trajectory_id(1)])
    assert {key: [row.trajectory_id for row in each] for key, each in result.items()} == {
        name: [row.trajectory_id for row in rows]
    }
    after_a_kill.append(result[name])
    after_another = OnlineLog(context)
    assert after_another.under_way([name]) == {}
    stored = after_another.stored([name, context.trajectory_id(1)])
    assert {key: [row.input_ids for row in each] for key, each in stored.items()} == {
        name: [row.input_ids for row in rows]
    }


@pytest.mark.parametrize(
    ("compress", "message"),
    [
        ({"limit": 100}, "set compress.limit to 96 or less"),
        ({"limit": 90, "by": "summary"}, "set compress.limit to 72 or less"),
        ({"limit": 32}, "set compress.limit to"),
    ],
)
def test_a_limit_that_cannot_work_is_refused(
    harness: Harness, warm: Model, tasks: Tasks, compress: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sampled(harness, warm, tasks, **compress)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"type": "ppo"}, "ppo values one row"),
        ({"type": "grpo", "credit": "subgoal"}, "credit: subgoal compares whole rows"),
        ({"type": "grpo", "overlong": {"limit": 9}}, "overlong punishes rows"),
    ],
)
def test_algorithms_that_look_at_one_row_are_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OnlineConfig.model_validate({"algorithm": algorithm, "compress": {"limit": 64}})


def test_an_engine_without_tokens_is_refused() -> None:
    engine = {"type": "openai", "base_url": "http://127.0.0.1:1", "model": "m"}
    with pytest.raises(ValidationError, match="compress counts tokens"):
        SampleConfig.model_validate({"engine": engine, "sampling": {"compress": {"limit": 64}}})
