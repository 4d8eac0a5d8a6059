"""The files of the front-end: types, licences, hashes, and that the wheel has them."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import wire_types
from vendor import VENDOR, pinned, sha256
from watched import NODE_MODULES, ROOT

STATIC = VENDOR.parent


def test_vendored_files_are_the_pinned_ones_with_their_licences() -> None:
    records = pinned()
    assert {record["file"]: record["sha256"] for record in records} == {
        r["file"]: sha256(VENDOR / r["file"]) for r in records
    }
    named = {record["file"] for record in records} | {"vendor.json"}
    assert {path.name for path in VENDOR.iterdir() if not path.name.endswith(".d.ts")} == named
    packages = {record["package"] for record in records}
    assert {record["package"] for record in records if record["file"].startswith("LICENSE")} == packages


def test_no_module_writes_markup_or_runs_text() -> None:
    """Text from a store becomes text nodes; the policy of the page would refuse these too."""
    refused = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|dangerouslySet|https?://"
    )
    modules = sorted(STATIC.glob("*.js"))
    assert len(modules) > 15
    assert {path.name: refused.findall(path.read_text()) for path in modules if refused.search(path.read_text())} == {}


def test_modules_stay_below_400_lines() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in STATIC.glob("*.*s")}
    assert {name: length for name, length in lengths.items() if length >= 400} == {}


@pytest.mark.viewer
def test_types_are_checked_by_tsc() -> None:
    from playwright._impl._driver import compute_driver_executable

    wire_types.write()
    node = compute_driver_executable()[0]
    command = [node, str(NODE_MODULES / "typescript/lib/tsc.js"), "-p", str(Path(__file__).parent), "--pretty", "false"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr


@pytest.mark.viewer
def test_the_wheel_has_every_file_of_the_front_end(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "agentrl", source / "agentrl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {f"agentrl/{path.relative_to(ROOT).as_posix()}" for path in STATIC.rglob("*") if path.is_file()}
    assert len(files) > 40
    assert files - names == set()
