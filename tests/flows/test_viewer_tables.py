"""The buffer's page: rows, filters, facets, versions, and what an attacker would type into the filter box."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viewer_store import Browser, make_store, row

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.query import filters, tables
from agentrl.flows.viewer.query.facets import FACETS, UNKNOWN, spread
from agentrl.flows.viewer.query.tables import COLUMNS
from agentrl.flows.viewer.wire import RefusedError


def test_what_several_ask_for_at_once_is_made_once() -> None:
    recent: tables.Recent[str, int] = tables.Recent(1)
    begun, done, made = threading.Event(), threading.Event(), []

    def make() -> int:
        begun.set()
        assert done.wait(10)
        made.append(1)
        return len(made)

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(recent.get_or, "key", make) for _ in range(4)]
        assert begun.wait(10)
        assert recent.get_or("other", lambda: 7) == 7, "another value is not waited for"
        done.set()
    assert [request.result() for request in asked] == [1] * 4
    assert list(recent) == ["key"]


def test_what_could_not_be_made_is_made_when_it_is_asked_for_again() -> None:
    recent: tables.Recent[str, float] = tables.Recent(1)
    with pytest.raises(ZeroDivisionError):
        recent.get_or("key", lambda: 1 / 0)
    assert recent.get_or("key", lambda: 2.0) == 2.0


def test_rows_are_a_page_of_scalar_columns(browser: Browser) -> None:
    answer = browser.ask("/api/rows", limit=5)
    assert (answer.headers["x-total"], answer.headers["x-version"]) == ("24", "3")
    page = browser.arrow("/api/rows", limit=5)
    assert page.schema.names == COLUMNS.names()
    kinds = {str(kind) for kind in page.schema.types}
    assert kinds == {"string", "int32", "int64", "double", "bool", "timestamp[ms, tz=UTC]"}
    assert page["trajectory_id"].to_pylist()[0].endswith("000019"), "the newest come first"


def test_only_the_columns_that_are_asked_for_are_read_and_sent(browser: Browser) -> None:
    answer = browser.ask("/api/rows", columns="reward,env", limit=2)
    page = browser.arrow("/api/rows", columns="reward,env", limit=2)
    assert page.schema.names == ["trajectory_id", "reward", "env"]
    assert answer.headers["x-columns"].split(",") == COLUMNS.names()
    refused = browser.json("/api/rows", 400, columns="reward,enw")
    assert (refused["field"], "did you mean 'env'" in refused["error"]) == ("columns", True)


def test_rows_are_sorted_filtered_and_turned(browser: Browser) -> None:
    page = browser.arrow("/api/rows", filter="success and stage = 'grpo'", sort="reward", desc="false", limit=3)
    assert page["reward"].to_pylist() == [0.1, 0.1, 0.3]
    assert page["trajectory_id"].to_pylist()[0] < page["trajectory_id"].to_pylist()[1], "equals stay in order"
    following = browser.arrow(
        "/api/rows", filter="success and stage = 'grpo'", sort="reward", desc="false", limit=3, offset=3
    )
    assert following["reward"].to_pylist() == [0.5, 0.5, 0.7]
    worst = browser.arrow("/api/rows", sort="success", desc="true", limit=1000)["success"].to_pylist()
    assert worst == sorted(worst, key=lambda value: (value is None, value is not True)), "what is unknown comes last"
    assert browser.ask("/api/rows", filter="env = 'none'").headers["x-total"] == "0"
    assert browser.arrow("/api/rows", filter="env = 'none'").num_rows == 0
    assert browser.arrow("/api/rows", offset=10_000).num_rows == 0


def test_a_text_is_cut_in_the_table_alone(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([row(0, prompt="é" * 5000)], stage="grpo", fingerprint="a" * 32)
    browser = Browser(tmp_path)
    [result] = browser.arrow("/api/rows").to_pylist()
    assert result["prompt"] == "é" * tables.TEXT
    assert browser.json(f"/api/rows/{result['trajectory_id']}")["row"]["prompt"] == "é" * 5000


def test_versions_of_the_past_stay(browser: Browser) -> None:
    assert browser.ask("/api/rows", at=1).headers["x-total"] == "10"
    assert browser.ask("/api/rows", at=2).headers["x-total"] == "20"
    assert browser.json("/api/facets", at=1)["total"] == 10
    assert browser.ask("/api/rows", at="2100-01-01T00:00").headers["x-total"] == "24"
    late = "grpo-aaaaaaaa-000019"
    assert browser.ask(f"/api/rows/{late}", at=1).status_code == 404
    assert browser.json(f"/api/rows/{late}", at=2)["version"] == 2
    for wrong in ("99", "-1", "yesterday", "1" * 30, "1; drop"):
        refused = browser.json("/api/rows", 404 if wrong.isdigit() else 400, at=wrong)
        assert refused["field"] == "at", wrong


def test_facets_count_all_rows_and_those_in_the_filter(browser: Browser) -> None:
    answer = browser.json("/api/facets", filter="success and stage = 'grpo'")
    assert [facet["column"] for facet in answer["facets"]] == list(FACETS)
    assert (answer["total"], answer["filtered"], answer["version"]) == (24, 9, 3)
    by_name = {facet["column"]: facet for facet in answer["facets"]}
    assert {bin_["label"]: (bin_["all"], bin_["filtered"]) for bin_ in by_name["success"]["bins"]} == {
        "true": (11, 9),
        "false": (11, 0),
        UNKNOWN: (2, 0),
    }
    stages = by_name["stage"]["bins"]
    assert [(stage["label"], stage["all"], stage["where"]) for stage in stages] == [
        ("grpo", 20, "stage = 'grpo'"),
        ("eval", 4, "stage = 'eval'"),
    ]


def test_each_bar_chooses_the_rows_that_it_counts(browser: Browser) -> None:
    for facet in browser.json("/api/facets")["facets"]:
        assert sum(bin_["all"] for bin_ in facet["bins"]) == 24, facet["column"]
        for bin_ in facet["bins"]:
            total = browser.ask("/api/rows", filter=bin_["where"]).headers["x-total"]
            assert int(total) == bin_["all"], (facet["column"], bin_)


@settings(max_examples=20)
@given(st.lists(st.none() | st.floats(-1e6, 1e6).map(lambda value: round(value, 3)), min_size=1, max_size=50))
def test_bins_of_numbers_hold_the_rows_of_their_filters(values: list[float | None]) -> None:
    column = pl.Series("reward", values, pl.Float64)
    result = spread(column)
    for (_, _, _, where), count in zip(result.bins, result.all, strict=False):
        chosen, _ = filters.expression(where, COLUMNS)
        assert column.to_frame().filter(chosen).height == count, where
    assert result.all.sum() == len(values)


@settings(max_examples=20)
@given(st.lists(st.none() | st.text(max_size=6), min_size=1, max_size=60))
def test_bins_of_texts_are_quoted(values: list[str | None]) -> None:
    column = pl.Series("env", values, pl.String)
    result = spread(column)
    for (_, _, _, where), count in zip(result.bins, result.all, strict=False):
        chosen, _ = filters.expression(where, COLUMNS)
        assert column.to_frame().filter(chosen).height == count, where
    assert len({value for value in values if value is not None}) == result.more + sum(
        bin_[0] != UNKNOWN for bin_ in result.bins
    )


# what an attacker types

SECRET = "root-of-all"


@pytest.fixture(scope="module")
def secret(store: Path) -> Path:
    path = store.parent / "secret.csv"
    path.write_text(f"{SECRET}\n1\n")
    return path


READS = [
    "level in (select x from read_csv('{path}'))",
    "level in (select {secret} from read_csv('{path}'))",
    "exists (select * from read_csv('{path}'))",
    "level in (select * from \"read_csv\"('{path}'))",
    "level in (select * from `read_csv`('{path}'))",
    "level in (SeLeCt * fRoM ReAd_CsV /**/ ('{path}'))",
    "level in (select * from read_csv -- \n ('{path}'))",
    "level = (select count(*) from \"READ_CSV\" ('{path}'))",
    "read_csv('{path}')",
    "\"read_csv\"('{path}')",
    "scan_csv('{path}') is not null",
    "level in (table read_csv('{path}'))",
    "level in (with x as (select * from read_csv('{path}')) select * from x)",
    "level in (values (1))",
    "level = any (select * from read_parquet('{path}'))",
    "level = 1 union select * from read_csv('{path}')",
    "level in (from read_csv('{path}'))",
    "level in (select * from '{path}')",
    'level in (select * from "{path}")',
    "level > 0; select * from read_csv('{path}')",
    "level > 0 -- read_csv",
    "level /* read_csv */ > 0",
    "$$a$$ = env",
    "E'\\'' = env or level in (select 1) or env = ''",
    "env = ''' or level in (select * from read_csv('{path}')) --'",
    "lower((select * from read_csv('{path}')))",
    "level in (ſelect x from read_csv('{path}'))",
    "level in (ſelect 1)",
    "level in (valueſ (1))",
    "level > 0 unıon ſelect 1",
    "level in (select\u00a0*\u00a0from\u00a0read_csv('{path}'))",
]


@pytest.mark.parametrize("attack", READS)
def test_a_filter_reads_no_file(browser: Browser, secret: Path, attack: str) -> None:
    refused = browser.ask("/api/rows", filter=attack.format(path=secret, secret=SECRET))
    assert refused.status_code == 400, refused.text
    assert refused.json()["field"] == "filter"
    if "{secret}" not in attack:
        assert SECRET not in refused.text
    assert browser.ask("/api/facets", filter=attack.format(path=secret, secret=SECRET)).status_code == 400


def test_polars_alone_would_read_the_file(secret: Path) -> None:
    """Why the list is there: the error of an expression shows the first line of a file."""
    rows = pl.DataFrame({"level": [1]})
    with pytest.raises(pl.exceptions.PolarsError, match=SECRET):
        rows.filter(pl.sql_expr(f"level in (select x from read_csv('{secret}'))"))


@pytest.mark.parametrize(
    ("text", "message", "allowed"),
    [
        ("sucess", "there is no column 'sucess'; did you mean 'success'?", "success"),
        ("rewards > 0.5", "there is no column 'rewards'; did you mean 'reward'?", "reward"),
        ("nonsense = 1", "there is no column 'nonsense'; a text stands in single quotes", "reward"),
        ('env = "sums"', "there is no column 'sums'", "env"),
        ("messages is null", "there is no column 'messages'", "env"),
        ("lenght(prompt) > 3", "a filter has no function 'lenght'; did you mean 'length'?", "length"),
        ("replace(env, 'a', 'aa') = 'b'", "a filter has no function 'replace'", "lower"),
        ("lpad(env, 1000000000, 'x') = 'b'", "a filter has no function 'lpad'", "lower"),
        ("count(*) > 1", "a filter has no function 'count'", "lower"),
        ("level over (order by level) > 1", "without 'over'", None),
        ("reward", "the filter gives Float64, not true or false; compare it with something", None),
        ("level + 1", "not true or false", None),
        ("level >", "the filter is wrong", None),
        ("(level > 1", "the filter is wrong", None),
        ("env > 1", "cannot compare string with numeric", None),
        ("level = 1 or " * 600 + "true", "at most 4,000 are allowed", None),
        ("(" * 150 + "true" + ")" * 150, "nested 150 levels deep", None),
        ("not " * 700 + "true", "operators", None),
        ("created_at >= '2026-01-01'", "write created_at >= date '2026-01-31'", None),
        ("level @ 1", "'@' has no place in a filter", "="),
        ("length(prompt || prompt) > 3", "'|' has no place in a filter", "="),
        ("length(prompt" + " + prompt" * 9 + ") > 3", "a filter adds at most 8 times", None),
        ("env = 'a--b' -- and", "a filter holds no comment", None),
        ("env /* it's */ = 'b'", "a filter holds no comment", None),
        ("date'2026-01-01' > created_at", "put a space before a text", None),
    ],
)
def test_a_wrong_filter_names_what_is_allowed(browser: Browser, text: str, message: str, allowed: str | None) -> None:
    refused = browser.json("/api/rows", 400, filter=text)
    assert message in refused["error"]
    assert refused["field"] == "filter"
    assert allowed is None or allowed in refused["allowed"]
    assert refused["next"]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", 24),
        ("  ", 24),
        ("true", 24),
        ("null", 0),
        ("success is null", 2),
        ("not success", 11),
        ("env = 'sums' and (level in (1, 2) or reward between 0.1 and 0.3)", 18),
        ("env like 'su%' and env ilike '%MS'", 24),
        ("prompt = 'What is 3 + 1? 🙂'", 2),
        ("prompt = 'it''s' or env = 'select'", 0),
        ("env = 'a--b' or trajectory_id = 'swe--1' or prompt = '/* no */'", 0),
        ("level + 1 > 0 and 'a' + env = 'asums'", 24),
        ("length(prompt) > 3 and lower(env) = 'sums'", 24),
        ("regexp_like(trajectory_id, '0000(00|01)$')", 4),
        ("case when success then reward > 0.5 else false end", 4),
        ("coalesce(success, false)", 11),
        ("\"env\" = 'sums'", 24),
        ("created_at >= '2026-01-01T12:00:10Z'::timestamptz", 10),
        ("created_at >= date '2026-01-01' and created_at < date '2026-01-02'", 24),
        ("reward >= 0.5 and\n\tsuccess", 6),
    ],
)
def test_filters_that_people_write(browser: Browser, text: str, rows: int) -> None:
    answer = browser.ask("/api/rows", filter=text)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["x-total"]) == rows
    assert browser.json("/api/facets", filter=text)["filtered"] == rows


@given(st.text(max_size=60))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    with suppress(RefusedError):
        filters.expression(text, COLUMNS)


def test_a_filter_that_takes_too_long_is_given_up(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "FILTER_S", -1.0)
    assert "was given up" in browser.json("/api/rows", 408, filter="level = 7")["error"]


def test_an_answer_that_takes_too_long_is_said(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.flows.viewer import app as viewer

    monkeypatch.setattr(viewer, "PATIENCE_S", 0.05)
    browser = Browser(store)
    browser.ask("/api/session")
    monkeypatch.setattr(tables.Tables, "at", lambda self, at: time.sleep(0.2))
    assert "takes more than" in browser.json("/api/facets", 503)["error"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"offset": -1}, "offset"),
        ({"offset": 10**30}, "offset"),
        ({"desc": "maybe"}, "desc"),
        ({"sort": "rewards"}, "sort"),
        ({"sort": "messages"}, "sort"),
        ({"sort": ""}, "sort"),
        ({"column": "env"}, "column"),
    ],
)
def test_a_wrong_question_is_refused_by_name(browser: Browser, query: dict[str, Any], field: str) -> None:
    refused = browser.json("/api/rows", 400, **query)
    assert refused["field"] == field
    assert field in refused["error"] or field == "sort"


def test_a_store_without_rows_says_what_fills_it(tmp_path: Path) -> None:
    browser = Browser(tmp_path)
    for path in ("/api/rows", "/api/facets", "/api/rows/x", "/api/tokens/x"):
        refused = browser.json(path, 404)
        assert "there is no trajectory buffer" in refused["error"]
        assert refused["next"] == "agentrl run quickstart"
    assert browser.json("/api/overview")["version"] is None
    assert not list(tmp_path.iterdir()), "looking creates nothing"


def test_a_version_whose_files_are_gone_is_said(tmp_path: Path) -> None:
    make_store(tmp_path, rows=4)
    for file in (tmp_path / "trajectories").glob("*.parquet"):
        file.unlink()
    refused = Browser(tmp_path).json("/api/rows", 503)
    assert "the store cannot be read" in refused["error"]
    assert "agentrl buffer check" in refused["next"]


def test_the_newest_rows_are_seen(tmp_path: Path) -> None:
    make_store(tmp_path, rows=4)
    browser = Browser(tmp_path)
    assert browser.ask("/api/rows").headers["x-total"] == "8"
    more = [row(number) for number in range(100, 104)]
    TrajectoryBuffer(tmp_path).append(more, stage="grpo", fingerprint="f" * 32)
    assert browser.ask("/api/rows").headers["x-total"] == "12"
    assert browser.json("/api/facets")["total"] == 12


def test_reading_an_older_version_in_between_mixes_no_rows(store: Path) -> None:
    """A scan's rows come in another order afterwards, and filters are kept by the numbers of rows."""
    browser = Browser(store)
    assert browser.ask("/api/rows", filter="success").headers["x-total"] == "11"
    browser.ask("/api/rows", at=1)
    rows = browser.arrow("/api/rows", filter="success", sort="reward")
    assert rows["success"].to_pylist() == [True] * 11
    assert rows["reward"].to_pylist() == sorted(rows["reward"].to_pylist(), reverse=True)
