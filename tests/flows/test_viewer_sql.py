"""The SQL console: what it answers, what its list refuses, and what its process cannot do even without the list."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from viewer_store import Browser

from agentrl.flows.viewer.query import console
from agentrl.flows.viewer.refused import RefusedError

SECRET = "a-secret-that-stands-in-a-file"


def rows(number: int = 40) -> pl.DataFrame:
    names = [f"t{i}" for i in range(number)]
    return pl.DataFrame({"trajectory_id": names, "reward": [i / number for i in range(number)]})


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.csv"
    path.write_text(f"{SECRET},other\n{SECRET},2\n")
    pl.DataFrame({"a": [SECRET]}).write_parquet(tmp_path / "secret.parquet")
    return path


def attacks(path: Path) -> list[str]:
    parquet = path.with_suffix(".parquet")
    return [
        f"select * from read_csv('{path}')",
        f"select * from READ_CSV ('{path}')",
        f"select * from \"read_csv\"('{path}')",
        f"select * from scan_parquet('{parquet}')",
        f"select * from read_parquet('{path.parent}/*.parquet')",
        f"with x as (select * from read_csv('{path}')) select * from x",
        f"select trajectory_id from trajectories where trajectory_id in (select other from read_csv('{path}'))",
        f"select a.* from trajectories a cross join read_csv('{path}') b",
        f"select a.* from trajectories a, read_csv('{path}') b",
        f"select * from trajectories union all select * from read_csv('{path}')",
        f"select (select other from read_csv('{path}') limit 1) as x from trajectories",
        f"select * from read_csv/* here */('{path}')",
        f"select * from read_csv -- here\n('{path}')",
    ]


def refused(query: str) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        console.check(query)
    return caught.value


def test_the_list_refuses_files_however_they_are_named(secret: Path) -> None:
    for query in attacks(secret):
        assert SECRET not in str(refused(query)), query


@pytest.mark.parametrize(
    "query",
    [
        "",
        "drop table trajectories",
        "delete from trajectories",
        "truncate table trajectories",
        "create table x as select * from trajectories",
        "show tables",
        "explain select * from trajectories",
        "attach '/tmp/x.db'",
        "copy trajectories to '/tmp/x'",
        "insert into trajectories values (1)",
        "update trajectories set reward = 1",
        "select * from trajectories; select 1",
        "select * from trajectories; drop table trajectories",
        "with recursive x as (select 1) select * from x",
        "select * into x from trajectories",
        "select * from '/etc/passwd'",
        'select * from "/etc/passwd"',
        "select * from other",
        "select * from trajectories join other on true",
        "select * from trajectories natural join trajectories",
        "select repeat(env, 1000000000) from trajectories",
        "select x'41' from trajectories",
        "select read_text('/etc/passwd')",
        "select * from trajectories where ſelect(1)",
        "select `read_csv`('x') from trajectories",
        "select * from read_csv$('x')",
        "select " + "(" * 200 + "1" + ")" * 200,
        "select " + "1 + " * 900 + "1",
        "select '" + "x" * 1_000_000 + "'",
    ],
)
def test_whatever_is_more_than_one_select_is_refused(query: str) -> None:
    told = refused(query)
    assert told.body.field == "query"
    assert len(str(told)) < 500


@pytest.mark.parametrize(
    "query",
    [
        "select stage, count(*) as n, avg(success) as rate from trajectories group by stage having count(*) > 1;",
        "with good as (select * from trajectories where success) select env, max(reward) as best from good",
        "select t.env from trajectories t join (select task_id from trajectories where success) o using (task_id)",
        "select \"env\", case when success then 'high; from x' else 'read_csv(1)' end as \"a (b)\" from trajectories",
    ],
)
def test_one_select_is_let_in(query: str) -> None:
    if "read_csv(1)" in query:  # also a text that reads like a call is refused: nobody needs it
        refused(query)
        return
    assert console.check(query) == query.rstrip(";")


def test_an_answer_is_a_table_of_its_version(browser: Browser) -> None:
    query = "select env, count(*) as n, avg(reward) as mean, max(created_at) as newest from trajectories group by env"
    now, before = browser.ask("/api/sql", query=query), browser.ask("/api/sql", query=query, at="1")
    told = pa.ipc.open_stream(now.content).read_all().to_pylist()
    assert told[0]["n"] > pa.ipc.open_stream(before.content).read_all().to_pylist()[0]["n"]
    assert (before.headers["x-version"], before.headers["x-rows"], before.headers["x-cut"]) == ("1", "1", "0")
    wanted = browser.arrow("/api/rows", limit=1000).column("reward").to_pylist()
    assert told[0]["mean"] == pytest.approx(sum(wanted) / len(wanted))
    assert told[0]["newest"].startswith("2026-01-01T12:00")
    whole = browser.arrow("/api/sql", query="select * from trajectories order by trajectory_id")
    assert {"trajectory_id", "prompt", "created_at"} <= set(whole.column_names)
    missing = browser.json("/api/sql", 400, query="select sucess from trajectories")
    assert "did you mean 'success'" in missing["error"]
    for query in ("select * from read_csv('/etc/passwd')", "show tables"):
        assert browser.json("/api/sql", 400, query=query)["field"] == "query"
    assert browser.ask("/api/sql", "POST", body={"query": "select 1"}).status_code == 405


def test_more_rows_than_fit_are_counted_as_more() -> None:
    number, body = console.answer(rows(console.ROWS + 5), "select * from trajectories")
    assert (number, pa.ipc.open_stream(body).read_all().num_rows) == (console.ROWS + 1, console.ROWS)
    number, body = console.answer(rows(console.ROWS), "select * from trajectories")
    assert (number, pa.ipc.open_stream(body).read_all().num_rows) == (console.ROWS, console.ROWS)


def test_the_process_alone_reads_no_file(secret: Path) -> None:
    """The list is left out. That the same query reads the file elsewhere shows that it is the process that refuses."""
    assert SECRET in str(pl.SQLContext().execute(attacks(secret)[0]).collect())
    parquet = f"select * from read_parquet('{secret.with_suffix('.parquet')}')"
    for query in (
        attacks(secret)[0],
        attacks(secret)[4],
        attacks(secret)[5],
        parquet,
        "select * from read_csv('/etc/passwd')",
    ):
        with pytest.raises(RefusedError) as caught:
            console.answer(rows(), query)
        assert "opens a file" in str(caught.value)
        assert not any(word in str(caught.value) for word in (SECRET, "root:", "secret"))


def test_nothing_can_be_opened_once_it_is_given_up(secret: Path) -> None:
    """Neither by Python nor through what is open already."""
    program = f"""
from agentrl.flows.viewer.query.sql_child import give_up
print(open({str(secret)!r}).read(), flush=True)
give_up(5, 2**30)
import os
for name in ({str(secret)!r}, "/proc/self/fd/0", "/dev/null"):
    try:
        os.open(name, os.O_RDONLY)
    except OSError as error:
        print(error.errno, flush=True)
for make in (lambda: os.dup(0), os.pipe):
    try:
        make()
    except OSError as error:
        print(error.errno, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.split()
    assert SECRET in lines[0]
    assert lines[-5:] == ["24", "24", "24", "22", "24"]  # EMFILE; dup says that no number is low enough


@pytest.mark.slow
def test_a_query_that_fills_the_memory_is_given_up() -> None:
    """A cross join bomb: 400 million texts, which must be kept to be told apart."""
    both = "select concat(a.trajectory_id, b.trajectory_id) as x from trajectories a cross join trajectories b"
    bomb = f"select count(distinct x) as n from ({both}) t"
    with pytest.raises(RefusedError, match="needs more than 268,435,456 bytes"):
        console.answer(rows(20_000), bomb, memory=2**28, cpu_s=60, wall_s=300)


@pytest.mark.slow
def test_a_query_that_never_ends_is_given_up() -> None:
    many = pl.DataFrame({"reward": [1.5]}).select(pl.col("reward").repeat_by(3_000_000).explode())
    long = " + ".join(f"exp(sqrt(reward) * 0.{number})" for number in range(100, 320))
    with pytest.raises(RefusedError, match="took more than 1 s of the processor"):
        console.answer(many, f"select sum({long}) as x from trajectories", cpu_s=1, wall_s=300)
    began = time.monotonic()
    with pytest.raises(RefusedError, match=r"took more than 0.5 s"):
        console.answer(many, f"select sum({long}) as x from trajectories", cpu_s=100, wall_s=0.5)
    assert time.monotonic() - began < 30


def test_a_third_query_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_AT_ONCE", threading.BoundedSemaphore(1))
    monkeypatch.setattr(console, "_PATIENCE_S", 0.01)
    with console._AT_ONCE, pytest.raises(RefusedError, match="at work") as caught:
        console.answer(rows(), "select 1")
    assert caught.value.status == 503


def test_columns_that_no_table_shows_are_refused_by_name() -> None:
    with pytest.raises(RefusedError, match="column 'all' is List"):
        console.answer(rows(), 'select array_agg(reward) as "all" from trajectories')
