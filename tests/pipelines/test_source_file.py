"""What is kept of a source between runs, and when it is read anew."""

import os
from pathlib import Path

import pytest

from agentrl.pipelines.plan import source_file
from agentrl.pipelines.plan.source import ModuleSource
from agentrl.pipelines.plan.source_file import SourceFile

CODE = """
from typing import ClassVar
from .near import helper

class Config:
    model_config: dict = {}
    steps: int = helper()
    kind: ClassVar[str] = "x"

def run(): return Config
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "work.py").write_text(CODE)
    return tmp_path / "own" / "work.py"


def read(module: Path) -> SourceFile:
    return SourceFile.read("own.work", module, module.parent.parent)


def refuse_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleSource, "read", lambda *_: pytest.fail("the source was read again"))


def kept(tmp_path: Path) -> Path:
    [entry] = (tmp_path / "cache" / "agentrl" / "sources").iterdir()
    return entry


def test_a_source_that_did_not_change_is_read_once(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(module)
    os.utime(module, (1, 1))  # its time of change does not count, its content does
    refuse_to_read(monkeypatch)
    assert read(module).content == first.content


def test_an_edit_is_seen_though_time_and_size_stay(module: Path) -> None:
    stamp, first = module.stat(), read(module)
    module.write_text(CODE.replace('"x"', '"y"'))
    os.utime(module, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert module.stat().st_size == stamp.st_size
    [number] = first.content.bindings["Config"]
    assert read(module).statement(number).digest != first.statement(number).digest


@pytest.mark.parametrize("left", [b"", b"x" * 20, b"x" * 2000])
def test_an_entry_that_is_damaged_is_made_anew(module: Path, tmp_path: Path, left: bytes) -> None:
    first = read(module)
    whole = kept(tmp_path).read_bytes()
    kept(tmp_path).write_bytes(whole[: len(whole) // 2] if not left else whole[:16] + left)
    assert read(module).content == first.content
    assert kept(tmp_path).read_bytes() == whole


def test_another_reader_reads_anew(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(module)
    before = kept(tmp_path).read_bytes()
    monkeypatch.setattr(source_file, "_reader", lambda: b"another")
    read(module)
    assert kept(tmp_path).read_bytes() != before


def test_a_folder_that_cannot_be_made_is_done_without(module: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert read(module).content.bindings.keys() == {"ClassVar", "helper", "Config", "run"}


def test_relative_imports_begin_at_the_package(module: Path) -> None:
    package = module.with_name("__init__.py")
    package.write_text("from .near import helper")
    inside = SourceFile.read("own", package, module.parent.parent).content
    assert inside.imports["helper"] == read(module).content.imports["helper"]
    assert inside.imports["helper"].module == "own.near"


@pytest.mark.parametrize("fields", [{"steps"}, {"steps", "kind"}, {"kind"}])
def test_a_class_without_fields_is_that_of_a_source_without_them(module: Path, fields: set[str]) -> None:
    [number] = read(module).content.bindings["Config"]
    read_back = read(module).statement(number, fields)
    lines = [line for line in CODE.splitlines() if line.strip().partition(":")[0] not in fields]
    module.write_text("\n".join(lines))
    assert read_back == read(module).statement(number)


LATER = """
from typing import Annotated
from agentrl.schemas.annotations import ADDED

VERSION: Annotated[int, ADDED, 4] = 5

class Row(Base):
    text: str
    model: Annotated[str | None, ADDED] = None
    cost: Annotated[float, ADDED] = 0.0
"""
BEFORE = """
VERSION = 4

class Row(Base):
    text: str
    cost: Annotated[float, ADDED] = 0.0
"""


def test_what_came_later_is_no_part_of_what_was_there_before(module: Path) -> None:
    module.write_text(LATER)
    after = read(module).content
    module.write_text(BEFORE)
    before = read(module).content
    for name in ("VERSION", "Row"):
        [new], [old] = after.bindings[name], before.bindings[name]
        assert after.statements[new].digest == before.statements[old].digest
    module.write_text(LATER.replace("= 0.0", "= 1.0").replace("5", "6"))
    changed = read(module).content
    assert [
        after.statements[after.bindings[name][0]].digest == changed.statements[changed.bindings[name][0]].digest
        for name in ("VERSION", "Row")
    ] == [True, False]
