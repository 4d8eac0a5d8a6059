"""What is uploaded: distributions that hold what they must, and a page whose links lead somewhere."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PARTS = ("agentrl", "schemas", "datastore", "pipelines", "flows")

BUILD = """
import sys
from setuptools.build_meta import build_sdist, build_wheel
folder = sys.argv[1]  # which building replaces
build_sdist(folder)
build_wheel(folder)
"""


def targets(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_links_of_the_package_page_lead_to_files_of_this_version() -> None:
    readme = (ROOT / "README.md").read_text()
    page = runpy.run_path(str(ROOT / "setup.py"))["absolute"](readme)
    assert len(targets(page)) == len(targets(readme)) > 30
    base = f"{PROJECT['urls']['Repository']}/"
    for target in targets(page):
        assert re.match(r"https?://|#", target), f"{target} is relative"
        if target.startswith((f"{base}blob/", f"{base}raw/")):
            kind, version, path = target.removeprefix(base).partition("#")[0].split("/", 2)
            assert version == f"v{PROJECT['version']}"
            assert (ROOT / path).exists(), target
            assert (kind == "raw") == path.endswith((".png", ".svg"))


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", PROJECT["version"]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions, built from the files that git keeps."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    kept = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in kept.split("\0"):
        path = ROOT / name
        if name and path.exists() and (name.split("/")[0] in PARTS or "/" not in name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, source / name, follow_symlinks=False)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.ci
def test_the_distributions_hold_the_code_its_files_and_the_licence(built: Path) -> None:
    [source], [wheel] = built.glob("*.tar.gz"), built.glob("*.whl")
    kept = subprocess.run(["git", "ls-files", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    inside = {name if name.startswith("agentrl/") else f"agentrl/{name}" for name in kept.split()}
    inside = {name for name in inside if not name.endswith(".md") and not (ROOT / name).is_symlink()}
    held = set(zipfile.ZipFile(wheel).namelist())
    assert inside - held == set()
    assert {name for name in held if not name.startswith("agentrl/")} == {
        f"agentrl_engine-{PROJECT['version']}.dist-info/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    }
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert inside - names == set()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "setup.py"} <= names
    about = message_from_bytes(zipfile.ZipFile(wheel).read(f"agentrl_engine-{PROJECT['version']}.dist-info/METADATA"))
    assert about["Description-Content-Type"] == "text/markdown"
    assert "](docs/" not in about.get_payload()
    assert set(about.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
