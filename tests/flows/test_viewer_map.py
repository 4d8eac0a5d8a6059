"""The map: prompts as points, lassos as parts of the buffer, and the file for Embedding Atlas."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from viewer_store import Browser, make_store, row

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.search.index import SearchIndex
from agentrl.datastore.search.projection import PrincipalPlane
from agentrl.flows import cli
from agentrl.flows.viewer.pages.points import Points, lasso


@dataclass
class Drawn:
    """An embedder whose vectors are drawn by the text, so that no test waits for scikit-learn."""

    identity: str
    neural = True

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        drawn = [np.random.default_rng(list(text.encode())).normal(size=8) for text in texts]
        return np.array(drawn, np.float32).reshape(len(texts), 8)

    def cut(self, texts: Sequence[str]) -> int:
        return 0


def index(buffer: TrajectoryBuffer, identity: str = "drawn") -> None:
    """Bring the search index up to date."""
    result = SearchIndex(buffer, "embedded")
    result.embedder = Drawn(identity)
    result.refresh()


EVERYWHERE = "-9,-9;9,-9;9,9;-9,9"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its index does not hold the prompt of the last row."""
    folder = tmp_path_factory.mktemp("viewer") / "store"
    make_store(folder)
    buffer = TrajectoryBuffer(folder)
    index(buffer)
    buffer.append([row(99, trajectory_id="late", success=True)], stage="late", fingerprint="f" * 32)
    return folder


@settings(max_examples=50)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 12), st.integers(1, 6)), elements=st.floats(-1, 1, width=32)),
    st.integers(0, 3),
    st.integers(1, 12),
)
def test_the_plane_holds_the_greatest_variance_and_stays_as_it_is(vectors: np.ndarray, more: int, each: int) -> None:
    batches = [vectors[first : first + each] for first in range(0, len(vectors), each)]
    plane = PrincipalPlane.fit(batches, len(vectors))
    places = plane.places(vectors)
    spread = np.linalg.svd(vectors - vectors.mean(axis=0, dtype=np.float64), compute_uv=False) ** 2
    wanted = np.zeros(2)
    wanted[: min(2, len(spread))] = spread[:2]
    assert (places.astype(np.float64) ** 2).sum(axis=0) == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    longer = PrincipalPlane.fit([*batches, vectors[:more] * 3], len(vectors))
    assert np.array_equal(longer.places(vectors), places)


def test_a_lasso_takes_what_is_inside() -> None:
    places = np.array([[0, 0], [0.5, 0.2], [0.95, 0.5], [-1, 0], [0.1, 0.8]], np.float32)
    result = Points("f", [""] * 5, places, 0)
    _, corners = lasso("f:-0.5,-0.5;1,-0.5;1,1;0.5,0.4;-0.5,1")  # with a bay from above
    assert result.inside(corners).tolist() == [True, True, True, False, False]


def test_points_count_the_rows_of_their_prompts(browser: Browser) -> None:
    table = browser.arrow("/api/map")
    meta = {name.decode(): value.decode() for name, value in table.schema.metadata.items()}
    assert (meta["version"], meta["behind"], meta["unplaced"]) == ("4", "1", "1")
    assert table.num_rows == 20
    assert (sum(table["rows"].to_pylist()), sum(table["scored"].to_pylist())) == (24, 22)
    assert sum(table["solved"].to_pylist()) == 11
    some = browser.arrow("/api/map", filter="success and stage = 'grpo'")
    assert some.num_rows == 20, "points without a row in the filter stay"
    assert some["rows"].to_pylist() == some["solved"].to_pylist()
    assert sum(some["rows"].to_pylist()) == 9
    older = browser.arrow("/api/map", at=1)
    assert sum(older["rows"].to_pylist()) == older.num_rows == 10
    assert older["x"].to_pylist() == [table["x"].to_pylist()[n] for n in range(20) if n in _known(table, older)]


def _known(table: pa.Table, older: pa.Table) -> set[int]:
    xs = older["x"].to_pylist()
    return {number for number, x in enumerate(table["x"].to_pylist()) if x in xs}


def test_a_lasso_is_a_part_of_the_buffer(browser: Browser) -> None:
    table = browser.arrow("/api/map")
    frame = table.schema.metadata[b"frame"].decode()
    whole = f"{frame}:{EVERYWHERE}"
    assert browser.ask("/api/rows", lasso=whole).headers["x-total"] == "24", "all but the row without a place"
    x, y = table["x"][0].as_py(), table["y"][0].as_py()
    around = f"{frame}:{x - 1e-4},{y - 1e-4};{x + 1e-4},{y - 1e-4};{x},{y + 1e-4}"
    chosen = browser.arrow("/api/rows", lasso=around)
    assert len(set(chosen["prompt"].to_pylist())) == 1
    assert chosen.num_rows == table["rows"][0].as_py()
    assert browser.json("/api/facets", lasso=around, filter="success")["filtered"] == table["solved"][0].as_py()
    answer = browser.json("/api/map/prompts", lasso=around)
    assert (answer["rows"], answer["total"]) == (chosen.num_rows, 1)
    assert answer["prompts"][0]["prompt"] == chosen["prompt"][0].as_py()
    assert answer["prompts"][0]["low"] is None or answer["prompts"][0]["low"] < 1
    assert browser.arrow("/api/map", lasso=around).num_rows == 20, "a lasso hides no point"


def test_a_lasso_means_the_same_when_prompts_are_added(tmp_path: Path) -> None:
    make_store(tmp_path)
    buffer = TrajectoryBuffer(tmp_path)
    index(buffer)
    browser = Browser(tmp_path)
    before = browser.arrow("/api/map")
    frame = before.schema.metadata[b"frame"].decode()
    buffer.append([row(number) for number in range(50, 60)], stage="late", fingerprint="f" * 32)
    index(buffer)
    after = browser.arrow("/api/map", lasso=f"{frame}:{EVERYWHERE}")
    assert after["x"].to_pylist()[:20] == before["x"].to_pylist()
    assert after.schema.metadata[b"frame"].decode() == frame
    assert browser.arrow("/api/map").schema.metadata[b"frame"].decode() != frame
    buffer.storage.delete("index/embedded")
    index(buffer, "another")
    refused = browser.json("/api/map", 409, lasso=f"{frame}:{EVERYWHERE}")
    assert "made anew" in refused["error"]


@pytest.mark.parametrize(
    "text", ["x", "x:", "x:1,2;3,4", "x:1,2,3;4,5,6;7,8,9", "x:1,2;3,4;nan,1", "x:a,b;c,d;e,f", "x:1,2;3,4;5"]
)
def test_what_is_no_lasso_is_said(browser: Browser, text: str) -> None:
    assert browser.json("/api/rows", 400, lasso=text)["field"] == "lasso"
    assert browser.json("/api/rows", 400, lasso="f:" + "1,2;" * 300 + "1,2")["field"] == "lasso"


def test_without_an_index_its_command_is_named(tmp_path: Path) -> None:
    make_store(tmp_path, rows=4)
    for path in ("/api/map", "/api/map/prompts"):
        assert "agentrl buffer index" in Browser(tmp_path).json(path, 409)["next"]


def test_the_rows_are_written_with_their_places(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.parquet"
    assert cli.call(["view", "--store", str(store), "--atlas", str(file), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["rows"], printed["unplaced"]) == (24, 1)
    assert printed["command"] == f"embedding-atlas {file} --text prompt --x projection_x --y projection_y"
    rows = pl.read_parquet(file)
    assert {"trajectory_id", "prompt", "success", "stage"} < set(rows.columns)
    assert rows["projection_x"].dtype == pl.Float32
    assert rows.select(pl.col("projection_x", "projection_y").is_finite().all()).row(0) == (True, True)
    assert rows.group_by("prompt").agg(pl.col("projection_x").n_unique())["projection_x"].unique().to_list() == [1]
    assert cli.call(["view", "--store", str(store), "--atlas", str(file)]) != 0
    assert "exists" in capsys.readouterr().err


def test_an_atlas_needs_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(tmp_path / "store", rows=2)
    assert cli.call(["view", "--store", str(tmp_path / "store"), "--atlas", str(tmp_path / "x.parquet")]) != 0
    assert "agentrl buffer index" in capsys.readouterr().err
