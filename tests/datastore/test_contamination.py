"""Rows that hold a held-out task are found wherever it stands in them, and no others."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.curation import curate as module
from agentrl.datastore.curation.contamination import HeldOut
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

HELD = "please cancel the second order of the customer called ann because the price was wrong"
SHORT = "who is ann"
OTHER = "book a flight to the city of the boss for tomorrow with one bag and a seat by the window"
STEPS = [("find", {"customer": "ann", "kind": "order", "number": 2}), ("cancel", {"order": "x-77-q", "why": "price"})]


def talk(number: int, *messages: Message, prompt: str = OTHER, **fields: Any) -> Trajectory:
    values: dict[str, Any] = {"task_id": f"t{number}", "prompt": prompt, "messages": list(messages)}
    return build(number, input_ids=[], action_mask=[], logprobs=[], **values | fields)


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def acting(*calls: tuple[str, dict[str, Any]], say: str = "", **fields: Any) -> Message:
    made = [ToolCall(id=str(n), name=name, arguments=json.dumps(given)) for n, (name, given) in enumerate(calls)]
    return Message(role=Role.ASSISTANT, content=say, tool_calls=made, **fields)


def left(folder: Path, rows: list[Trajectory], heldout: list[str] = [], **rule: Any) -> list[int]:  # noqa: B006
    buffer = TrajectoryBuffer(folder)
    buffer.append(rows, stage="rollout", fingerprint="f")
    rules = Rules.model_validate({"rules": [{"rule": "decontaminate"} | rule]}).rules
    return [int(name[-6:]) for name in curate(buffer, rules, heldout=heldout).ids.to_pylist()]


@pytest.mark.parametrize("held", [HELD, SHORT])
def test_a_held_out_question_is_found_in_every_part_of_a_conversation(tmp_path: Path, held: str) -> None:
    question = user(OTHER)
    answer = Message(role=Role.TOOL, content=held, tool_call_id="0")
    rows = [
        talk(0, question, acting(("find", {"city": "x"}))),
        talk(1, question, acting(say="which one?"), user(held.upper())),
        talk(2, question, acting(say=f"{held}?")),
        talk(3, question, acting(say="", reasoning=held)),
        talk(4, question, acting(("ask", {"other": {"texts": [1, held]}}))),
        talk(5, question, acting(("ask", {})), answer),
        talk(6, Message(role=Role.SYSTEM, content=held), question, acting(say="no")),
        talk(7, user(held), acting(say="no"), prompt=""),
        talk(8, question, acting(say="no"), prompt=""),
        talk(9, question, acting(say="no"), prompt=held),
    ]
    assert left(tmp_path, rows, [held]) == [0, 8]


def test_a_short_question_must_be_a_whole_text_and_a_long_one_may_be_within_one(tmp_path: Path) -> None:
    rows = [
        talk(0, user(OTHER), acting(say=f"I was asked {SHORT}, and I do not know")),
        talk(1, user(OTHER), acting(say=f"I was asked this: {HELD}. I do not know. {OTHER}")),
        talk(2, user(OTHER), acting(say="the price was wrong because ann called the customer: cancel order second")),
    ]
    assert left(tmp_path, rows, [SHORT, HELD]) == [0, 2]


def test_what_was_done_for_a_held_out_task_is_found_under_another_question(tmp_path: Path) -> None:
    rows = [
        talk(0, user(HELD), acting(*STEPS, say="it is done now"), prompt="", split="heldout"),
        talk(1, user(OTHER), acting(*STEPS, say="it is done now")),
        talk(2, user(OTHER), acting(STEPS[0], ("book", {"seat": "window", "bag": 1, "city": "the boss's"}))),
        talk(3, user(OTHER), acting(*STEPS, say="but more"), Message(role=Role.TOOL, content="ok", tool_call_id="1")),
    ]
    assert left(tmp_path / "1", rows) == [2]
    assert left(tmp_path / "2", rows, against=["question"]) == [1, 2, 3]
    assert left(tmp_path / "3", rows, against=["actions"], overlap=1.0) == [2, 3]
    with pytest.raises(StoreError, match="nothing to compare with"):
        left(tmp_path / "4", rows[1:])


def test_what_agents_say_in_every_task_and_short_actions_are_no_leak(tmp_path: Path) -> None:
    common = "I am done with all that you have asked me to do. Is there anything else that I can do for you?"
    rows = [
        talk(0, user(HELD), acting(say=common), prompt=HELD, split="test"),
        talk(1, user("cancel"), acting(say=common), prompt="cancel order 12 of the customer bob", split="test"),
        talk(2, user("yes?"), acting(say="four"), prompt="how many are two and two", split="test"),
        talk(3, user(OTHER), acting(say=common)),
        talk(4, user(OTHER), acting(say="four")),
    ]
    assert left(tmp_path, rows) == [3, 4]


def test_embeddings_see_the_first_message_of_rows_without_a_prompt(tmp_path: Path) -> None:
    turned = "the price was wrong because the customer called ann please cancel the second order"
    rows = [talk(0, user(turned), acting(say="no"), prompt=""), talk(1, user(OTHER), acting(say="no"))]
    assert left(tmp_path / "1", rows, [HELD]) == [0, 1]
    assert left(tmp_path / "2", rows, [HELD], cosine=0.7) == [1]


def test_texts_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 32)
    buffer = TrajectoryBuffer(tmp_path)
    splits = ["train", "heldout"]
    buffer.append(
        (talk(i, user(f"{HELD} {i}"), acting(say="x" * 20_000 + f" {i}"), split=splits[i % 2]) for i in range(400)),
        stage="rollout",
        fingerprint="f",
    )
    rules = Rules.model_validate({"rules": [{"rule": "valid_calls"}, {"rule": "decontaminate", "ngram": 2}]}).rules
    curate(buffer, rules)  # imports what it needs
    tracemalloc.start()
    try:
        kept = curate(buffer, rules).ids
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(kept) == 0
    assert peak < 4_000_000  # all of them take 8 MB


few = st.lists(st.sampled_from("abc"), max_size=7).map(" ".join)


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    result = text.split()
    return (
        {tuple(result[position : position + n]) for position in range(max(1, len(result) - n + 1))} if result else set()
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(few, max_size=3), st.lists(st.tuples(st.sampled_from("xyz"), few), max_size=4), few,
    st.lists(few, max_size=3), st.sampled_from([1, 2, 3]), st.sampled_from([0.3, 0.5, 1.0]),
)  # fmt: skip
def test_shares_are_those_of_sets_of_words(
    questions: list[str], actions: list[tuple[str, str]], own: str, texts: list[str], n: int, overlap: float
) -> None:
    heldout = HeldOut(n)
    for text in questions:
        heldout.add_question(text)
    for question, text in actions:
        heldout.add_actions(question, text)
    here, mine = set[tuple[str, ...]]().union(*(grams(text, n) for text in [own, *texts])), grams(own, n)
    done = [(question, grams(text, n)) for question, text in actions if len(text.split()) >= n]
    expected = any(len(grams(text, n) & here) >= overlap * len(grams(text, n)) for text in questions if text)
    expected |= bool(mine) and any(len(grams(text, n) & mine) >= overlap * len(mine) for text in questions if text)
    for question, item in done:
        others = set[tuple[str, ...]]().union(*(other for asked, other in done if asked != question))
        expected |= len((item - others) & here) >= overlap * len(item)
    assert heldout.in_conversation(own, texts, overlap) == expected
