"""The command that serves a store, and windows of a browser on it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from watched import ENV, WATCH, Watched


@contextmanager
def serving(store: str, *options: str, port: int = 0) -> Iterator[str]:
    """The address of ``agentrl view`` on a store, with its token if it has one."""
    command = [
        sys.executable,
        "-m",
        "agentrl.flows.cli",
        "view",
        "--store",
        store,
        "--port",
        str(port),
        "--json",
        *options,
    ]
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


@contextmanager
def window(browser: Any, url: str, theme: str = "light", **more: Any) -> Iterator[Watched]:
    """A fresh window of 1280 by 800 pixels. At the end all is checked."""
    options = {"viewport": {"width": 1280, "height": 800}, "color_scheme": theme, **more}
    context = browser.new_context(**options)
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(180_000)  # a busy machine is no fault
    watched = Watched(page, url)
    page.on("console", lambda message: message.type in ("error", "warning") and watched.console.append(message.text))
    page.on("pageerror", lambda error: watched.console.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith((url, "data:")) or watched.outside.append(asked.url))
    page.on("dialog", lambda dialog: (watched.dialogs.append(dialog.message), dialog.dismiss()))
    yield watched
    watched.check()
    context.close()
