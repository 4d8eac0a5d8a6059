"""The pictures of the viewer in the documentation, of a store in which the quickstart ran: ``make pictures``."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from serving import serving, window

from agentrl import Store

FOLDER = Path(__file__).parents[2] / "docs" / "images"
FAILED = """
    select trajectory_id from trajectories where stage = 'eval_star' and array_contains(tags, 'sampled')
    and not success and level = 3 and n_tool_errors = 0 order by trajectory_id limit 1
"""


def take(browser: Any, store: str) -> None:
    """Three pages, each 1,280 pixels wide, in the light theme."""
    [failed] = Store(store).sql(FAILED)["trajectory_id"]
    pages = {
        "overview": ("/", ".graph .box.cached", 900),
        "buffer": ("/buffer?filter=n_tool_calls%20%3E%202%20and%20split%20%3D%20'train'", ".facet", 700),
        "trajectory": (f"/row/{failed}?lens=logprob", ".t", 800),
    }
    os.chdir(Path(store).parent)
    with serving(Path(store).name) as address:
        for name, (path, ready, height) in pages.items():
            with window(browser, address, viewport={"width": 1280, "height": height}) as watched:
                watched.page.set_default_timeout(90_000)
                page = watched.open(path, ready)
                page.wait_for_timeout(2000)  # for answers that come after the first
                page.screenshot(path=FOLDER / f"viewer-{name}.png")
                print(FOLDER / f"viewer-{name}.png")


if __name__ == "__main__":
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--disable-gpu"])
        take(chromium, str(Path(sys.argv[1]).resolve()))
