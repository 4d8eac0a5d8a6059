"""What benchmarks/viewer.py does on the pages of each viewer, and how it sees that they are there."""

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import viewer_data as data
from viewer_browser import Tab, Times, tab
from viewer_ingest import READY
from viewer_sides import INGEST, PROJECT, VIEWERS, Server, trackio_environment

OURS = "agentrl"
FIRST_LINE = "bench.text('.lines tbody td')"
FIRST_ROW = "bench.text('.grid [role=gridcell] a')"
FIRST_TOKEN = "bench.text('.t[class*=heat]')"
ALL_FACETS = "document.querySelectorAll('.facet').length === 11"
"""Of twelve: no row has a tool error, which the page says in words."""
ALL_MODULES = "performance.getEntriesByType('resource').some((one) => one.name.endsWith('/conversation.js'))"
FACETS = "[...document.querySelectorAll('.facets [title]')].map((one) => one.title).join()"
NOW_IN_VIEW = """(() => {
  const box = document.querySelector('.now').getBoundingClientRect();
  return box.top > 0 && box.bottom < innerHeight;
})()"""
SPANS = Path(__file__).parent / "viewer_spans.js"
NUMBERS = [(start, digit) for digit in range(1, 10) for start in ("0.989", "0.990")]
"""Filters by reward, and the digit that is added: each finds another number of rows."""
FIRST_MS = 120_000
"""Other viewers have so long to open the page of all rows, once."""
INSPECT_ROWS = "document.body.textContent.match(/([\\d,]+) rows/)?.[1]"


def long_task(times: Times, where: str, page: Tab) -> None:
    times.add("longest task", OURS, page.longest())
    times.add(f"longest task: {where}", OURS, page.longest())


def follow(path: str) -> str:
    """The statement that clicks a link to a page of our viewer."""
    made = f"const link = document.createElement('a'); link.href = {json.dumps(path)}; document.body.append(link);"
    return f"{made} link.click(); link.remove()"


@contextmanager
def table(browser: Any, server: Server) -> Iterator[Tab]:
    """Our buffer page with its rows and histograms, from where other pages are opened. It has been open for a second,
    after which it has the modules of other pages."""
    with tab(browser) as page:
        page.open(f"{server.url}/buffer", FIRST_ROW)
        page.wait(f"{ALL_FACETS} && {ALL_MODULES}")
        yield page


# the first page


def overview(browser: Any, server: Server, times: Times) -> None:
    """Until the first row of the first page has text, and what came over the wire until then."""
    there = {OURS: FIRST_LINE, "Inspect": "document.body.textContent.includes('warm/3f2a91c4')"}
    there["Phoenix"] = "bench.text('#root').includes('default')"
    with tab(browser) as page:
        times.add("overview", server.side.name, page.open(f"{server.url}/", there[server.side.name]))
        page.page.wait_for_timeout(100)
        times.add("bytes", server.side.name, page.bytes / 1000)
        times.add("requests", server.side.name, page.requests)
        if server.side.name == OURS:
            page.wait("!document.body.textContent.includes('the plan is being made')")
            long_task(times, "overview", page)


# the filter


def keys(browser: Any, server: Server, times: Times, turn: int) -> None:
    """Keys in the filter of our buffer, until the number of rows, the rows and all histograms are new."""
    with tab(browser) as page:
        times.add("buffer", OURS, page.open(f"{server.url}/buffer", FIRST_ROW))
        page.wait(ALL_FACETS)
        for number in range(5 * turn, 5 * turn + 5):
            start, digit = NUMBERS[number % len(NUMBERS)]
            page.page.fill("#filter", f"reward > {start}")
            page.page.wait_for_timeout(600)
            page.page.evaluate(f"void (bench.before = [bench.text('.counts b'), {FACETS}])")
            new = f"bench.text('.counts b') !== bench.before[0] && {FACETS} !== bench.before[1]"
            times.add("key", OURS, page.press(str(digit), new))
        long_task(times, "buffer", page)


@contextmanager
def inspect_rows(browser: Any, server: Server, times: Times) -> Iterator[Tab]:
    """Inspect's page with all rows, which stays open."""
    with tab(browser) as page:
        times.add("buffer", "Inspect", page.open(f"{server.url}/#/logs/rows.eval", INSPECT_ROWS, FIRST_MS))
        page.page.focus(".cm-content", timeout=FIRST_MS)
        yield page


def inspect_keys(page: Tab, times: Times, turn: int) -> None:
    """Keys in the filter of Inspect, until the number of rows is new. It has no histograms."""
    for number in range(2 * turn, 2 * turn + 2):
        start, digit = NUMBERS[number % len(NUMBERS)]
        page.page.keyboard.press("Control+A")
        page.page.keyboard.type(f"exact > {start}")
        page.page.keyboard.press("Escape")
        page.page.wait_for_timeout(1500)
        page.page.evaluate(f"void (bench.before = {INSPECT_ROWS})")
        times.add("key", "Inspect", page.press(str(digit), f"{INSPECT_ROWS} !== bench.before"))


# a long trajectory


def trajectory(browser: Any, server: Server, times: Times, turn: int, lengths: tuple[int, ...]) -> None:
    """Long trajectories: by address, from the table; another lens, and the last token of the shorter one."""
    usual, longest = lengths
    with tab(browser) as page:
        address = f"{server.url}/row/{data.long_id(usual, turn)}?lens=logprob"
        times.add("long by address", OURS, page.open(address, FIRST_TOKEN))
        long_task(times, "long by address", page)
    with table(browser, server) as page:
        path = f"/row/{data.long_id(usual, data.COPIES - 1 - turn)}?lens=logprob"
        times.add("long", OURS, page.act(follow(path), FIRST_TOKEN))
        page.page.wait_for_timeout(1000)
        lens_and_jump(page, times, usual)
        long_task(times, "long", page)
    with table(browser, server) as page:
        times.add(
            "longest row", OURS, page.act(follow(f"/row/{data.long_id(longest, turn)}?lens=logprob"), FIRST_TOKEN)
        )
        page.page.wait_for_timeout(3000)
        long_task(times, "longest row", page)


def read(page: Tab, length: int) -> None:
    """A long trajectory is opened and read."""
    page.act(follow(f"/row/{data.long_id(length, 0)}?lens=logprob"), FIRST_TOKEN)
    page.page.wait_for_timeout(1000)
    lens_and_jump(page, Times(), length)


def lens_and_jump(page: Tab, times: Times, length: int) -> None:
    for _ in range(2):
        times.add("lens", OURS, page.press("[", "!document.querySelector('.t[class*=heat]')"))
        times.add("lens", OURS, page.press("]", "document.querySelector('.t[class*=heat]')"))
    press = (
        "const map = document.querySelector('.minimap'); const box = map.getBoundingClientRect();"
        " map.dispatchEvent(new PointerEvent('pointerdown', {clientY: %s, bubbles: true}))"
    )
    for _ in range(2):
        last = f"bench.text('.inspector').includes('token {length - 1} of') && {NOW_IN_VIEW}"
        times.add("jump", OURS, page.act(press % "box.bottom - 0.0001", last))
        page.act(press % "box.top", f"bench.text('.inspector').includes('token 0 of') && {NOW_IN_VIEW}")


def inspect_sample(browser: Any, server: Server, times: Times, turn: int, length: int) -> None:
    """The same trajectory in Inspect, by address: its page of a log of one trajectory shows that one at once."""
    name = data.long_id(length, turn)
    with tab(browser) as page:
        address = f"{server.url}/#/logs/{name}.eval/samples/sample/{name}/1/"
        seen = f"document.body.textContent.includes({json.dumps(data.answer_words(length, turn))})"
        times.add("long by address", "Inspect", page.open(address, seen))


def spans(browser: Any, server: Server, times: Times, turn: int, length: int) -> None:
    """The same lens and jump on a page that has an element for each token at all times."""
    with tab(browser) as page:
        styles = "<link rel=stylesheet href=/static/theme.css><link rel=stylesheet href=/static/style.css>"
        body = f"<!doctype html>{styles}<body><div id=all></div><script type=module>{SPANS.read_text()}</script>"
        page.page.route("**/spans*", lambda route: route.fulfill(body=body, content_type="text/html"))
        address = f"{server.url}/spans?{data.long_id(length, turn)}"
        times.add("long", "spans", page.open(address, "bench.drawn"))
        times.add("lens", "spans", page.act("bench.use('mask')", "true"))
        times.add("lens", "spans", page.act("bench.use('logprob')", "true"))
        times.add("jump", "spans", page.act("bench.last()", "true"))


# attempts at one task


def task(page: Tab, times: Times, turn: int, rows: int, attempts: int) -> None:
    a, b = (data.attempt_id(rows, 2 * turn + number) for number in (0, 1))
    there = f"document.querySelectorAll('.strip .mark').length === {attempts} && bench.text('.versus .tokens')"
    path = f"/task?env=lookup&task_id={data.MANY}&a={a}&b={b}"
    times.add("task", OURS, page.act(follow(path), there))
    page.page.wait_for_timeout(500)
    long_task(times, "task", page)


# what is new


SEEN = "bench.until(() => %s).then((when) => performance.timeOrigin + when)"


def commits(browser: Any, server: Server, times: Times, buffer: Any, count: int) -> None:
    """From the end of a commit until its row is in our table."""
    with table(browser, server) as page:
        for number in range(count):
            page.page.wait_for_timeout(900 + 150 * number)
            name = data.append_row(buffer)
            committed = time.time()
            seen = page.page.evaluate(SEEN % f"{FIRST_ROW} === '{name}'")
            times.add("commit", OURS, max(0.0, seen - committed * 1000))
        long_task(times, "commits", page)


@contextmanager
def phoenix_spans(browser: Any, server: Server) -> Iterator[tuple[Tab, Any]]:
    """Phoenix's page of spans, which stays open, and a process that posts spans."""
    command = [str(VIEWERS / "arize/bin/python"), str(INGEST), "late", server.url]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        tab(browser) as page,
    ):
        assert process.stdout is not None
        project = process.stdout.readline().strip()
        page.open(f"{server.url}/projects/{project}/spans", "bench.text('#root').includes('rollout-')", FIRST_MS)
        yield page, process
        process.terminate()
        with suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.close()


def phoenix_commits(page: Tab, process: Any, times: Times, count: int) -> None:
    """From the answer to a post until the span is on the page, which Phoenix asks for anew every two seconds."""
    for _ in range(count):
        name = f"late-{time.time_ns()}"
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        committed = float(process.stdout.readline())
        seen = page.page.evaluate(SEEN % f"document.body.textContent.includes('{name}')")
        times.add("commit", "Phoenix", max(0.0, seen - committed * 1000))


# training that goes on


def live(browser: Any, server: Server, times: Times, store: Path, steps: int) -> None:
    """Our page of training."""
    address = f"{server.url}/training?run={data.RUN}&stage=train"
    with data.training(store) as write, tab(browser) as page:
        watched(page, times, OURS, address, write, steps)
        long_task(times, "live", page)


def trackio_live(browser: Any, server: Server, times: Times, folder: Path, steps: int) -> None:
    """Trackio's page of the same steps. It asks for all of them anew every second."""
    command = [str(VIEWERS / "trackio/bin/python"), str(INGEST), "steps", PROJECT]
    environment = {**os.environ, **trackio_environment(folder)}
    with (
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        tab(browser) as page,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        given = process.stdin
        while (line := process.stdout.readline()) and READY not in line:
            pass
        numbers = itertools.count()

        def write() -> None:
            given.write(json.dumps(data.series(next(numbers))) + "\n")
            given.flush()

        try:
            watched(page, times, "Trackio", f"{server.url}/?project={PROJECT}", write, steps)
        finally:
            process.terminate()


def watched(page: Tab, times: Times, side: str, address: str, write: Callable[[], None], steps: int) -> None:
    """Steps of 40 series, 25 a second, on a page of training: bytes for each step, and what scripts hold."""
    for _ in range(20):
        write()
    page.open(address, "document.querySelector('canvas')")
    page.page.wait_for_timeout(2000)
    heap, before = page.heap(), page.bytes
    last = time.monotonic()
    for _ in range(steps):
        write()
        last += 0.04
        page.page.wait_for_timeout(max(1, 1000 * (last - time.monotonic())))
    page.page.wait_for_timeout(2000)
    times.add("live bytes", side, (page.bytes - before) / steps)
    times.add("live heap", side, page.heap() - heap)
