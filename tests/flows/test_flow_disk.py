"""A store on a disk that is full or read-only: one line, the documented exit code, nothing half-written."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_project import Project

from agentrl.flows import cli

ROOT = str(Path(__file__).parents[2])

PIPELINE = """
    name: disk
    stages:
      a: {uses: "toy:numbers", with: {n: 3}}
      b: {uses: "toy:add", inputs: {tables: a}}
"""


def mount(*arguments: str | Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine mounts nothing: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB, and ``read_only`` beside it: the same one, to be read alone once it is mounted there."""
    folder, read_only = tmp_path / "disk", tmp_path / "read_only"
    folder.mkdir()
    read_only.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "agentrl-test", folder)
    try:
        yield folder
    finally:
        for item in (read_only, folder):
            if item.is_mount():
                subprocess.run(["umount", "-l", item], check=True)


def conversations(file: Path, letter: str, count: int = 400) -> str:
    with file.open("w") as out:
        for number in range(count):
            messages = [{"role": "user", "content": f"{letter} {number}?"}, {"role": "assistant", "content": "yes"}]
            print(json.dumps({"messages": messages}), file=out)
    return str(file)


def fill(disk: Path, left: int) -> Path:
    """Leave so many bytes on the disk."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - left)
    return filler


def run(store: Path, *arguments: str) -> tuple[int, str]:
    """``agentrl run`` in a process of its own: a record that could not be ended is then the record of a dead run."""
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "pipeline.yaml", "--no-prefect", "--store", str(store)]
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout + done.stderr


def call(capsys: Any, store: Path, *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.call([*arguments, "--store", str(store)])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def rows(capsys: Any, store: Path) -> int:
    code, shown = call(capsys, store, "buffer", "query", "select count(*) as n from trajectories", "--json")
    assert code == 0, shown
    return int(json.loads(shown)[0]["n"])


def halves(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.name.endswith(".tmp") or path.name.startswith(".part-")]


@pytest.mark.parametrize("left", [0, *(pytest.param(left, marks=pytest.mark.slow) for left in (8192, 24576))])
def test_a_full_disk_leaves_the_store_as_it_was(project: Project, disk: Path, left: int, capsys: Any) -> None:
    """``left`` bytes: nothing fits; a record does and the artifacts do not; small artifacts do and the rows do not."""
    store = disk / "store"
    project.write(PIPELINE)
    for letter in "ab":
        assert (
            call(capsys, store, "buffer", "import", conversations(project.folder / f"{letter}.jsonl", letter))[0] == 0
        )
    more = conversations(project.folder / "more.jsonl", "c")
    filler = fill(disk, left)
    code, shown = run(store, "--set", "stages.a.with.n=9000")
    assert (code, "No space left on device" in shown) == (1, True), shown
    assert "Traceback" not in shown
    assert call(capsys, store, "plan", "pipeline.yaml")[0] == 0
    for arguments in (("buffer", "import", more), ("buffer", "compact")):
        code, shown = call(capsys, store, *arguments)
        assert (code, "No space left on device" in shown) == (1, True), shown
        assert shown.startswith("error: ")
        assert str(store) in shown  # which disk it is
        assert len(shown.splitlines()) == 1
    assert rows(capsys, store) == 800
    filler.unlink()
    assert halves(store) == []
    code, shown = call(capsys, store, "buffer", "check")
    assert code == 0, shown
    assert [item["state"] for item in json.loads(call(capsys, store, "runs", "--json")[1])] in (
        [],
        ["failed"],
        ["killed"],
    )
    assert call(capsys, store, "buffer", "import", more)[0] == 0
    assert call(capsys, store, "buffer", "compact")[0] == 0
    assert rows(capsys, store) == 1200
    code, shown = run(store, "--set", "stages.a.with.n=9000")
    assert code == 0, shown
    assert call(capsys, store, "buffer", "check")[0] == 0


def test_a_read_only_store_is_read_and_not_written(project: Project, disk: Path, capsys: Any) -> None:
    store = disk / "store"
    project.write(PIPELINE)
    assert run(store)[0] == 0
    assert call(capsys, store, "buffer", "import", conversations(project.folder / "a.jsonl", "a"))[0] == 0
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    there = project.folder / "read_only"
    mount("--bind", disk, there)
    mount("-o", "remount,bind,ro", there)
    fixed = there / "store"
    for arguments in (("plan", "pipeline.yaml"), ("run", "pipeline.yaml"), ("buffer", "check"), ("show", "b")):
        code, shown = call(capsys, fixed, *arguments)  # there is nothing to run
        assert code == 0, shown
    assert rows(capsys, fixed) == 400
    more = conversations(project.folder / "more.jsonl", "c")
    for arguments in (
        ("run", "pipeline.yaml", "--set", "seed=3"),
        ("buffer", "import", more),
        ("buffer", "compact"),
        ("buffer", "vacuum", "--yes"),
        ("gc", "--keep-runs", "1"),
    ):
        code, shown = call(capsys, fixed, *arguments)
        assert code == 2, (arguments, shown)
        assert shown.startswith("error: ")
        assert str(fixed) in shown
        assert len(shown.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_an_error_of_an_unknown_class_is_one_line_that_names_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Surprise(Exception):  # noqa: N818
        pass

    def fails(*_: object) -> None:
        raise Surprise("it broke\nwith my-very-secret-key")

    monkeypatch.setattr("agentrl.flows.commands.buffer.open_buffer", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("JUDGE_API_KEY", "my-very-secret-key")
    assert cli.call(["buffer", "compact"]) == 1
    shown = capsys.readouterr().err
    [log] = tmp_path.iterdir()
    assert shown == f"error: Surprise: it broke; this is a bug of agentrl's, report it with the traceback in {log}\n"
    assert "open_buffer(store)" in log.read_text()
    assert "my-very-secret-key" not in log.read_text()
    assert log.stat().st_mode & 0o077 == 0  # a traceback may name what is nobody else's business
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert cli.call(["buffer", "compact"]) == 1
    shown = capsys.readouterr().err
    assert "its traceback could not be kept: No such file or directory" in shown
    assert len(shown.splitlines()) == 1
