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
ALL_FACETS = "document.querySelectorAll('.facet').length === 12"
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


def long_task(times: Times, where: str, one: Tab) -> None:
    times.add("longest task", OURS, one.longest())
    times.add(f"longest task: {where}", OURS, one.longest())


def follow(path: str) -> str:
    """The statement that clicks a link to a page of our viewer."""
    made = f"const link = document.createElement('a'); link.href = {json.dumps(path)}; document.body.append(link);"
    return f"{made} link.click(); link.remove()"


@contextmanager
def table(browser: Any, server: Server) -> Iterator[Tab]:
    """Our buffer page with its rows and histograms, from where other pages are opened. It has been open for a second,
    after which it has the modules of other pages."""
    with tab(browser) as one:
        one.open(f"{server.url}/buffer", FIRST_ROW)
        one.wait(f"{ALL_FACETS} && {ALL_MODULES}")
        yield one


# the first page


def overview(browser: Any, server: Server, times: Times) -> None:
    """Until the first row of the first page has text, and what came over the wire until then."""
    there = {OURS: FIRST_LINE, "Inspect": "document.body.textContent.includes('warm/3f2a91c4')"}
    there["Phoenix"] = "bench.text('#root').includes('default')"
    with tab(browser) as one:
        times.add("overview", server.side.name, one.open(f"{server.url}/", there[server.side.name]))
        one.page.wait_for_timeout(100)
        times.add("bytes", server.side.name, one.bytes / 1000)
        times.add("requests", server.side.name, one.requests)
        if server.side.name == OURS:
            one.wait("!document.body.textContent.includes('the plan is being made')")
            long_task(times, "overview", one)


# the filter


def keys(browser: Any, server: Server, times: Times, turn: int) -> None:
    """Keys in the filter of our buffer, until the number of rows, the rows and all histograms are new."""
    with tab(browser) as one:
        times.add("buffer", OURS, one.open(f"{server.url}/buffer", FIRST_ROW))
        one.wait(ALL_FACETS)
        for number in range(5 * turn, 5 * turn + 5):
            start, digit = NUMBERS[number % len(NUMBERS)]
            one.page.fill("#filter", f"reward > {start}")
            one.page.wait_for_timeout(600)
            one.page.evaluate(f"void (bench.before = [bench.text('.counts b'), {FACETS}])")
            new = f"bench.text('.counts b') !== bench.before[0] && {FACETS} !== bench.before[1]"
            times.add("key", OURS, one.press(str(digit), new))
        long_task(times, "buffer", one)


@contextmanager
def inspect_rows(browser: Any, server: Server, times: Times) -> Iterator[Tab]:
    """Inspect's page with all rows, which stays open."""
    with tab(browser) as one:
        times.add("buffer", "Inspect", one.open(f"{server.url}/#/logs/rows.eval", INSPECT_ROWS, FIRST_MS))
        one.page.focus(".cm-content", timeout=FIRST_MS)
        yield one


def inspect_keys(one: Tab, times: Times, turn: int) -> None:
    """Keys in the filter of Inspect, until the number of rows is new. It has no histograms."""
    for number in range(2 * turn, 2 * turn + 2):
        start, digit = NUMBERS[number % len(NUMBERS)]
        one.page.keyboard.press("Control+A")
        one.page.keyboard.type(f"exact > {start}")
        one.page.keyboard.press("Escape")
        one.page.wait_for_timeout(1500)
        one.page.evaluate(f"void (bench.before = {INSPECT_ROWS})")
        times.add("key", "Inspect", one.press(str(digit), f"{INSPECT_ROWS} !== bench.before"))


# a long trajectory


def trajectory(browser: Any, server: Server, times: Times, turn: int, lengths: tuple[int, ...]) -> None:
    """Long trajectories: by address, from the table; another lens, and the last token of the shorter one."""
    usual, longest = lengths
    with tab(browser) as one:
        address = f"{server.url}/row/{data.long_id(usual, turn)}?lens=logprob"
        times.add("long by address", OURS, one.open(address, FIRST_TOKEN))
        long_task(times, "long by address", one)
    with table(browser, server) as one:
        path = f"/row/{data.long_id(usual, data.COPIES - 1 - turn)}?lens=logprob"
        times.add("long", OURS, one.act(follow(path), FIRST_TOKEN))
        one.page.wait_for_timeout(1000)
        lens_and_jump(one, times, usual)
        long_task(times, "long", one)
    with table(browser, server) as one:
        times.add("longest row", OURS, one.act(follow(f"/row/{data.long_id(longest, turn)}?lens=logprob"), FIRST_TOKEN))
        one.page.wait_for_timeout(3000)
        long_task(times, "longest row", one)


def read(one: Tab, length: int) -> None:
    """A long trajectory is opened and read."""
    one.act(follow(f"/row/{data.long_id(length, 0)}?lens=logprob"), FIRST_TOKEN)
    one.page.wait_for_timeout(1000)
    lens_and_jump(one, Times(), length)


def lens_and_jump(one: Tab, times: Times, length: int) -> None:
    for _ in range(2):
        times.add("lens", OURS, one.press("[", "!document.querySelector('.t[class*=heat]')"))
        times.add("lens", OURS, one.press("]", "document.querySelector('.t[class*=heat]')"))
    press = (
        "const map = document.querySelector('.minimap'); const box = map.getBoundingClientRect();"
        " map.dispatchEvent(new PointerEvent('pointerdown', {clientY: %s, bubbles: true}))"
    )
    for _ in range(2):
        last = f"bench.text('.inspector').includes('token {length - 1} of') && {NOW_IN_VIEW}"
        times.add("jump", OURS, one.act(press % "box.bottom - 0.0001", last))
        one.act(press % "box.top", f"bench.text('.inspector').includes('token 0 of') && {NOW_IN_VIEW}")


def inspect_sample(browser: Any, server: Server, times: Times, turn: int, length: int) -> None:
    """The same trajectory in Inspect, by address: its page of a log of one trajectory shows that one at once."""
    name = data.long_id(length, turn)
    with tab(browser) as one:
        address = f"{server.url}/#/logs/{name}.eval/samples/sample/{name}/1/"
        seen = f"document.body.textContent.includes({json.dumps(data.answer_words(length, turn))})"
        times.add("long by address", "Inspect", one.open(address, seen))


def spans(browser: Any, server: Server, times: Times, turn: int, length: int) -> None:
    """The same lens and jump on a page that has an element for each token at all times."""
    with tab(browser) as one:
        styles = "<link rel=stylesheet href=/static/theme.css><link rel=stylesheet href=/static/style.css>"
        body = f"<!doctype html>{styles}<body><div id=all></div><script type=module>{SPANS.read_text()}</script>"
        one.page.route("**/spans*", lambda route: route.fulfill(body=body, content_type="text/html"))
        address = f"{server.url}/spans?{data.long_id(length, turn)}"
        times.add("long", "spans", one.open(address, "bench.drawn"))
        times.add("lens", "spans", one.act("bench.use('mask')", "true"))
        times.add("lens", "spans", one.act("bench.use('logprob')", "true"))
        times.add("jump", "spans", one.act("bench.last()", "true"))


# attempts at one task


def task(one: Tab, times: Times, turn: int, rows: int, attempts: int) -> None:
    a, b = (data.attempt_id(rows, 2 * turn + number) for number in (0, 1))
    there = f"document.querySelectorAll('.strip .mark').length === {attempts} && bench.text('.versus .tokens')"
    path = f"/task?env=lookup&task_id={data.MANY}&a={a}&b={b}"
    times.add("task", OURS, one.act(follow(path), there))
    one.page.wait_for_timeout(500)
    long_task(times, "task", one)


# what is new


SEEN = "bench.until(() => %s).then((when) => performance.timeOrigin + when)"


def commits(browser: Any, server: Server, times: Times, buffer: Any, count: int) -> None:
    """From the end of a commit until its row is in our table."""
    with table(browser, server) as one:
        for number in range(count):
            one.page.wait_for_timeout(900 + 150 * number)
            name = data.append_row(buffer)
            committed = time.time()
            seen = one.page.evaluate(SEEN % f"{FIRST_ROW} === '{name}'")
            times.add("commit", OURS, max(0.0, seen - committed * 1000))
        long_task(times, "commits", one)


@contextmanager
def phoenix_spans(browser: Any, server: Server) -> Iterator[tuple[Tab, Any]]:
    """Phoenix's page of spans, which stays open, and a process that posts spans."""
    command = [str(VIEWERS / "arize/bin/python"), str(INGEST), "late", server.url]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        tab(browser) as one,
    ):
        assert process.stdout is not None
        project = process.stdout.readline().strip()
        one.open(f"{server.url}/projects/{project}/spans", "bench.text('#root').includes('rollout-')", FIRST_MS)
        yield one, process
        process.terminate()
        with suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.close()


def phoenix_commits(one: Tab, process: Any, times: Times, count: int) -> None:
    """From the answer to a post until the span is on the page, which Phoenix asks for anew every two seconds."""
    for _ in range(count):
        name = f"late-{time.time_ns()}"
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        committed = float(process.stdout.readline())
        seen = one.page.evaluate(SEEN % f"document.body.textContent.includes('{name}')")
        times.add("commit", "Phoenix", max(0.0, seen - committed * 1000))


# pictures


def prompt_map(one: Tab, times: Times) -> None:
    """The map of all prompts, then nearer by the wheel."""
    seen = "(document.querySelector('.plane')?.ariaLabel.match(/, (\\d+) in view/)?.[1] ?? 0)"
    times.add("map", OURS, one.act(follow("/map"), f"{seen} > 0"))
    one.page.wait_for_timeout(500)
    turn = (
        "const map = document.querySelector('.plane'); const box = map.getBoundingClientRect();"
        f" bench.before = {seen};"
        " map.dispatchEvent(new WheelEvent('wheel', {deltaY: -1, clientX: box.left + 1, clientY: box.top + 1,"
        " bubbles: true, cancelable: true}))"
    )
    for _ in range(3):
        times.add("wheel", OURS, one.act(turn, f"{seen} !== bench.before"))
    long_task(times, "map", one)


def search_tree(one: Tab, times: Times) -> None:
    """A tree as large as one is drawn, then from node to node."""
    path = f"/tree?artifact=search/{data.SEARCH[:8]}&task_id={data.SEARCHED}"
    times.add("tree", OURS, one.act(follow(path), "bench.text('.leaf.chosen')"))
    one.page.wait_for_timeout(500)
    for number in range(1, 4):
        there = f"bench.text('.node h2').startsWith('Node {number}')"
        times.add("node", OURS, one.press("j", there))
    long_task(times, "tree", one)


# training that goes on


def live(browser: Any, server: Server, times: Times, store: Path, steps: int) -> None:
    """Our page of training."""
    address = f"{server.url}/training?run={data.RUN}&stage=train"
    with data.training(store) as write, tab(browser) as one:
        watched(one, times, OURS, address, write, steps)
        long_task(times, "live", one)


def trackio_live(browser: Any, server: Server, times: Times, folder: Path, steps: int) -> None:
    """Trackio's page of the same steps. It asks for all of them anew every second."""
    command = [str(VIEWERS / "trackio/bin/python"), str(INGEST), "steps", PROJECT]
    environment = {**os.environ, **trackio_environment(folder)}
    with (
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        tab(browser) as one,
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
            watched(one, times, "Trackio", f"{server.url}/?project={PROJECT}", write, steps)
        finally:
            process.terminate()


def watched(one: Tab, times: Times, side: str, address: str, write: Callable[[], None], steps: int) -> None:
    """Steps of 40 series, 25 a second, on a page of training: bytes for each step, and what scripts hold."""
    for _ in range(20):
        write()
    one.open(address, "document.querySelector('canvas')")
    one.page.wait_for_timeout(2000)
    heap, before = one.heap(), one.bytes
    last = time.monotonic()
    for _ in range(steps):
        write()
        last += 0.04
        one.page.wait_for_timeout(max(1, 1000 * (last - time.monotonic())))
    one.page.wait_for_timeout(2000)
    times.add("live bytes", side, (one.bytes - before) / steps)
    times.add("live heap", side, one.heap() - heap)
