"""What became of a row, what stages dropped that do not record it, and which calls failed."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from viewer_store import GRPO, Browser, make_store, publish, row

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.viewer.pages import calls, curation
from agentrl.schemas.manifest import Kind
from agentrl.schemas.trajectory import trajectory_id

POOL, REJECTED, CURATED, PAIRED, TUNED, CHOSEN = ("1" * 32, "2" * 32, "3" * 32, "4" * 32, "5" * 32, "6" * 32)
IDS = [trajectory_id("grpo", GRPO, number) for number in range(20)]
KEPT = [IDS[1], IDS[5]]
FROM_POOL = {"trajectories": [("pool", "trajectories", POOL)]}


def selection(ids: list[str]) -> tuple[Kind, pa.Table]:
    return Kind.TRAJECTORIES, pa.table({"trajectory_id": ids})


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    store = tmp_path_factory.mktemp("fate") / "store"
    make_store(store)
    catalog = Catalog(store)
    publish(catalog, "pool", POOL, "trajectories.gather", {"trajectories": selection(IDS)}, minutes=10)
    reject = {"trajectories": selection(KEPT)}
    publish(catalog, "reject", REJECTED, "trajectories.reject", reject, FROM_POOL, minutes=11, config={"keep": 1})
    dropped = pa.table({"trajectory_id": IDS[:15], "rule": ["dedup"] * 15, "source_id": [None] * 15})
    funnel = pa.table({"rule": ["dedup"], "before": [20], "after": [5], "dropped_examples": [[IDS[0]]]})
    tables = {"funnel": (Kind.TABLE, funnel), "dropped": (Kind.TABLE, dropped)}
    publish(
        catalog,
        "curated",
        CURATED,
        "trajectories.curate",
        {"trajectories": selection(IDS[15:]), **tables},
        FROM_POOL,
        minutes=12,
    )
    pair = pa.table({"pair_id": ["p1"], "chosen_id": [IDS[1]], "rejected_id": [IDS[2]]})
    publish(catalog, "pairs", PAIRED, "pairs.outcome", {"pairs": (Kind.PAIRS, pair)}, FROM_POOL, minutes=13)
    publish(catalog, "tuned", TUNED, "train.sft", {"model": (Kind.MODEL, Path.mkdir)}, FROM_POOL, minutes=14)
    where = {"where": "n_steps > 1", "rules": []}
    none = {"dropped": (Kind.TABLE, dropped.slice(0, 0)), "funnel": (Kind.TABLE, funnel.slice(0, 0))}
    publish(
        catalog,
        "chosen",
        CHOSEN,
        "trajectories.select",
        {"trajectories": selection(IDS[2:]), **none},
        FROM_POOL,
        minutes=15,
        config=where,
    )
    return Browser(store)


def fate(browser: Browser, number: int) -> list[tuple[str, str, str, str | None]]:
    seen = browser.json(f"/api/rows/{IDS[number]}/fate")["seen"]
    return [(event["artifact"].partition("/")[0], event["what"], event["why"], event["pair_id"]) for event in seen]


def test_each_stage_that_saw_a_row_says_what_it_did(browser: Browser) -> None:
    assert fate(browser, 1) == [
        ("grpo", "made", "", None),
        ("pool", "kept", "", None),
        ("reject", "kept", "", None),
        ("curated", "dropped", "dedup", None),
        ("pairs", "chosen", "", "p1"),
        ("tuned", "left out", "no step of the training drew it", None),
        ("chosen", "dropped", "where n_steps > 1", None),
    ]
    assert fate(browser, 2)[3:6] == [
        ("reject", "dropped", "failed", None),
        ("curated", "dropped", "dedup", None),
        ("pairs", "rejected", "", "p1"),
    ]
    assert ("reject", "dropped", "unscored", None) in fate(browser, 6)
    best = "not among the best 1 of its task, or the same as one that is"
    assert ("reject", "dropped", best, None) in fate(browser, 3)
    assert ("curated", "kept", "", None) in fate(browser, 16)
    assert ("pairs", "left out", "it is a side of no pair", None) in fate(browser, 16)


def test_steps_of_the_training_that_made_a_row_are_named(browser: Browser) -> None:
    trained = browser.json(f"/api/rows/{IDS[4]}/fate")["seen"][1]
    assert (trained["what"], trained["steps"]) == ("trained", [0])
    assert browser.json("/api/rows/nothing/fate", 404)["field"] == "id"


def test_rejection_and_selections_are_curation_too(browser: Browser) -> None:
    funnels = {funnel["stage"]: funnel for funnel in browser.json("/api/curation")["funnels"]}
    assert set(funnels) == {"reject", "curated", "chosen"}
    reject = funnels["reject"]
    assert (reject["uses"], reject["kept"], reject["recorded"]) == ("trajectories.reject", 2, True)
    levels = {level["rule"]: level["before"] - level["after"] for level in reject["levels"]}
    assert sum(levels.values()) == 18
    assert levels["unscored"] == 2
    assert (reject["levels"][0]["before"], reject["levels"][-1]["after"]) == (20, 2)
    assert [level["rule"] for level in funnels["chosen"]["levels"]] == ["where n_steps > 1"]
    rows = browser.ask("/api/rows", among=f"reject/{REJECTED[:8]}", rule="failed")
    assert int(rows.headers["x-total"]) == levels["failed"]
    refused = browser.json("/api/rows", 404, among=f"reject/{REJECTED[:8]}", rule="none")
    assert refused["field"] == "rule"


@pytest.mark.parametrize(
    ("rule", "dropped", "kept", "worry"),
    [
        ("dedup", (40, 40), (10, 40), True),
        ("dedup", (40, 40), (38, 40), False),  # they succeed anyway
        ("dedup", (2, 2), (1, 3), False),  # chance explains that
        ("filter where=not success", (40, 40), (0, 40), False),  # it was asked for
        ("filter where=reward < 0.5", (40, 40), (0, 40), False),
    ],
)
def test_a_warning_is_where_a_rule_drops_successes_that_nobody_asked_it_to(
    rule: str, dropped: tuple[int, int], kept: tuple[int, int], worry: bool
) -> None:
    level = curation._level({"rule": rule, "before": 80, "after": 40}, *dropped, *kept)
    assert level.worry is worry


def test_calls_that_failed_are_listed_with_their_messages(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, untimed = browser.json("/api/calls", filter="stage = 'grpo'"), {"timed": 0, "seconds": 0.0, "median": None}
    assert (answer["rows"], answer["looked_at"], answer["unknown"]) == (20, 20, 0)
    assert answer["tools"] == [{"name": "add", "calls": 20, "answered": 20, "failed": 5, "rows": 20, **untimed}]
    assert [call["trajectory_id"] for call in answer["failed"]] == [IDS[number] for number in (16, 12, 8, 4, 0)]
    assert answer["failed"][0]["message"] == 2
    assert answer["failed"][0]["arguments"] == '{"x": 1}'
    assert answer["failed"][0]["answer"] == "error: no 16"
    monkeypatch.setattr(calls, "ROWS", 2)
    assert browser.json("/api/calls", filter="stage = 'grpo'")["looked_at"] == 2
    assert browser.json("/api/calls", filter="n_tool_calls = 0")["rows"] == 0


def test_an_answer_is_of_the_call_of_its_step(tmp_path: Path) -> None:
    """Ids of calls come again in later steps."""
    tools: dict[str, Any] = {}
    took: defaultdict[str, list[float]] = defaultdict(list)
    messages = [message.model_dump() for message in row(0).messages]
    again = [{**messages[1], "tool_calls": [{"id": "c1", "name": "find", "arguments": "{}"}]}, messages[2]]
    record = {"messages": messages + again, "message_seconds": [None, 1.0, 0.5, 2.0, 1.5, 0.25], "n_tool_errors": 2}
    calls._count(tools, took, [], record | {"trajectory_id": "r"})
    assert took == {"add": [0.5], "find": [0.25]}
    assert {name: dict(counts) for name, counts in tools.items()} == {
        "add": {"calls": 1, "answered": 1, "failed": 1, "rows": 1},
        "find": {"calls": 1, "answered": 1, "failed": 1, "rows": 1},
    }
