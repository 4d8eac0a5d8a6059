"""SQL from others: only the tables it is given, errors in one line, and no query ends the process."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from store_rows import FP, Make

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import sql

TABLES = {"t": pl.LazyFrame({"a": [1, 2]})}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that no query may read, in every format that Polars' SQL reads."""
    frame = pl.DataFrame({"a": [42]})
    frame.write_csv(tmp_path / "f.csv")
    frame.write_parquet(tmp_path / "f.parquet")
    frame.write_ipc(tmp_path / "f.ipc")
    frame.write_ndjson(tmp_path / "f.json")
    return tmp_path


@pytest.fixture
def buffer(tmp_path: Path, make: Make) -> TrajectoryBuffer:
    made = TrajectoryBuffer(tmp_path / "store")
    made.append([make(i) for i in range(8)], stage="rollout", fingerprint=FP, run_id="r1")
    return made


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('{0}/f.csv')",
        "select * from READ_CSV ('{0}/f.csv')",
        "select * from \"read_csv\"('{0}/f.csv')",
        "select * from `read_csv`('{0}/f.csv')",
        "select * from read_csv/**/('{0}/f.csv')",
        "select * from read_csv /* /* a */ ('{0}/f.csv') -- */",
        "select * from read_csv -- a\n('{0}/f.csv')",
        "select * from read_csv --\ra\n('{0}/f.csv')",
        "select * from t, read_csv('{0}/f.csv')",
        "select * from t where a in (select a from read_parquet('{0}/f.parquet'))",
        "with x as (select * from read_ipc('{0}/f.ipc')) select * from x",
        "select * from t union all select * from read_json('{0}/f.json')",
        "create table x as select * from read_ndjson('{0}/f.json')",
        "select * from scan_parquet('{0}/f.parquet')",
        "select * from '{0}/f.csv'",
        'select * from "{0}/f.parquet"',
        "select * from table(read_csv('{0}/f.csv'))",
        "copy t to '{0}/out.csv'",
    ],
)
def test_no_query_reads_or_writes_a_file(secret: Path, query: str) -> None:
    with pytest.raises(StoreError):
        sql.collect(TABLES, query.format(secret))
    assert not (secret / "out.csv").exists()


def test_unsafe_reads_files_and_strings_that_name_readers_are_no_calls(secret: Path) -> None:
    assert sql.collect(TABLES, f"select * from read_csv('{secret}/f.csv')", unsafe=True).rows() == [(42,)]
    assert sql.collect(TABLES, "select a from t where 'read_csv' = 'read_file'").height == 0


def test_table_functions_of_this_polars_are_all_refused() -> None:
    """Whatever this release of Polars calls a table function is refused: none has another name."""
    with pytest.raises(StoreError, match="not a supported table function"):
        sql.collect(TABLES, "select * from no_such_function('x')")
    for name in ("csv", "parquet", "ipc", "json", "ndjson", "delta", "iceberg", "avro", "excel", "database", "lines"):
        for verb in ("read", "scan"):
            with pytest.raises(StoreError, match="reads files"):
                sql.collect(TABLES, f"select * from {verb}_{name}('x')")


def test_rules_and_filters_read_no_files(buffer: TrajectoryBuffer, secret: Path) -> None:
    where = f"n_steps in (select a from read_csv('{secret}/f.csv'))"
    for rule in ("filter", "group"):
        with pytest.raises(ValidationError, match="reads files"):
            Rules.model_validate({"rules": [{"rule": rule, "where": where}]})
        rules = Rules.model_validate({"rules": [{"rule": rule, "where": "true"}]}).rules
        unchecked = [rule.model_copy(update={"where": where}) for rule in rules]
        with pytest.raises(StoreError, match="reads files"):
            curate(buffer, unchecked)
    with pytest.raises(StoreError, match="reads files"):
        buffer.search("boss", where=where)
    with pytest.raises(StoreError, match="reads files"):
        buffer.sql(f"select trajectory_id from trajectories where {where}")


def test_an_error_lists_the_columns_of_the_view_that_was_asked_and_no_plan(buffer: TrajectoryBuffer) -> None:
    with pytest.raises(StoreError) as error:
        buffer.sql("select nonsense from tool_calls")
    text = str(error.value)
    assert "columns of tool_calls: " in text
    assert "arguments" in text
    assert "columns of trajectories" not in text
    assert "plan" not in text.lower()
    assert len(text.splitlines()) == 2


def test_count_is_called_count() -> None:
    assert sql.collect(TABLES, "select count(*) from t").columns == ["count"]
    assert sql.collect(TABLES, "select COUNT( * ), a from t group by a").columns == ["count", "a"]
    assert sql.collect(TABLES, "select count(*) as n from t").columns == ["n"]
    lengths = {"t": pl.LazyFrame({"len": [1]})}
    assert sql.collect(lengths, "select len from t").columns == ["len"]


@pytest.mark.parametrize("query", ["select a{} from t", "select a from t where a=1{}", "select a from t{}"])
@pytest.mark.parametrize("more", ["+a", " or a=1", " union all select a from t"])
def test_long_queries_are_refused_before_they_overflow_the_stack(query: str, more: str) -> None:
    with pytest.raises(StoreError, match=r"at most (500|100,000) are allowed"):
        sql.collect(TABLES, query.format(more * 20_000))
    with pytest.raises(StoreError, match="nested 200 levels deep; at most 100"):
        sql.collect(TABLES, "select " + "(" * 200 + "a" + ")" * 200 + " from t")


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *"*,()=';\"",
                *("select", "from", "where", "t", "a", "'x'", "in", "group by", "order by", "count(*)"),
                "1",
                "-1",
                "cast(a as",
                "int",
                "date",
                "null",
                "over",
            ]
        )
        | st.text(max_size=3),
        max_size=14,
    ).map(" ".join)
)
def test_any_query_is_answered_or_refused(query: str) -> None:
    for text in (query, f"select a from t where {query}"):
        try:
            sql.collect(TABLES, text)
        except StoreError:
            continue
