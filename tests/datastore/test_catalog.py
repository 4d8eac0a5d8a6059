import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.datastore import Catalog, StoreError
from agentrl.datastore.errors import LockTimeoutError
from agentrl.datastore.storage.digest import digest
from agentrl.schemas.manifest import Ingredients, Kind, Manifest, OutputRecord


def manifest(fingerprint: str = "f1", stage: str = "expert", age: float = 0, run_id: str = "r") -> Manifest:
    ingredients = Ingredients(scheme=1, stage=stage, uses="x", uses_version="1", config={}, seed=0, inputs={}, code={})
    return Manifest(
        fingerprint=fingerprint,
        ingredients=ingredients,
        outputs={"tasks": OutputRecord(kind=Kind.TABLE, path="data/tasks.txt", digest="d")},
        run_id=run_id,
        created_at=datetime.now(UTC) - timedelta(seconds=age),
        duration_s=1.0,
    )


def fill(catalog: Catalog, fingerprint: str = "f1", stage: str = "expert", text: str = "hello") -> Path:
    folder = catalog.staging(stage, fingerprint)
    (folder / "data").mkdir()
    (folder / "data/tasks.txt").write_text(text)
    return folder


def test_publish_and_find(store: str) -> None:
    catalog = Catalog(store)
    assert catalog.manifest("expert", "f1") is None
    (catalog.scratch("expert", "f1") / "checkpoint").write_text("half")
    folder = fill(catalog)
    published = catalog.publish(manifest(), folder)
    assert catalog.manifest("expert", "f1") == published
    assert catalog.local(published, "data/tasks.txt").read_text() == "hello"
    assert (catalog.local(published, "data") / "tasks.txt").read_text() == "hello"
    opened = catalog.open(published, "data/tasks.txt")
    with opened.open("rb") if isinstance(opened, Path) else opened as file:
        assert (file.seek(1), file.read(3)) == (1, b"ell")
    assert list(catalog.scratch("expert", "f1").iterdir()) == []
    with pytest.raises(StoreError, match=r"has no 'none.txt'"):
        catalog.local(published, "none.txt")


def test_the_first_publication_stays(store: str) -> None:
    catalog = Catalog(store)
    first = published = catalog.publish(manifest(run_id="first"), fill(catalog))
    second = fill(catalog, text="other")
    assert catalog.publish(manifest(run_id="second"), second) == first
    assert not second.exists()
    assert catalog.local(published, "data/tasks.txt").read_text() == "hello"


def test_an_output_that_was_not_written_is_refused(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    with pytest.raises(StoreError, match="output 'tasks' of stage 'expert' is missing"):
        catalog.publish(manifest(), catalog.staging("expert", "f1"))
    assert catalog.manifest("expert", "f1") is None


@pytest.mark.parametrize("keep", [0, 1, 100])
def test_a_manifest_cut_in_half_does_not_exist(store: str, keep: int) -> None:
    catalog = Catalog(store)
    catalog.publish(manifest(), fill(catalog))
    key = "artifacts/expert/f1/manifest.json"
    body = catalog.storage.read(key) or b""
    catalog.storage.write(key, body[:keep])
    with pytest.warns(UserWarning, match="corrupt and counts as absent"):
        assert catalog.manifest("expert", "f1") is None
    again = catalog.publish(manifest(run_id="again"), fill(catalog, text="new"))
    assert again.run_id == "again"
    assert catalog.manifest("expert", "f1") == again


def test_listing_tags_removal(store: str) -> None:
    catalog = Catalog(store)
    for age, fingerprint in ((5, "f1"), (1, "f2"), (9, "f3")):
        catalog.publish(manifest(fingerprint, age=age), fill(catalog, fingerprint))
    catalog.publish(manifest("g1", "warm"), fill(catalog, "g1", "warm"))
    assert [manifest.fingerprint for manifest in catalog.manifests("expert")] == ["f2", "f1", "f3"]
    assert [manifest.fingerprint for manifest in catalog.all()] == ["f2", "f1", "f3", "g1"]
    catalog.tag("best", "expert", "f2")
    assert catalog.tags() == {"best": ("expert", "f2")}
    with pytest.raises(StoreError, match="no such artifact"):
        catalog.tag("worst", "expert", "nope")
    catalog.remove(catalog.manifest("expert", "f1"))
    assert [manifest.fingerprint for manifest in catalog.manifests("expert")] == ["f2", "f3"]


def test_runs(store: str) -> None:
    catalog = Catalog(store)
    assert catalog.runs() == []
    more = {"host": "here", "pid": 1, "stages": {"a": {"status": "ran", "fingerprint": "f", "rows": {}}}}
    catalog.write_run({"run_id": "2026-a", "state": "running", **more})
    catalog.write_run({"run_id": "2026-a", "state": "done", **more})
    catalog.write_run({"run_id": "2026-b", "state": "running", **more})
    assert catalog.run("2026-a") == {"run_id": "2026-a", "state": "done", **more}
    assert catalog.run("none") is None
    assert [run["run_id"] for run in catalog.runs()] == ["2026-a", "2026-b"]


def test_questions_write_nothing(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "store")
    assert catalog.manifest("a", "b") is None
    assert catalog.manifests("a") == []
    assert list(catalog.all()) == []
    assert catalog.tags() == {}
    assert catalog.runs() == []
    assert not (tmp_path / "store").exists()


def test_the_lock_keeps_others_out(store: str) -> None:
    first, two = Catalog(store), Catalog(store)
    order = []
    with first.lock("a", "b"):
        with pytest.raises(LockTimeoutError), two.lock("a", "b", timeout=0):
            pass

        def wait() -> None:
            with two.lock("a", "b", timeout=30):
                order.append("second")

        thread = threading.Thread(target=wait)
        thread.start()
        with two.lock("a", "c", timeout=0):
            order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_bad_names_are_refused(tmp_path: Path) -> None:
    for name in ("", "..", "a/b", ".hidden"):
        with pytest.raises(StoreError, match="cannot name a folder"):
            Catalog(tmp_path).manifest(name, "f")


def test_digest_of_parquet_is_by_content(tmp_path: Path) -> None:
    frame = pl.DataFrame({"a": ["x", None, "zz"] * 3000, "b": [[1], None, []] * 3000, "c": [True, None, False] * 3000})
    table = frame.to_arrow()
    pq.write_table(table, tmp_path / "1.parquet", compression="zstd", row_group_size=100)
    narrow = table.cast(table.schema.set(0, table.schema.field(0).with_type(pa.string())))
    pq.write_table(narrow, tmp_path / "2.parquet", compression="none", use_dictionary=False)
    pq.write_table(table.slice(1), tmp_path / "3.parquet")
    assert digest(tmp_path / "1.parquet") == digest(tmp_path / "2.parquet")
    assert digest(tmp_path / "1.parquet") != digest(tmp_path / "3.parquet")


def test_digest_of_folders(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub/f").write_text("x")
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    (tmp_path / "two/sub/f").rename(tmp_path / "two/sub/g")
    assert digest(tmp_path / "one") != digest(tmp_path / "two")


def test_import_is_light() -> None:
    heavy = "{'torch', 'polars', 'deltalake', 'obstore'}"
    code = f"import sys, agentrl.datastore.artifacts.catalog; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
