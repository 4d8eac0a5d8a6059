"""A real store, the real command that serves it, and Debian's Chromium without a window."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from serving import serving, window
from strange_rows import append_strange_rows
from watched import ENV, Watched

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.search.index import SearchIndex


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A filled store. Where several processes share the tests, the first one fills it, and each has a copy of its own,
    since tests write labels into it."""
    folder = tmp_path_factory.mktemp("viewer")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return fill(folder)
    filled = tmp_path_factory.getbasetemp().parent / "filled"
    with FileLock(f"{filled}.lock"):
        if not (filled / "whole").exists():
            filled.mkdir(exist_ok=True)
            fill(filled)
            (filled / "whole").touch()
    shutil.copytree(filled, folder, dirs_exist_ok=True)
    return str(folder / "store")


def fill(folder: Path) -> str:
    """What ``agentrl run`` makes of ``small.yaml``, a second run with other rules, strange rows, a search
    index. The file lies beside the store, so that the viewer plans it."""
    path = str(folder / "store")
    shutil.copy(Path(__file__).parent / "small.yaml", folder)
    rules = "stages.curated.with.rules=[{rule: filter, where: success}]"
    for more in (["--jobs", "2"], ["--until", "curated", "--set", rules]):
        command = [sys.executable, "-m", "agentrl.flows.cli", "run", "small.yaml", "--store", path, *more]
        done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    append_strange_rows(path)
    SearchIndex(TrajectoryBuffer(path)).refresh()
    return path


@pytest.fixture
def own_store(store: str, tmp_path: Path) -> str:
    """A copy of the store, for a test that writes into it: others show its newest run."""
    return str(shutil.copytree(store, tmp_path / "own" / "store"))


@pytest.fixture(scope="session")
def url(store: str) -> Iterator[str]:
    """The address of ``agentrl view`` on the store."""
    with serving(store) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "the tests of the viewer need Debian's chromium: sudo apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(params=["light"])
def seen(request: pytest.FixtureRequest, browser: Any, url: str) -> Iterator[Watched]:
    """A fresh window of 1280 by 800 pixels; the parameter is the theme. At the end all is checked."""
    with window(browser, url, request.param) as watched:
        yield watched
