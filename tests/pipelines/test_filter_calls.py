"""Toolformer's filter: weights and losses by hand, what a row looks like without a call, and which calls are cut."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.chat.codec import encode, tokenize
from agentrl.environments import load_environment
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.methods.toolformer.calls import (
    AnsweredTurn,
    CallLocation,
    UnclearError,
    gain,
    locations,
    token_weights,
    weighted_loss,
)
from agentrl.pipelines.methods.toolformer.deciding import FilteredRow
from agentrl.pipelines.methods.toolformer.filter_calls import filter_calls
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, ToolCall, Trajectory
from agentrl.training import scoring

TASKS = load_environment("lookup").tasks({"train": 6}, 0)["train"]


def turn(*calls: tuple[str, str], content: str = "", tool: str = "find") -> Message:
    """A turn that asks for facts, (who, relation)."""
    asked = [
        ToolCall(id=f"{who}-{relation}", name=tool, arguments=json.dumps({"who": who, "rel": relation}))
        for who, relation in calls
    ]
    return Message(role=Role.ASSISTANT, content=content, tool_calls=asked)


def asking(task: Task, name: str, turns: Sequence[Message], answer: bool = True) -> Trajectory:
    """A row of a task in which these turns are answered truly, and then the task is."""
    facts = json.loads(task.metadata)
    row = demonstrate(load_environment("lookup"), task, 0.0, 0, name)
    messages = row.messages[:1]
    for spoken in turns:
        messages = [*messages, spoken]
        for call in spoken.tool_calls:
            asked = call.parsed()
            content = facts["facts"][asked["who"]][asked["rel"]]
            messages.append(Message(role=Role.TOOL, content=content, tool_call_id=call.id, name=call.name, error=False))
    messages += [row.messages[-1]] * answer
    calls, steps = sum(len(spoken.tool_calls) for spoken in turns), len(turns) + answer
    return row.model_copy(
        update={"messages": messages, "n_tool_calls": calls, "n_steps": steps, "message_seconds": None}
    )


def path(task: Task) -> list[tuple[str, str]]:
    """The calls that a task takes."""
    metadata = json.loads(task.metadata)
    calls, who = [], metadata["start"]
    for relation in metadata["relations"]:
        calls.append((who, relation))
        who = metadata["facts"][who][relation]
    return calls


def idle(task: Task) -> tuple[str, str]:
    """A call that a task does not take."""
    metadata = json.loads(task.metadata)
    return metadata["start"], next(name for name in ("dish", "city") if name not in metadata["relations"])


def planted(task: Task, name: str) -> Trajectory:
    """The calls of a task, each after one that it does not take."""
    return asking(task, name, [turn(call) for needed in path(task) for call in (idle(task), needed)])


ROWS = [planted(task, f"r-{number}") for number, task in enumerate(TASKS)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy([row.messages for row in ROWS], 0)


@pytest.fixture
def harness(tmp_path: Any) -> Harness:
    return Harness(tmp_path)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """Probabilities of a policy that copies: its next turn costs 3 nats a token, or next to nothing if what it names
    stands in the question or in an answer of a tool before it."""

    def logprobs(_: Any, rows: Any) -> list[np.ndarray]:
        results = []
        for ids, mask in zip(*(rows.table()[name].to_pylist() for name in ("input_ids", "mask")), strict=True):
            first = mask.index(True)
            text, spoken = policy.tokenizer.decode(ids[:first]), policy.tokenizer.decode(ids[first:])
            word = spoken.split('"who": "')[1].split('"')[0] if '"who": "' in spoken else spoken.split("<|im_end|>")[0]
            results.append(
                np.where(mask, -0.01 if f"<tool_response>{word}<" in text or f"of {word}?" in text else -3, 0)
            )
        return results

    monkeypatch.setattr(scoring, "batch_logprobs", logprobs)


def run(
    harness: Harness, policy: Policy, rows: Sequence[Trajectory], tasks: Sequence[Task] = (), **config: Any
) -> Result:
    wired = {"tasks": [harness.tasks(tasks)]} if tasks else {}
    return harness.run(
        filter_calls, {"tools": ["find"], "decay": 0.05, **config},
        trajectories=[harness.trajectories(rows)], model=harness.model(policy.save), **wired,
    )  # fmt: skip


def test_weights_and_losses_by_hand() -> None:
    assert token_weights(9, 0.2) == pytest.approx([1 / 3, 0.8 / 3, 0.6 / 3, 0.4 / 3, 0.2 / 3])
    assert token_weights(2, 0.2) == pytest.approx([1 / 1.8, 0.8 / 1.8])
    assert token_weights(3, 1) == [1]
    assert token_weights(4, 0) == [0.25] * 4
    assert weighted_loss([-3, -1.5, 0, 0, 0, -100], 0.2) == pytest.approx((3 + 0.8 * 1.5) / 3)
    assert gain(1.0, 2.5, 2.0) == 1.0, "beside the better of no call and no answer"
    assert gain(1.0, 0.5, 2.0) == -0.5


@given(st.integers(1, 200), st.floats(0, 1))
def test_weights_are_a_mean_that_falls(count: int, decay: float) -> None:
    weights = token_weights(count, decay)
    assert 1 <= len(weights) <= count
    assert sum(weights) == pytest.approx(1)
    assert weights == sorted(weights, reverse=True)
    assert weighted_loss([-2.0] * count, decay) == pytest.approx(2.0)


def test_a_row_without_a_call_is_the_row_that_was_written_without_it(policy: Policy) -> None:
    row = tokenize(ROWS[0], policy.codec, policy.tokenizer_fingerprint)
    assert locations(row) == [CallLocation(number, 0) for number in range(1, len(row.messages) - 1, 2)]
    answered = AnsweredTurn.of(row, CallLocation(1, 0), policy.codec)
    assert answered is not None
    cut = answered.cut(policy.codec)
    needed = asking(TASKS[0], "x", [turn(call) for call in [*path(TASKS[0])[:1], *_rest(TASKS[0])]])
    ids, mask, messages = encode(policy.codec, needed.messages, row.tools)
    assert (cut.input_ids, cut.action_mask, cut.messages) == (ids, mask, messages)
    assert (cut.n_tool_calls, cut.n_steps, cut.n_tokens) == (row.n_tool_calls - 1, row.n_steps - 1, len(ids))
    assert all(map(math.isnan, cut.logprobs))
    three = answered.variants(policy.codec, 0.2)
    assert three is not None
    follows = [
        [token for token, counts in zip(variant.input_ids, variant.mask, strict=True) if counts] for variant in three
    ]
    following = row.messages[3].token_start
    assert following is not None
    assert follows == [row.input_ids[following : following + 5]] * 3, "the next five tokens of the policy's own"
    assert policy.tokenizer.decode(three.unanswered.input_ids).count("<tool_response></tool_response>") == 1
    assert len(three.given.input_ids) == following + 5


def _rest(task: Task) -> list[tuple[str, str]]:
    return [call for needed in path(task)[1:] for call in (idle(task), needed)]


def test_one_of_parallel_calls_is_left_out_alone(policy: Policy) -> None:
    task = TASKS[0]
    row = tokenize(
        asking(task, "p", [turn(path(task)[0], idle(task), content="Both."), *map(turn, path(task)[1:])]),
        policy.codec, policy.tokenizer_fingerprint,
    )  # fmt: skip
    assert locations(row)[:2] == [CallLocation(1, 0), CallLocation(1, 1)]
    answered = AnsweredTurn.of(row, CallLocation(1, 1), policy.codec)
    assert answered is not None
    cut = answered.cut(policy.codec)
    needed = asking(task, "x", [turn(path(task)[0], content="Both."), *map(turn, path(task)[1:])])
    assert (cut.input_ids, cut.action_mask, cut.messages) == encode(policy.codec, needed.messages, row.tools)
    assert (cut.n_tool_calls, cut.n_steps) == (row.n_tool_calls - 1, row.n_steps)


def test_a_turn_that_was_answered_otherwise_is_unclear(policy: Policy) -> None:
    row = tokenize(ROWS[0], policy.codec, policy.tokenizer_fingerprint)
    others = [*row.messages]
    others[2] = others[2].model_copy(update={"tool_call_id": "another"})
    with pytest.raises(UnclearError, match="r-0 does not have one answer to each call of a turn"):
        AnsweredTurn.of(row.model_copy(update={"messages": others}), CallLocation(1, 0), policy.codec)


@pytest.mark.usefixtures("copying")
def test_what_does_not_help_is_cut_and_what_helps_stays(harness: Harness, policy: Policy) -> None:
    made = run(harness, policy, ROWS, TASKS)
    chosen = made["trajectories"].read()
    helpful = sum(len(path(task)) for task in TASKS)
    assert made.metrics["calls"] == 2 * helpful
    assert (made.metrics["helps"], made.metrics["cut"], made.metrics["rows_cut"]) == (helpful, helpful, len(ROWS))
    for old, new, task in zip(ROWS, chosen, TASKS, strict=True):
        calls = [call.parsed() for message in new.messages for call in message.tool_calls]
        assert calls == [{"who": who, "rel": relation} for who, relation in path(task)]
        assert (new.parent_id, new.source, new.tags) == (old.trajectory_id, "calls_cut", [f"calls_cut:{len(calls)}"])
        assert new.episode_id == new.trajectory_id != old.episode_id
        assert (new.success, new.reward) == (True, old.reward)
        assert json.loads(new.final_state)["subgoals"] == list(range(len(calls))), "numbers of calls, by the replay"
    table = made["calls"].table().to_pylist()
    first = [line for line in table if line["trajectory_id"] == "r-0"]
    assert [(line["turn"], line["kept"]) for line in first] == [(n, n % 2 == 1) for n in range(2 * len(path(TASKS[0])))]
    assert all(line["reason"] == ("helps" if line["kept"] else "no_help") for line in table)
    for line in table:
        lowest = min(line["loss_without"], line["loss_unanswered"])
        assert line["gain"] == pytest.approx(lowest - line["loss"], abs=1e-6)


@pytest.mark.usefixtures("copying")
def test_of_equal_calls_one_stays(harness: Harness, policy: Policy) -> None:
    task = TASKS[0]
    row = asking(task, "twice", [turn(call) for call in [path(task)[0], *path(task)]])
    row.messages[1] = row.messages[1].model_copy(
        update={"tool_calls": [row.messages[1].tool_calls[0].model_copy(update={"id": "a"})]}
    )
    row.messages[2] = row.messages[2].model_copy(update={"tool_call_id": "a"})
    made = run(harness, policy, [row])
    kept = [line["kept"] for line in made["calls"].table().to_pylist()]
    assert kept == [True, False, *[True] * (len(path(task)) - 1)], "the last one is looked at first"
    [new] = made["trajectories"].read()
    assert "subgoals" not in json.loads(new.final_state), "numbers of calls, which no replay has told"


def test_a_low_tau_passes_all_rows_on_as_they_are(harness: Harness, policy: Policy) -> None:
    with pytest.warns(UserWarning, match="all of the .* calls that were looked at help by tau -1e"):
        made = run(harness, policy, ROWS, tau=-1e9)
    assert made["trajectories"].ids() == [row.trajectory_id for row in ROWS]
    stored = harness.buffer.get_many([row.trajectory_id for row in ROWS])
    assert made["trajectories"].read() == stored
    assert made.metrics["rows_cut"] == made.metrics["cut"] == 0


def test_calls_that_are_not_looked_at_stay_and_are_counted(harness: Harness, policy: Policy) -> None:
    task = TASKS[0]
    no_call = asking(task, "none", [])
    ends = asking(task, "ends", [turn(path(task)[0])], answer=False)
    writes = asking(task, "writes", [turn(path(task)[0], tool="write")])
    judge = ROWS[1].model_copy(update={"tags": [NOT_TRAINED]})
    parts = [
        ROWS[number].model_copy(update={"episode_id": "long", "segment": number - 2, "trajectory_id": f"part-{number}"})
        for number in (2, 3)
    ]
    rows = [no_call, ends, writes, judge, *parts]
    with pytest.warns(UserWarning, match="no call was looked at: kept other_tool 1, nothing_follows 1; tools: find"):
        made = run(harness, policy, rows, tau=5)
    assert made["trajectories"].ids() == [row.trajectory_id for row in rows]
    expected = {"other_tool": 1, "nothing_follows": 1, "not_trained": 1, "part_of_episode": 2, "kept": 2, "cut": 0}
    assert {name: made.metrics[name] for name in expected} == expected


@pytest.mark.usefixtures("copying")
def test_a_row_that_is_not_answered_as_before_stays_whole(harness: Harness, policy: Policy) -> None:
    facts = json.loads(TASKS[0].metadata)
    who, relation = path(TASKS[0])[-1]
    facts["facts"][who][relation] = "otherwise"
    other = TASKS[0].model_copy(update={"metadata": json.dumps(facts)})
    with pytest.warns(UserWarning, match="see whether find only read"):
        made = run(harness, policy, ROWS[:1], [other])
    assert made["trajectories"].ids() == ["r-0"]
    assert made.metrics["replays_diverged"] == 1
    assert made.metrics["not_replayed"] > 0 == made.metrics["cut"]


def test_the_policys_own_probabilities_decide(harness: Harness, policy: Policy) -> None:
    """Without any double: the table's losses are those of the model on these tokens."""
    with pytest.warns(UserWarning, match="help by tau"):
        made = run(harness, policy, ROWS[:1], tau=-1e9, decay=0.2)
    last = made["calls"].table().to_pylist()[-1]
    row = tokenize(ROWS[0], policy.codec, policy.tokenizer_fingerprint)
    answered = AnsweredTurn.of(row, locations(row)[-1], policy.codec)
    assert answered is not None
    three = answered.variants(policy.codec, 0.2)
    assert three is not None
    import torch

    for name, variant in zip(("loss", "loss_without", "loss_unanswered"), three, strict=True):
        ids = torch.tensor([variant.input_ids])
        with torch.no_grad():
            logp = policy.model(ids).logits[0, :-1].log_softmax(-1)
        of_ids = logp.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        own = [value for value, counts in zip(of_ids, variant.mask[1:], strict=True) if counts]
        assert last[name] == pytest.approx(weighted_loss(own, 0.2), abs=1e-4)


def test_rows_that_are_measured_on_are_refused(harness: Harness, policy: Policy) -> None:
    with pytest.raises(ValueError, match="1 of 1 rows are not of the train split, r-0 is of 'heldout'"):
        run(harness, policy, [ROWS[0].model_copy(update={"split": "heldout"})])


@pytest.mark.parametrize(
    "config", [{}, {"tools": []}, {"tools": ["find"], "decay": 1.5}, {"tools": ["find"], "tau": math.nan}]
)
def test_bad_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        filter_calls.config.model_validate(config)


def test_turns_are_numbered_as_in_all_tables(policy: Policy) -> None:
    """Those that a conversation opens with are none."""
    row = tokenize(ROWS[0], policy.codec, policy.tokenizer_fingerprint)
    shown = Message(role=Role.ASSISTANT, content="Yes?")
    opened = row.model_copy(update={"messages": [shown, *row.messages]})
    lines = []
    for given_row in (row, opened):
        filtered = FilteredRow.of(given_row, ["find"])
        for location in locations(given_row):
            filtered.note(location, "helps")
        lines.append([line["turn"] for line in filtered.lines()])
    assert lines[0] == lines[1] == list(range(len(lines[0])))
