"""A real store, the real command that serves it, and Debian's Chromium without a window."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strange_rows import append_strange_rows
from watched import ENV, WATCH, Watched


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What ``agentrl run`` makes of ``small.yaml``, and strange rows."""
    place = str(tmp_path_factory.mktemp("viewer") / "store")
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "run",
        str(Path(__file__).parent / "small.yaml"),
        "--store",
        place,
        "--jobs",
        "2",
    ]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, cwd=Path(place).parent)
    assert done.returncode == 0, done.stdout + done.stderr
    append_strange_rows(place)
    return place


@pytest.fixture(scope="session")
def url(store: str) -> Iterator[str]:
    """The address of ``agentrl view`` on the store."""
    command = [sys.executable, "-m", "flows.cli", "view", "--store", store, "--port", "0", "--json"]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True, cwd=Path(store).parent) as process:
        try:
            yield _address(process)
        finally:
            process.terminate()


def _address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.rstrip() == "}":
            return str(json.loads(text)["url"]).rstrip("/")
    raise AssertionError(f"the viewer did not start: {text}")


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
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=request.param)
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(15_000)
    watched = Watched(page, url)
    page.on("console", lambda message: message.type in ("error", "warning") and watched.console.append(message.text))
    page.on("pageerror", lambda error: watched.console.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith((url, "data:")) or watched.outside.append(asked.url))
    page.on("dialog", lambda dialog: (watched.dialogs.append(dialog.message), dialog.dismiss()))
    yield watched
    watched.check()
    context.close()
