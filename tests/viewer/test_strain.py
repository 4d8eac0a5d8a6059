"""What strains the viewer, and other ways to see and to reach it: 50 MB in a message, browsers that lack an event, a
token in the address, forced colours."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from serving import serving, window
from watched import PICTURES, until

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.schemas.trajectory import Message, Trajectory

pytestmark = pytest.mark.viewer
MEGABYTES = 50
LONG_TASKS = """
window.longest = 0;
const seen = (list) => list.getEntries().forEach((one) => (window.longest = Math.max(window.longest, one.duration)));
new PerformanceObserver(seen).observe({ type: "longtask", buffered: true });
"""
LISTEN = """
const source = new EventSource("/api/events");
source.onmessage = (event) => {
  window.heard = event.data;
  source.close();
};
void 0;
"""
NO_EVENT = """
delete HTMLElement.prototype.oncontentvisibilityautostatechange;
addEventListener("contentvisibilityautostatechange", (event) => event.stopImmediatePropagation(), true);
"""


def test_a_message_of_50_mb_opens_and_the_page_still_answers(browser: Any, store: str, tmp_path: Path) -> None:
    path = tmp_path / "store"
    shutil.copytree(store, path)
    line = "a line of the answer of a tool that read a whole disk\n"
    huge = line * (MEGABYTES * 10**6 // len(line))
    messages = [
        Message(role="user", content="read it"),
        Message(role="tool", content=huge),
        Message(role="assistant", content="done"),
    ]
    outcome: dict[str, Any] = {"reward": None, "success": None, "termination": "unknown", "n_steps": 1}
    row = Trajectory(
        trajectory_id="giant", episode_id="giant", task_id="giant", source="file", env="none", split="train",
        prompt="read it", messages=messages, **outcome,
    )  # fmt: skip
    TrajectoryBuffer(path).append([row], stage="giant", fingerprint="9" * 32)
    with serving(str(path)) as url, window(browser, url) as seen:
        seen.page.context.add_init_script(LONG_TASKS)
        page = seen.open("/row/giant?lens=text", ".turn.tool .content")
        until(page, "document.querySelectorAll('.turn').length === 3")
        assert len(page.inner_text(".turn.tool .content")) < 30_000
        page.locator("button", has_text="show all (50.0 M characters)").press("Enter")  # a click may miss
        until(page, "document.querySelector('.turn.tool button')?.textContent.includes('characters are left')")
        assert page.evaluate("document.querySelector('.turn.tool .content').textContent.length") < 2_000_000
        page.locator("button", has_text="characters are left").press("Enter")
        until(page, "document.querySelector('.turn.tool .content').textContent.length > 1_900_000")
        page.keyboard.press("j")
        until(page, "document.activeElement.id === 'm0'")
        longest = page.evaluate("window.longest")
        print(f"longest task of the main thread: {longest:.0f} ms")
        assert longest < 400  # less than 100 on a machine that does nothing else


def test_without_the_event_of_content_visibility_tokens_are_drawn_in_view(browser: Any, url: str) -> None:
    with window(browser, url) as seen:
        seen.page.context.add_init_script(NO_EVENT)
        page = seen.open("/row/long?lens=logprob", ".t")
        assert page.evaluate("'oncontentvisibilityautostatechange' in document.body") is False
        until(page, "document.querySelectorAll('[class*=heat-]').length > 0")
        assert page.evaluate("document.querySelectorAll('.block').length") > 190
        assert 100 < page.locator(".t").count() < 20_000
        page.evaluate("scrollTo(0, document.body.scrollHeight / 2)")
        until(page, "document.elementFromPoint(300, 400)?.closest('.turn')?.querySelector('.t') !== null")
        until(page, "document.querySelectorAll('.t').length < 20000")
    with window(browser, url) as seen:
        page = seen.open("/row/long?lens=logprob", ".t")
        assert page.evaluate("'oncontentvisibilityautostatechange' in HTMLElement.prototype") is True


def test_a_token_in_the_address_becomes_a_cookie(browser: Any, store: str) -> None:
    with serving(store, "--host", "0.0.0.0") as address:
        url, _, token = address.partition("/#token=")
        assert len(token) >= 32
        url = f"http://127.0.0.1:{url.rpartition(':')[2]}"
        with window(browser, url) as seen:
            page = seen.open("/buffer", ".problem")
            until(page, "document.querySelector('.problem').innerText.includes('printed, with its #token')")
            seen.console.clear()
            page.goto("about:blank")
            page = seen.open(f"/buffer?sort=n_tokens#token={token}", ".grid a")
            assert token not in page.url
            assert page.url.endswith("/buffer?sort=n_tokens")
            [cookie] = page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"], token in cookie["value"]) == (True, "Strict", False)
            assert page.evaluate("document.cookie") == ""
            assert page.evaluate(
                "performance.getEntriesByType('resource').every((one) => !one.name.includes('token='))"
            )
            page.reload()
            page.wait_for_selector(".grid a")
            page.evaluate(LISTEN)
            until(page, "window.heard?.includes('version')")
            seen.open("/#token=wrong", "h1")  # the cookie still counts
            assert [line for line in seen.console if "401" not in line] == []
            seen.console.clear()


def test_in_forced_colours_marks_stay_and_text_is_read(browser: Any, url: str) -> None:
    with window(browser, url, forced_colors="active") as seen:
        page = seen.open("/row/breach?lens=mask", ".t.trained")
        behind = "getComputedStyle(document.querySelector('%s')).backgroundColor"
        assert page.evaluate(behind % ".t.trained") != page.evaluate(behind % "body")
        assert page.evaluate("getComputedStyle(document.querySelector('.t.breach')).outlineStyle") == "solid"
        page.screenshot(path=PICTURES / "forced-colors.png")
        assert seen.faults() == []
        page = seen.open("/buffer?filter=success", ".facet .some")
        assert page.evaluate(behind % ".facet .some") != page.evaluate(behind % ".facet .all")
