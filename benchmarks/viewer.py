"""The viewer against those of inspect-ai and arize-phoenix, on the same rows, in one browser, in turns.

    python benchmarks/viewer.py                 200,000 rows; `make bench-viewer` installs the other viewers first
    SCALE=small python benchmarks/viewer.py     5,000 rows, under a minute once the store is there
    CHECK=1 ...                                 exit code 1 if a target is missed

Each line is a figure, its target and `met` or `MISSED`. Each repetition does everything once, with one viewer after the
other, so load of the machine falls on all. A page that is opened by its address is opened in a window with an empty
cache; others are opened by a link within the viewer. No long trajectory is opened twice. The store, and what the other
viewers were fed, are kept in ``build/bench-viewer`` for the next run. Viewers that are not installed are left out.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import viewer_data as data
import viewer_pages as pages
import viewer_sides as sides
from viewer_browser import Times, chromium
from viewer_sides import ROOT, Server, Side, serving

from datastore.buffer import TrajectoryBuffer
from datastore.places import place

SMALL = os.environ.get("SCALE") == "small"
ROWS = 5_000 if SMALL else 200_000
LENGTHS = (20_000, 100_000) if SMALL else (100_000, 1_000_000)
ATTEMPTS = 128 if SMALL else 1024
STEPS = 100 if SMALL else 1000
REPETITIONS = int(os.environ.get("REPETITIONS", 1 if SMALL else 7))
FOLDER = Path(os.environ.get("BENCH_VIEWER", ROOT / "build/bench-viewer")).resolve() / str(ROWS)

lines: list[tuple[str, str, str, str]] = []


def report(what: str, figure: str, target: str = "", met: bool | None = None) -> None:
    verdict = "" if met is None else ("met" if met else "MISSED")
    lines.append((what, figure, target, verdict))
    print(f"{what:<72} {figure:>14}  {target:<12} {verdict}", flush=True)


# before


def prepare() -> list[Side]:
    """Make the store, and feed the other viewers that are installed, unless it was done before. Returns them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = FOLDER / "store.made"
    if not made.exists():
        data.make_store(FOLDER, ROWS, LENGTHS, ATTEMPTS)
        made.touch()
    report("rows, with those of a task of many attempts", f"{ROWS + ATTEMPTS:,}")
    others = [side for side in (sides.inspect(FOLDER), sides.phoenix(FOLDER)) if sides.is_installed(side)]
    feeds = {"Inspect": sides.feed_inspect, "Phoenix": sides.feed_phoenix}
    for side in others:
        fed = feeds[side.name](FOLDER, data.lines(ROWS, LENGTHS[:1], ATTEMPTS))
        report(f"rows that {side.name} was fed, in {fed['seconds']:,.0f} s", f"{fed['rows']:,}")
    for name in {"Inspect", "Phoenix"} - {side.name for side in others}:
        report(f"{name} is not installed in {sides.VIEWERS}: left out", "-")
    return others


# one repetition


def start(times: Times) -> None:
    """Until our viewer answers, then until the first page of rows, and the memory that this and the histograms took."""
    with serving(sides.ours(FOLDER), FOLDER) as server:
        times.add("start", pages.OURS, server.seconds)
        began = time.perf_counter()
        sides.get(f"{server.url}/api/rows?limit=200")
        times.add("first page", pages.OURS, time.perf_counter() - began)
        sides.get(f"{server.url}/api/facets")
        times.add("memory", pages.OURS, server.peak())


def without_copies(times: Times) -> None:
    """The first page of a store of which this machine has no copies of columns yet."""
    import shutil

    shutil.rmtree(place(FOLDER / "store").working_folder() / "scalars", ignore_errors=True)
    with serving(sides.ours(FOLDER), FOLDER) as server:
        began = time.perf_counter()
        sides.get(f"{server.url}/api/rows?limit=200&columns=env,success,reward,prompt")
        times.add("first page without copies", pages.OURS, time.perf_counter() - began)
        times.add("memory without copies", pages.OURS, server.peak())


def repetition(browser: Any, servers: dict[str, Server], stay: dict[str, Any], times: Times, turn: int) -> None:
    ours, other = servers[pages.OURS], servers.get("Inspect")
    for server in servers.values():
        tried(times, lambda server=server: pages.overview(browser, server, times))
    tried(times, lambda: pages.keys(browser, ours, times, turn))
    if "Inspect" in stay:
        tried(times, lambda: pages.inspect_keys(stay["Inspect"], times, turn))
    tried(times, lambda: pages.trajectory(browser, ours, times, turn, LENGTHS))
    if other:
        tried(times, lambda: pages.inspect_sample(browser, other, times, turn, LENGTHS[0]))
    tried(times, lambda: pages.spans(browser, ours, times, turn, LENGTHS[0]))
    tried(times, lambda: pages.task(browser, ours, times, turn, ROWS, ATTEMPTS))
    tried(times, lambda: pages.commits(browser, ours, times, TrajectoryBuffer(FOLDER / "store"), 3))
    if "Phoenix" in stay:
        tried(times, lambda: pages.phoenix_commits(*stay["Phoenix"], times, 2))


def tried(times: Times, action: Callable[[], None]) -> None:
    """What never comes onto a page is counted and said; the others go on."""
    from playwright.sync_api import Error

    try:
        action()
    except Error as error:
        times.add("failed", pages.OURS, 1)
        report(str(error).strip().splitlines()[0][:70], "failed")


# the table


def below(what: str, value: float, limit: float, unit: str, digits: int = 0) -> None:
    report(what, f"{value:,.{digits}f} {unit}", f"< {limit:g} {unit}", value < limit)


def against(times: Times, what: str, side: str, least: float, said: str = "") -> None:
    """How many times as long, or as much, another side took in the median."""
    if times.has(what, side):
        theirs, mine = times.median(what, side), times.median(what)
        note = f"; p95 {times.p95(what, side):,.0f}"
        report(
            f"  {side}{said}: {theirs:,.0f}{note}", f"{theirs / mine:,.1f}x", f">= {least:g}x", theirs / mine >= least
        )


def told(times: Times, what: str, said: str, limit: float, by: str = "median") -> None:
    value = getattr(times, by)(what)
    other = f"p95 {times.p95(what):,.0f}" if by == "median" else f"median {times.median(what):,.0f}"
    below(f"{said}, {by}; {other}", value, limit, "ms")


def table(times: Times) -> None:
    told(times, "overview", "overview, empty cache, to the first row", 600)
    against(times, "overview", "Inspect", 3)
    against(times, "overview", "Phoenix", 1)
    below(f"bytes until then, {times.median('requests'):.0f} requests", times.median("bytes"), 120, "kB")
    against(times, "bytes", "Inspect", 10, " kB")
    against(times, "bytes", "Phoenix", 10, " kB")
    told(times, "key", f"key -> rows and 12 histograms of {ROWS:,} rows", 150, "p95")
    against(times, "key", "Inspect", 10, ", rows alone")
    told(times, "long", f"open {LENGTHS[0]:,} tokens under a lens, by a link", 400)
    against(times, "long", "Inspect", 5, ", no lens")
    told(times, "long by address", "  by its address, empty cache", 400)
    against(times, "long by address", "Inspect", 5, ", no lens")
    told(times, "longest row", f"open {LENGTHS[1]:,} tokens under a lens, by a link", 1000)
    for what, said in (("lens", "change the lens"), ("jump", "jump to the last token")):
        told(times, what, f"{said} of {LENGTHS[0]:,} tokens", 100)
        against(times, what, "spans", 20, ", an element per token")
    told(times, "task", f"task with {ATTEMPTS:,} attempts, two aligned", 300)
    told(times, "commit", "commit -> row on the screen", 1500, "p95")
    if times.has("commit", "Phoenix"):
        report("  Phoenix, p95", f"{times.p95('commit', 'Phoenix'):,.0f} ms")
    if times.has("live bytes"):
        below(f"{STEPS:,} live steps x {data.SERIES} series: a step", times.median("live bytes") / 1000, 5, "kB", 2)
        below("  growth of the heap", times.median("live heap"), 20, "MiB", 1)
    below("`agentrl view` until it answers, median", times.median("start"), 1.5, "s", 2)
    below("  first page and histograms: memory, greatest", times.greatest("memory"), 400, "MiB")
    report("  first page after that, median", f"{times.median('first page'):.2f} s")
    report("  first page, no copies of columns yet", f"{times.median('first page without copies'):.2f} s")
    below("  memory then", times.greatest("memory without copies"), 400, "MiB")
    held = times.greatest("memory at the end")
    report(f"  memory at the end, {LENGTHS[1]:,}-token rows were opened too", f"{held:,.0f} MiB")
    for side in ("Inspect", "Phoenix"):
        if times.has("start", side):
            held = times.greatest("memory at the end", side)
            report(
                f"  {side}: answers after {times.median('start', side):.1f} s; memory at the end", f"{held:,.0f} MiB"
            )
    below("longest task of the main thread on any page", times.greatest("longest task"), 100, "ms")
    spent = times.greatest("processor time of a task")
    report("  its processor time, when long trajectories are opened and read", f"{spent:,.0f} ms")
    for what, side in sorted(times.all):
        if what.startswith("longest task: "):
            report(
                f"  {what[14:]}, median {statistics.median(times.all[what, side]):,.0f}",
                f"{times.greatest(what):,.0f} ms",
            )


def main() -> None:
    report(f"load average at the start, {os.cpu_count()} cores", f"{os.getloadavg()[0]:.1f}")
    others = prepare()
    times, began = Times(), time.perf_counter()
    without_copies(times)
    for _ in range(REPETITIONS):
        start(times)
    with chromium() as browser, ExitStack() as stack:
        every = [sides.ours(FOLDER), *others]
        servers = {side.name: stack.enter_context(serving(side, FOLDER)) for side in every}
        for side in others:
            times.add("start", side.name, servers[side.name].seconds)
        stay: dict[str, Any] = {}
        opened = {
            "Inspect": lambda: stack.enter_context(pages.inspect_rows(browser, servers["Inspect"], times)),
            "Phoenix": lambda: stack.enter_context(pages.phoenix_spans(browser, servers["Phoenix"])),
        }
        for side in others:
            tried(times, lambda name=side.name: stay.update({name: opened[name]()}))
        for turn in range(REPETITIONS):
            repetition(browser, servers, stay, times, turn)
        for length in LENGTHS:
            pages.processor_time(browser, servers[pages.OURS], times, length)
        pages.live(browser, servers[pages.OURS], times, FOLDER / "store", STEPS)
        for server in servers.values():
            times.add("memory at the end", server.side.name, server.peak())
    table(times)
    report("pages on which something never came", str(len(times.all["failed", pages.OURS])))
    report(f"repetitions; seconds that they took: {time.perf_counter() - began:,.0f}", str(REPETITIONS))
    report("load average at the end", f"{os.getloadavg()[0]:.1f}")
    if any(line[3] == "MISSED" for line in lines) and os.environ.get("CHECK"):
        sys.exit(1)


if __name__ == "__main__":
    main()
