"""Stores in folders with names that people have, and that URIs, globs and shells read otherwise."""

from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from catalog_worker import fill, manifest
from store_rows import build

from agentrl.datastore import Catalog, TrajectoryBuffer
from agentrl.datastore.formats.exports import export_rows
from agentrl.datastore.formats.imports import import_paths
from agentrl.datastore.upkeep import check, compact, vacuum
from agentrl.pipelines.results.gc import BY_COMMAND, collect

NASTY = [
    "two words",
    "müßig",
    "🦊 fox",
    "it's",
    'say "x"',
    "[a-z]*",
    "100%20sure",
    "a#b",
    "what?",
    "{x}",
    "a+b&c=d;e",
    "back\\slash",
    "50% <of> a|b",
]


@pytest.mark.parametrize("name", NASTY)
def test_everything_works_in_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    buffer, catalog = TrajectoryBuffer(folder / "store"), Catalog(folder / "store")
    for shard in range(3):
        buffer.append([build(2 * shard + number) for number in range(2)], stage="s", fingerprint="f", shard=shard)
    ids = buffer.ids("f")
    assert len(ids) == 6
    assert buffer.scan().select(pl.len()).collect().item() == 6
    assert buffer.scan(version=1).select(pl.len()).collect().item() == 2
    assert buffer.sql("select count(*) as n from trajectories")["n"].item() == 6
    assert buffer.get(ids[3]).trajectory_id == ids[3]
    assert buffer.stats()["rows"] == 6
    digest = buffer.digest(ids)
    compact(buffer)
    vacuum(buffer, retention_hours=0, dry_run=False)
    assert check(buffer) == []
    assert TrajectoryBuffer(folder / "store").digest(ids) == digest

    folder_of_attempt = fill(catalog, BY_COMMAND)
    pq.write_table(buffer.read(ids, ["trajectory_id"]), folder_of_attempt / "data/rows.parquet")
    published = catalog.publish(manifest(BY_COMMAND), folder_of_attempt)
    assert pl.read_parquet(catalog.local(published, "data/rows.parquet"), glob=False).height == 6
    collect(catalog, keep_runs=0)
    assert catalog.manifest("expert", "f1") == published
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
    assert [path.name for path in folder.iterdir()] == ["store"]


@pytest.mark.parametrize("name", NASTY)
def test_search_and_exports_work_in_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    buffer = TrajectoryBuffer(tmp_path / name / "store")
    buffer.append(
        [build(number, prompt=f"the fox jumps {number} times") for number in range(4)], stage="s", fingerprint="f"
    )
    assert buffer.search("fox", 2).height == 2
    assert buffer.search("jumps", 2, where="n_tokens > 0").height == 2
    for kind in ("openai-chat", "huggingface", "atif"):
        out = tmp_path / name / kind
        assert export_rows(buffer, buffer.ids("f"), out, kind).records == 4
        back = TrajectoryBuffer(tmp_path / name / f"{kind}-back")
        import_paths(back, [out], kind)
        assert back.stats()["rows"] == 4
