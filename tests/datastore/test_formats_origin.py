"""Where an imported row comes from: id, file, time, model, usage and cost, from every format that says them."""

import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from format_origins import ALL, BESIDE_ALL, CASES, ISO, OPENAI, SAID, SECONDS, USER, WHEN, lines
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.imports import import_paths
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import BESIDE, COLUMNS, beside, count, dollars, moment
from agentrl.datastore.formats.source import Source
from agentrl.flows.cli import app
from agentrl.schemas.trajectory import Trajectory


@pytest.mark.parametrize("case", CASES)
def test_the_origin_comes_from_every_format_that_says_it(case: str, tmp_path: Path) -> None:
    name, suffix, text, wanted = CASES[case]
    path = tmp_path / f"rows{suffix}"
    path.write_text(text)
    source = Source(path)
    rows = list(FORMATS[name].read(source))
    assert {column: getattr(rows[0], column) for column in COLUMNS if column != "source_file"} == (
        dict.fromkeys(ALL) | wanted
    )
    carried = {"id", "model", "usage", "cost", "created"} & source.notes.ignored.keys()
    assert not carried


def test_a_record_of_several_rows_has_its_usage_once(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(lines({"prompt": [USER], "chosen": [SAID], "rejected": [SAID | {"content": "no"}], **BESIDE_ALL}))
    rows = list(FORMATS["trl-preference"].read(Source(path)))
    assert [(row.source_id, row.model, row.cost_usd) for row in rows] == [("a7", "m-1", 0.5), ("a7", "m-1", None)]


@pytest.fixture
def bought(tmp_path: Path) -> TrajectoryBuffer:
    """Two files of two models, which another import labels with one policy."""
    buffer = TrajectoryBuffer(tmp_path / "store")
    for number, (model, cost) in enumerate([("small", 0.01), ("large", 0.25)]):
        records = [
            {"messages": [USER, SAID | {"content": f"{model} {n}"}], "id": f"{model}-{n}", "model": model}
            | {"label": n < 1 + number, "cost": cost}
            for n in range(3)
        ]
        (tmp_path / f"{model}.jsonl").write_text(lines(*records))
    import_paths(buffer, [tmp_path / "small.jsonl", tmp_path / "large.jsonl"])
    return buffer


def test_model_cost_and_file_are_one_query(bought: TrajectoryBuffer, tmp_path: Path) -> None:
    passed = bought.sql("select model, avg(success) as rate from trajectories group by model order by model")
    assert passed.rows() == [("large", pytest.approx(2 / 3)), ("small", pytest.approx(1 / 3))]
    cost = bought.sql(
        "select model, sum(cost_usd) / sum(success) as cost from trajectories group by model order by model"
    )
    assert cost.rows() == [("large", pytest.approx(0.375)), ("small", pytest.approx(0.03))]
    which = bought.sql("select source_file, source_id from trajectories where source_id = 'large-2'")
    assert which.rows() == [(str(tmp_path / "large.jsonl"), "large-2")]


def test_the_origin_goes_out_and_comes_back(bought: TrajectoryBuffer, tmp_path: Path) -> None:
    rows = bought.get_many(bought.scan().select("trajectory_id").collect()["trajectory_id"].to_list())
    for name in ("verifiers", "verifiers-v1", "atif", "swe-agent", "tau2", "huggingface"):
        format = FORMATS[name]
        assert format.write
        path = tmp_path / f"{name}{format.suffix}"
        format.write(rows, path)
        files = sorted(path.iterdir()) if path.is_dir() and name != "huggingface" else [path]
        back = [row for file in files for row in format.read(Source(file))]
        names = [column for column in COLUMNS if column != "source_file"]
        assert [[getattr(row, name) for name in names] for row in back] == [
            [getattr(row, name) for name in names] for row in rows
        ], name


def test_seconds_of_messages_go_out_and_come_back(tmp_path: Path) -> None:
    from store_rows import build

    row = build(0, message_seconds=[None, 1.5, 0.25, 2.0])
    for name in ("verifiers", "verifiers-v1", "atif", "swe-agent", "tau2", "huggingface"):
        format = FORMATS[name]
        assert format.write
        path = tmp_path / f"{name}{format.suffix}"
        format.write([row], path)
        files = sorted(path.iterdir()) if path.is_dir() and name != "huggingface" else [path]
        [back] = [row for file in files for row in format.read(Source(file))]
        assert back.message_seconds == row.message_seconds, name


def test_rows_of_ours_have_no_origin_and_take_no_place(tmp_path: Path) -> None:
    from store_rows import build

    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([build(number) for number in range(3)], stage="s", fingerprint="f")
    assert buffer.scan().select(pl.col(*COLUMNS).is_null().all()).collect().row(0) == (True,) * len(COLUMNS)


odd = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400) | st.just(ISO),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(sorted(OPENAI)), inner, max_size=3),
    max_leaves=4,
)


@given(record=st.dictionaries(st.sampled_from(sorted(BESIDE)), odd, max_size=6))
def test_anything_beside_the_messages_is_taken_or_counted(record: dict[str, Any]) -> None:
    notes = Notes()
    result = beside(record, notes)
    row = {"trajectory_id": "t", "episode_id": "e", "task_id": "t", "source": "s", "env": "e", "split": "train"}
    Trajectory.model_validate(
        row | {"prompt": "", "reward": None, "success": None, "termination": "unknown", "messages": [], **result}
    )
    assert set(result) <= set(COLUMNS)
    for key in ("id", "model"):
        value = record.get(key)
        held = value not in (None, "")
        column = {"id": "source_id"}.get(key, key)
        assert (column in result or notes.ignored[key] == 1) if held else (column not in result)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (ISO, WHEN),
        ("2026-01-31T12:00:00", WHEN),
        ("2026-01-31 13:00:00+01:00", WHEN),
        (SECONDS, WHEN),
        (str(int(SECONDS)), WHEN),
        (int(SECONDS * 1e3), WHEN),
        (int(SECONDS * 1e6), WHEN),
        (int(SECONDS * 1e9), WHEN),
        (WHEN, WHEN),
        *[(item, None) for item in ("t", "", 0, -1, True, None, float("nan"), 10**400, [], "9" * 400)],
    ],
)
def test_moments(value: Any, wanted: datetime | None) -> None:
    assert moment(value) == wanted


def test_counts_and_amounts() -> None:
    assert [count(item) for item in (3, 3.0, 0, -1, 2.5, True, "3", None, 10**400, float("inf"))] == [3, 3, 0] + [
        None
    ] * 7
    assert [dollars(item) for item in (0.5, 0, -1, True, "1", None, float("nan"), 10**400)] == [0.5, 0.0] + [None] * 6


DOCS = Path(__file__).parents[2] / "docs/reference/formats.md"


def test_the_queries_of_the_docs_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for model, solved, cost in (("small-1", 1, 0.01), ("large-1", 3, 0.25)):
        name = model.removesuffix("-1")
        Path(f"{name}.jsonl").write_text(
            lines(
                *[
                    {"messages": [USER, SAID | {"content": f"{model} {n}"}], "id": f"{name}-{n}", "model": model}
                    | {"label": (n < solved and n != 2) or (n == 3 and solved > 1), "cost": cost}
                    | {"created": SECONDS + n}
                    for n in range(4)
                ]
            )
        )
    run = CliRunner()
    block = next(part for part in DOCS.read_text().split("```") if "pass_rate" in part)
    commands = [shlex.split(line.removeprefix("$ agentrl ")) for line in block.splitlines() if line.startswith("$ ")]
    printed = [run.invoke(app, command).stdout for command in commands]
    told = "".join(part.partition("\n")[2] for part in block.split("$ agentrl buffer query")[1:])
    assert [line.rstrip() for line in "".join(printed[1:]).splitlines()] == told.splitlines()
