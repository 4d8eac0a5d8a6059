"""Small things that readers rely on: numbers below their headers, colours that say what is done, what stays to be seen
when a training ends, and a proxy that shows the viewer below a path."""

import http.server
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import serving, window
from test_training import RUN, Training, copied, told
from watched import PICTURES, Watched, until

pytestmark = pytest.mark.viewer
__all__ = ["copied"]

ASKEW = """[...document.querySelectorAll('table')].flatMap((table) => {
  const heads = [...(table.tHead?.rows[0]?.cells ?? [])];
  return [...table.tBodies].flatMap((body) => [...body.rows].flatMap((row) => {
    const cells = [...row.cells];
    if (cells.length !== heads.length || cells.some((cell) => cell.colSpan > 1)) return [];
    const side = (cell) => ['right', 'end'].includes(getComputedStyle(cell).textAlign);
    return cells.flatMap((cell, i) => side(cell) === side(heads[i]) ? [] : [[heads[i].textContent, cell.textContent]]);
  }));
})"""
"""Cells that stand at another side than the header of their column."""


@pytest.mark.parametrize(
    "path", ["/?stage=grpo", "/training?step=0", "/evaluation", "/curation", "/pair", "/runs", "/run/last"]
)
def test_numbers_stand_under_their_header(seen: Watched, path: str) -> None:
    page = seen.open(path, "table tbody tr")
    page.wait_for_timeout(300)
    assert page.evaluate(ASKEW) == []


def test_labels_of_an_axis_have_the_room_that_they_take(seen: Watched) -> None:
    page = seen.open("/training", ".chart canvas")
    short = page.evaluate(
        """(async () => {
          const { number, room } = await import('/static/chart.js');
          const context = document.createElement('canvas').getContext('2d');
          context.font = '11px system-ui';
          const values = [-1.25e-10, -0.00012345, -1234567, -0.1234, -123.4, 0, 5];
          return values.map(number).filter((label) => context.measureText(label).width + 15 > room(null, [label]));
        })()"""
    )
    assert short == []


@pytest.mark.parametrize("how", ["killed", "failed", "cancelled"])
def test_curves_stay_when_training_is_stopped(browser: Any, copied: str, how: str) -> None:
    training = Training(copied)
    training.step(4)
    with serving(copied) as url, window(browser, url) as seen:
        page = seen.open(f"/training?run={RUN}&stage=late", ".chart canvas")
        told(page, 3)
        training.record["state"] = how
        training.record["stages"]["late"]["status"] = how
        training.catalog.write_run(training.record)
        page.wait_for_selector(f"h2:has-text('{how}')")
        told(page, 3)
        page = seen.open(f"/training?run={RUN}&stage=late", ".chart canvas")  # and afterwards
        told(page, 3)
        page.locator("summary", has_text="that trained").click()
        assert f"✗ {how}" in page.inner_text("tr.chosen")
        page.screenshot(path=PICTURES / f"training-{how}.png")


def test_what_is_still_to_run_is_not_green(browser: Any, copied: str) -> None:
    training = Training(copied)
    training.record["stages"]["after"] = {"status": "run", "fingerprint": "", "reasons": ["never ran"]}
    training.catalog.write_run(training.record)
    with serving(copied) as url, window(browser, url) as seen:
        page = seen.open(f"/run/{RUN}", "tr:has-text('after')")
        assert "▸ to run" in page.inner_text("tr:has-text('after')")
        made = "document.body.appendChild(Object.assign(document.createElement('i'), {className: 'good'}))"
        green = page.evaluate(f"getComputedStyle({made}).color")
        colour = page.evaluate("getComputedStyle([...document.querySelectorAll('td.status')].at(-1)).color")
        assert colour != green
        page.screenshot(path=PICTURES / "run-pending.png")


def test_stages_are_being_planned_while_a_plan_is_made(seen: Watched) -> None:
    page = seen.open("/", ".graph .box.cached")
    waiting: list[Any] = []
    page.route("**/api/plan?*", lambda route: waiting.append(route))
    page.locator("#what-if").fill("tasks.train = 7")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.box.planning').length > 1")
    assert page.locator(".box.cached").count() == 0
    labels = page.evaluate("[...document.querySelectorAll('.box')].map((box) => box.getAttribute('aria-label'))")
    assert all("being planned" in label for label in labels)
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / "what-if-planning.png")
    page.unroute("**/api/plan?*")  # which lets what waits go on
    page.wait_for_selector(".box.run", timeout=60_000)
    assert page.locator(".box.planning").count() == 0


@contextmanager
def proxied(url: str, below: str) -> Iterator[str]:
    """The address of a proxy that shows a server below a path, and hands only the rest of the path on."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(below):
                self.send_error(404)
                return
            asked = urllib.request.Request(url + self.path.removeprefix(below), headers={"Accept": "*/*"})
            try:
                answer = urllib.request.urlopen(asked, timeout=30)
            except urllib.error.HTTPError as error:
                answer = error
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                while piece := answer.read1(1 << 16):
                    self.wfile.write(piece)
                    self.wfile.flush()
            except OSError:
                pass

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}{below}"
        server.shutdown()


def test_a_proxy_may_show_the_viewer_below_a_path(browser: Any, url: str, store: str) -> None:
    with proxied(url, "/user/ann/proxy/8322") as address, window(browser, address) as seen:
        page = seen.open("/", ".graph .box")
        page.screenshot(path=Path(PICTURES) / "behind-a-proxy.png")
        for link in page.evaluate("[...document.querySelectorAll('a')].map((link) => link.href)"):
            assert link.startswith(address), link
        page.locator("nav a", has_text="buffer").click()
        page.locator(".grid a").first.click()
        page.wait_for_selector(".ribbon")
        assert page.url.startswith(f"{address}/row/")
        page.reload()
        page.wait_for_selector(".ribbon")
        page.go_back()
        page.wait_for_selector(".grid a")
