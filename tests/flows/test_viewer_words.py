"""Words in the filter of the viewer: rows and facets of those that say them, and refusals."""

from pathlib import Path

import pytest
from viewer_store import Browser, row

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.pages import rows as excerpts
from agentrl.flows.viewer.query import tables
from agentrl.schemas.trajectory import Message

pytest.importorskip("tantivy")
SAYINGS = ["a refund for Ann", "Bob's gift card", "the gift of Ann", "nothing"]


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    rows = [row(number, messages=[Message(role="user", content=text)]) for number, text in enumerate(SAYINGS)]
    TrajectoryBuffer(tmp_path).append(rows, stage="grpo", fingerprint="a" * 32)
    return Browser(tmp_path)


@pytest.mark.parametrize(
    ("asked", "total"),
    [
        ("matches(messages, 'Ann')", 2),
        ("not matches(messages, 'Ann')", 2),
        ("matches(messages, 'Ann') and matches(messages, 'gift')", 1),
        ("matches(messages, '\"gift card\" -Ann') or trajectory_id = 'matches(messages, ''Ann'')'", 1),
        ("matches(messages, 'Bob''s')", 1),
        ("Ann", 2),
        ('"gift card"', 1),
        ("gift -Ann", 1),
        ("gift and Ann and n_steps >= 0", 1),
        ("n_steps between 0 and 9 and gift", 2),
        ("refund for ann", 1),
        ("zebra", 0),
    ],
)
def test_a_filter_finds_rows_by_their_words(browser: Browser, asked: str, total: int) -> None:
    assert browser.ask("/api/rows", filter=asked).headers["x-total"] == str(total)
    assert browser.json("/api/facets", filter=asked)["filtered"] == total


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("matches(messages, '\"x')", "lacks its closing"),
        ("matches(prompt, 'x')", "matches takes the column messages and one text"),
        ("matches(messages, read_csv('x'))", "matches takes the column messages and one text"),
        ('"rows that match 0" = 1', "there is no column 'rows that match 0'"),
        (" or ".join(f"matches(messages, 'w{number}')" for number in range(9)), "at most 8 texts"),
        ("sucess", "did you mean 'success'? To search for the word, write matches(messages, 'sucess')"),
        ("x" * 5000, "at most 4,000"),
    ],
)
def test_what_cannot_be_asked_is_refused(browser: Browser, asked: str, reason: str) -> None:
    refused = browser.json("/api/rows", 400, filter=asked)
    assert reason in refused["error"]
    assert refused["field"] == "filter"


def test_rows_that_would_take_long_to_read_are_left_to_the_command(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "READ_AT_ONCE", 3)
    refused = browser.json("/api/rows", 409, filter="matches(messages, 'Ann')")
    assert refused["error"] == "the full-text index lacks 4 rows, which take a while to read"
    assert refused["next"].startswith("agentrl buffer index --text --store ")


def test_rows_say_where_the_words_stand(browser: Browser) -> None:
    answer = browser.ask("/api/rows", filter="ann and gift")
    assert answer.headers["x-words"] == '["ann", "gift"]'
    rows = browser.arrow("/api/rows", filter="ann and gift", columns="env")
    assert rows["match"].to_pylist() == ["user: the gift of Ann"]
    assert rows["match_message"].to_pylist() == [0]
    assert "match" not in browser.arrow("/api/rows", filter="n_steps >= 0").column_names


def test_an_excerpt_is_found_whole_in_any_case_and_cut() -> None:
    pattern = excerpts.pattern_of(["gift card", "ann"])
    call = {"name": "give", "arguments": '{"to": "ANN"}'}
    said_by_a_tool = {
        "role": "tool",
        "content": "x" * 90 + " Gift-Card " + "y" * 300,
        "reasoning": None,
        "tool_calls": [],
    }
    calling = {"role": "assistant", "content": "", "reasoning": "Annual", "tool_calls": [call]}
    assert excerpts.excerpt([calling], pattern) == ('assistant: give {"to": "ANN"}', 0)
    text, number = excerpts.excerpt([{**calling, "tool_calls": []}, said_by_a_tool], pattern) or ("", -1)
    assert number == 1
    assert text.startswith("tool: …")
    assert " Gift-Card " in text
    assert text.endswith("…")
    assert excerpts.excerpt([{**calling, "tool_calls": []}], pattern) is None
