"""The side table of routes: what is read is what was added, and what expires."""

import os
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import FP, build

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table.routes import FOLDER, RouteTable, routes_table, turns_of
from agentrl.datastore.upkeep import vacuum

Rows = dict[str, list[np.ndarray]]


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """Turns of some rows, of a model with up to 300 experts."""
    layers, k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = draw(st.sampled_from([4, 256, 300]))
    dtype = np.uint8 if experts <= 256 else np.uint16
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    names = draw(st.lists(st.text("abc-.0", min_size=1, max_size=6), min_size=1, max_size=5, unique=True))
    sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    return {name: [random.integers(0, experts, (n, layers, k)).astype(dtype) for n in draw(sizes)] for name in names}


@given(rows=rows())
@settings(max_examples=15, deadline=None)
def test_what_is_read_is_what_was_added(rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> None:
    table = RouteTable(LocalStorage(tmp_path_factory.mktemp("routes")), "abc")
    names = list(rows)
    half = len(names) // 2
    table.append(0, 3, {name: rows[name] for name in names[:half]})
    table.append(7, 4, {name: rows[name] for name in names[half:]})
    table.append(7, 4, {name: rows[name] for name in names[half:]})  # again, after a kill
    read = table.read([*names, "other"])
    assert read == {name: b"".join(turn.tobytes() for turn in turns) for name, turns in rows.items()}
    assert table.read(names[:1]).keys() == {names[0]}
    again = turns_of(routes_table(rows))
    assert again.keys() == rows.keys()
    for name, turns in rows.items():
        assert [turn.shape for turn in again[name]] == [turn.shape for turn in turns]
        assert all((turn == wanted).all() for turn, wanted in zip(again[name], turns, strict=True))


def made(names: str, tokens: int = 5) -> Rows:
    return {name: [np.ones((tokens, 2, 2), np.uint8)] for name in names}


def test_routes_expire_with_the_versions_that_sampled_them(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    table, other = RouteTable(storage, "abc"), RouteTable(storage, "abcd")
    for version in range(4):
        table.append(version * 8, version, made("wxyz"[version]))
    other.append(0, 0, made("o"))
    assert table.expire(2) == 2
    assert table.read(list("wxyz")).keys() == set("yz")
    table.forget()
    assert table.read(list("wxyz")) == {}
    assert other.read(["o", "w"]).keys() == {"o"}, "those of another run stay"


def test_turns_lie_one_after_the_other(tmp_path: Path) -> None:
    table = routes_table({"a": [np.ones((4, 2, 2), np.uint8), np.ones((3, 2, 2), np.uint8)]})
    assert table.select(["turn", "start", "tokens", "layers", "k"]).to_pylist() == [
        {"turn": 0, "start": 0, "tokens": 4, "layers": 2, "k": 2},
        {"turn": 1, "start": 4, "tokens": 3, "layers": 2, "k": 2},
    ]
    assert [len(turn) for turn in table["routes"].to_pylist()] == [16, 12]


def test_vacuum_removes_routes_of_runs_that_nobody_resumed(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([build(1)], stage="rollout", fingerprint=FP, shard=0)
    table = RouteTable(buffer.storage, FP)
    table.append(0, 0, made("a"))
    table.append(1, 1, made("b"))
    old, young = sorted((tmp_path / FOLDER / FP).iterdir())
    os.utime(old, (time.time() - timedelta(hours=200).total_seconds(),) * 2)
    assert vacuum(buffer) == [f"{FOLDER}/{FP}/{old.name}"]
    assert old.exists()
    vacuum(buffer, dry_run=False)
    assert not old.exists()
    vacuum(buffer, retention_hours=0, dry_run=False)
    assert young.exists(), "a run may be at work"
