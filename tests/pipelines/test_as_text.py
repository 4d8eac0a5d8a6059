"""Rows as texts: what they say, by examples made by hand, and how they become tokens."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.methods.agentfounder.as_text import as_text
from agentrl.pipelines.methods.agentfounder.texts import Decisions, plan, reason
from agentrl.pipelines.stages.train import sft
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

CALLS = {"boss": 'find {"who": "Ann", "rel": "boss"}', "pet": 'find {"who": "Ann", "rel": "pet"}'}


def row(name: str, rel: str, seen: str, answer: str, success: bool | None, **more: Any) -> Trajectory:
    """One call about Ann, and an answer."""
    call = ToolCall(id="0", name="find", arguments=json.dumps({"who": "Ann", "rel": rel}))
    messages = [
        Message(role=Role.USER, content="boss of Ann?"),
        Message(role=Role.ASSISTANT, tool_calls=[call]),
        Message(role=Role.TOOL, content=seen, tool_call_id="0", name="find"),
        Message(role=Role.ASSISTANT, content=answer),
    ]
    given = {"split": "train", "n_steps": 2, **more}
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="model", env="lookup", prompt="boss of Ann?",
        reward=None if success is None else float(success), success=success, termination="answered",
        messages=messages, **given,
    )  # fmt: skip


RIGHT, WRONG = row("r", "boss", "Bob", "Bob", True), row("w", "pet", "cat", "cat", False)
LATE = row("l", "boss", "Bob", "Ann", False, parent_id="r", n_steps=1)
"""A continuation of the first: the same call, and another answer."""


def test_first_order_texts_are_a_plan_and_a_conclusion() -> None:
    assert plan(RIGHT) == f"Task: boss of Ann?\nPlan:\nCall: {CALLS['boss']}"
    assert reason(RIGHT) == "Task: boss of Ann?\nKnown: Bob\nAnswer: Bob"


def test_a_decision_shows_what_others_did_in_its_states_and_what_became_of_it() -> None:
    """In the first state one row asked for the boss and one for the pet; the continuation shares the first call of its
    parent, which counts once. After it, one answered Bob, and the continuation Ann."""
    decisions = Decisions()
    for each in (RIGHT, WRONG, LATE):
        decisions.add(each)
    text = decisions.text(RIGHT, 4, Random(0))
    assert text is not None
    shown = [line.partition(": ")[2].removeprefix("Call: ") for line in text.splitlines() if line.startswith("Option")]
    first = shown.index(CALLS["boss"]) + 1
    second = shown[2:].index("Agent: Bob") + 1
    assert set(shown) == {*CALLS.values(), "Agent: Bob", "Agent: Ann"}
    told = {1: "1 1 of 1, 2 0 of 1", 2: "1 0 of 1, 2 1 of 1"}
    assert [line for line in text.splitlines() if not line.startswith("Option")] == [
        "Task: boss of Ann?",
        f"Choice: {first}", f"Call: {CALLS['boss']}", "Result: Bob", f"Outcome: {told[first]}",
        f"Choice: {second}", "Agent: Bob", f"Outcome: {told[second]}",
        "Verdict: right",
    ]  # fmt: skip
    other = str(decisions.text(WRONG, 4, Random(0))).splitlines()
    assert sum(line.startswith("Choice") for line in other) == 1, "nobody else came to its second state"
    assert other[-2:] == ["Agent: cat", "Verdict: wrong"]


def test_without_alternatives_there_is_no_decision() -> None:
    decisions = Decisions()
    decisions.add(RIGHT)
    assert decisions.text(RIGHT, 4, Random(0)) is None


def made(folder: Path, rows: list[Trajectory], **config: Any) -> Result:
    harness = Harness(folder)
    return harness.run(as_text, config, trajectories=[harness.trajectories(rows)])


def test_the_stage_makes_texts_of_whole_rows_and_counts_the_others(tmp_path: Path) -> None:
    rows = [RIGHT, WRONG, LATE, row("again", "boss", "Bob", "Bob", True), row("u", "pet", "cat", "cat", None)]
    result = made(tmp_path, rows)
    assert [text.tags for text in result["trajectories"].read()] == [
        ["plan"],
        ["reason"],
        ["decide"],
        ["decide"],
        ["decide"],
    ]
    counts = {"rows": 4, "whole": 3, "texts": 5, "plan": 1, "reason": 1, "decide": 3, "doubled": 2, "unscored": 1}
    assert {name: result.metrics[name] for name in counts} == counts
    [text] = made(tmp_path / "plan", rows, kinds=["plan"])["trajectories"].read()
    assert (text.source, text.parent_id, text.success) == ("text", "r", None)
    with pytest.raises(ValueError, match="no text is made of 1 rows"):
        made(tmp_path / "none", [WRONG])
    with pytest.raises(ValueError, match="not of the train split"):
        made(tmp_path / "held", [row("h", "boss", "Bob", "Bob", True, split="heldout")])


def test_plain_text_is_trained_on_whole_without_a_template(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    texts = harness.run(as_text, {"kinds": ["plan", "reason"]}, trajectories=[harness.trajectories([RIGHT])])
    result = harness.run(sft, {"model": {"init": "tiny"}, "steps": 1, "batch": 2}, trajectories=[texts["trajectories"]])
    rows = result["rows"].table().to_pylist()
    policy = tiny_policy([message.messages for message in texts["trajectories"].read()], 0)
    assert [policy.tokenizer.decode(each["input_ids"]) for each in rows] == [
        f"{plan(RIGHT)}<|im_end|>", f"{reason(RIGHT)}<|im_end|>"
    ]  # fmt: skip
    assert all(all(each["mask"]) for each in rows)
