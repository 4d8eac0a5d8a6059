"""Words in the filter of the viewer: rows and facets of those that say them, and refusals."""

from pathlib import Path

import pytest
from viewer_store import Browser, row

from agentrl.datastore.buffer import TrajectoryBuffer
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
        ('"rows that match 0"', "there is no column 'rows that match 0'"),
        (" or ".join(f"matches(messages, 'w{number}')" for number in range(9)), "at most 8 texts"),
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


def test_a_filter_of_words_is_a_rule_of_curation(browser: Browser) -> None:
    rule = browser.json("/api/rule", filter="matches(messages, 'gift -Ann')")
    assert any("matches(messages, 'gift -Ann')" in str(value) for value in rule.values())
