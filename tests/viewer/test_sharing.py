"""What a page gives away as a file, and what pages say of a store that has little or nothing."""

import re
from pathlib import Path
from typing import Any

import pytest
from serving import serving, window
from watched import PICTURES, Watched, until

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.schemas.trajectory import Message, Trajectory

pytestmark = pytest.mark.viewer
FILTER = "stage = 'grpo' and not success"
NAMES = ("", "buffer", "calls", "evaluation", "pair", "training", "doctor", "curation", "labels", "runs")
TABS = "[...document.querySelectorAll('nav[aria-label=pages] a')].map((tab) => tab.textContent)"


def downloaded(page: Any, folder: Path) -> Path:
    """The file of the button that says so, in the menu that is open."""
    with page.expect_download() as download:
        page.get_by_role("button", name="one file for others").click()
    until(page, "document.querySelector('.said').textContent.includes('it needs no server')")
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def opened(browser: Any, file: Path) -> Any:
    """The file in a window without a network, and what it complains of."""
    context = browser.new_context(offline=True)
    page, complaints = context.new_page(), []
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector(".facts")
    return page, complaints


def test_the_button_of_the_buffer_makes_a_file_of_the_rows_that_it_shows(
    seen: Watched, browser: Any, store: str, tmp_path: Path
) -> None:
    expected = TrajectoryBuffer(store).sql(f"select trajectory_id from trajectories where {FILTER}")["trajectory_id"]
    page = seen.open(f"/buffer?filter={FILTER}", ".grid a")
    page.locator(".saving summary").click()
    file = downloaded(page, tmp_path)
    assert file.name == "rows.html"
    alone, complaints = opened(browser, file)
    total = alone.evaluate("async () => (await (await agentrl('/api/facets')).json()).total")
    assert total == len(expected) > 0
    alone.get_by_role("link", name="Look at the rows").click()
    alone.wait_for_selector(".grid a")
    shown = alone.eval_on_selector_all(".grid a", "all => all.map((row) => row.textContent)")
    assert set(shown) <= set(expected)
    alone.locator(".grid").focus()
    alone.keyboard.press("Enter")
    alone.wait_for_selector(".turn")
    assert complaints == []
    alone.context.close()


def test_the_button_of_a_trajectory_makes_a_file_of_that_row(seen: Watched, browser: Any, tmp_path: Path) -> None:
    page = seen.open("/row/breach", ".turn")
    page.locator(".title summary").click()
    file = downloaded(page, tmp_path)
    assert file.name == "row.html"
    alone, complaints = opened(browser, file)
    alone.get_by_role("link", name="Look at the rows").click()
    alone.wait_for_selector(".grid a")
    assert alone.eval_on_selector_all(".grid a", "all => all.map((row) => row.textContent)") == ["breach"]
    assert complaints == []
    alone.context.close()


def test_an_empty_store_has_one_tab_and_each_page_says_what_to_run_with_it(browser: Any, tmp_path: Path) -> None:
    store = tmp_path / "new" / "store"
    store.mkdir(parents=True)
    with serving(str(store)) as url, window(browser, url) as seen:
        for name in NAMES:
            page = seen.open(f"/{name}", ".page")
            page.locator("code:visible", has_text=f"--store {store}").first.wait_for()
            told = page.inner_text(".page")
            assert re.search(r"agentrl (run|buffer) [\w/ .-]+ --store ", told), (name, told)
            assert told.count("agentrl run") <= 1, name
            until(page, f"{TABS}.length === {2 if name else 1}")
        page = seen.open("/", ".empty-state code")
        page.screenshot(path=PICTURES / "empty.png")
        assert seen.faults() == []
        seen.console.clear()  # the browser reports answers of 404 by itself


def test_tabs_come_with_what_they_show(browser: Any, url: str, tmp_path: Path) -> None:
    store = tmp_path / "rows" / "store"
    store.mkdir(parents=True)
    with serving(str(store)) as address, window(browser, address) as seen:
        page = seen.open("/", ".empty-state code")
        assert page.evaluate(TABS) == ["overview"]
        outcome: dict[str, Any] = {"reward": 1.0, "success": True, "termination": "answered", "n_steps": 1}
        messages = [Message(role="user", content="1 + 1"), Message(role="assistant", content="2")]
        row = Trajectory(
            trajectory_id="first", episode_id="first", task_id="sum", source="file", env="none", split="train",
            prompt="1 + 1", messages=messages, **outcome,
        )  # fmt: skip
        TrajectoryBuffer(store).append([row], stage="read", fingerprint="9" * 32)
        until(page, f"{TABS}.join() === 'overview,buffer,calls,labels'", 30)  # without a reload
    with window(browser, url) as seen:
        tabs = seen.open("/", ".graph").evaluate(TABS)
        assert {"evaluations", "pairs", "training", "doctor", "curation", "runs"} < set(tabs)
