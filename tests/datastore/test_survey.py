"""gc and vacuum open only artifacts that changed since they looked last, and miss no change."""

import os
from collections import Counter
from pathlib import Path

import pytest
from catalog_worker import fill, manifest, started
from store_rows import FP, build

from agentrl.datastore import Catalog, TrajectoryBuffer
from agentrl.datastore.artifacts import survey as surveys
from agentrl.datastore.artifacts.survey import FILE, survey
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.upkeep import vacuum
from agentrl.pipelines.results.gc import BY_COMMAND, collect, find_garbage
from agentrl.schemas.manifest import InputRecord

AGES = 10**9


def publish(catalog: Catalog, fingerprint: str, run_id: str = BY_COMMAND, old: bool = True) -> None:
    inputs = {"data": [InputRecord(stage="expert", output="data", fingerprint="up")]}
    catalog.publish(manifest(run_id, fingerprint, inputs=inputs), fill(catalog, run_id, 1, fingerprint))
    if old:
        assert isinstance(catalog.storage, LocalStorage)
        os.utime(catalog.storage.root / catalog.folder("expert", fingerprint), (AGES, AGES))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each manifest is read."""
    count: Counter[str] = Counter()
    read = LocalStorage.read

    def counted(self: LocalStorage, key: str) -> bytes | None:
        if key.endswith("manifest.json"):
            count[key] += 1
        return read(self, key)

    monkeypatch.setattr(LocalStorage, "read", counted)
    return count


def test_what_did_not_change_is_not_opened_again(tmp_path: Path, opened: Counter[str]) -> None:
    catalog, buffer = Catalog(tmp_path), TrajectoryBuffer(tmp_path)
    buffer.append([build(0)], stage="s", fingerprint=FP)
    for number in range(20):
        publish(catalog, f"f{number}")
    first = find_garbage(catalog, keep_runs=1)
    opened.clear()
    assert find_garbage(catalog, keep_runs=1) == first
    assert vacuum(buffer, retention_hours=1) == []
    assert collect(Catalog(tmp_path), keep_runs=1).kept == 20
    assert not opened
    publish(catalog, "more")
    opened.clear()
    assert find_garbage(catalog, keep_runs=1).kept == 21
    assert opened == {"artifacts/expert/more/manifest.json": 1}


def test_no_change_is_missed(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    for name in ("f1", "f2", "f3"):
        publish(catalog, name)
    assert survey(catalog).unsettled == []
    before = catalog.manifest("expert", "f1")
    catalog.publish(manifest("a-run", "f1"), fill(catalog, "a-run", 1, "f1"), instead_of=before)
    catalog.remove(catalog.manifest("expert", "f2"))  # type: ignore[arg-type]
    started(str(tmp_path), "killed").wait()  # an attempt at f1
    result = survey(catalog)
    assert {name for _, name in result.artifacts} == {"f1", "f3"}
    assert (result.artifacts["expert", "f1"].run_id, result.artifacts["expert", "f1"].inputs) == ("a-run", ())
    assert result.artifacts["expert", "f3"].inputs == (("expert", "up"),)
    assert result.unsettled == [("expert", "f1")]
    assert len(find_garbage(catalog, keep_runs=1).attempts) == 1


def test_a_folder_that_changed_a_moment_ago_is_looked_at_again(tmp_path: Path, opened: Counter[str]) -> None:
    catalog = Catalog(tmp_path)
    publish(catalog, "f1", old=False)
    survey(catalog)
    opened.clear()
    assert list(survey(catalog).artifacts) == [("expert", "f1")]
    assert sum(opened.values()) == 1


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"expert/f1": [1', b'{"expert/f1": 3}'])
def test_what_was_kept_may_be_lost(tmp_path: Path, damage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(tmp_path)
    publish(catalog, "f1")
    whole = survey(catalog)
    path = tmp_path / "tmp" / FILE
    assert path.exists()
    collect(catalog, keep_runs=1)
    assert path.exists()  # gc takes it for no leftover
    path.write_bytes(damage)
    assert survey(catalog) == whole
    monkeypatch.setattr(surveys.json, "dumps", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    path.unlink()
    assert survey(catalog) == whole
