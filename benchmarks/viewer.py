"""The viewer against those of inspect-ai and arize-phoenix, on the same rows, in one browser, in turns; and live steps
against trackio.

    python benchmarks/viewer.py                 200,000 rows; `make bench-viewer` installs the other viewers first
    SCALE=small python benchmarks/viewer.py     5,000 rows, under a minute once the store is there, Inspect alone
    CHECK=1 ...                                 exit code 1 if a target is missed

Each line is a figure, its target and `met` or `MISSED`. Each repetition does everything once, with one viewer after the
other, so load of the machine falls on all. A page that is opened by its address is opened in a window with an empty
cache; others are opened by a link within the viewer. No long trajectory is opened twice. The store, and what the other
viewers were fed, are kept in ``build/bench-viewer`` for the next run. Viewers that are not installed are left out.
"""

import os
import shutil
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
from viewer_browser import PATIENCE_MS, Tab, Times, chromium, traced
from viewer_pages import OURS
from viewer_sides import ROOT, Server, Side, serving

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.storage.object_store import storage_of

SMALL = os.environ.get("SCALE") == "small"
ROWS = 5_000 if SMALL else 200_000
LENGTHS = (20_000, 100_000) if SMALL else (100_000, 1_000_000)
ATTEMPTS = 128 if SMALL else 1024
STEPS = 50 if SMALL else 1000
COMMITS = 1 if SMALL else 3
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
    wanted = [sides.inspect(FOLDER)] + ([] if SMALL else [sides.phoenix(FOLDER)])
    others = [side for side in wanted if sides.is_installed(side)]
    fed = []
    for side in others:
        rows = data.lines(ROWS, LENGTHS[:1], ATTEMPTS)
        try:
            told = sides.feed_inspect(FOLDER, rows) if side.name == "Inspect" else sides.feed_phoenix(FOLDER, rows)
        except (AssertionError, RuntimeError) as error:
            report(f"{side.name} did not take the rows, and is left out: {error}"[:110], "-")
            continue
        fed.append(side)
        report(f"rows that {side.name} was fed, in {told['seconds']:,.0f} s", f"{told['rows']:,}")
    for side in wanted:
        if side not in others:
            report(f"{side.name} is not installed in {sides.VIEWERS}: left out", "-")
    return fed


# one repetition


def start(times: Times) -> None:
    """Until our viewer answers, then until the first page of rows, and the memory that this and the histograms took."""
    with serving(sides.ours(FOLDER), FOLDER) as server:
        times.add("start", OURS, server.seconds)
        began = time.perf_counter()
        sides.get(f"{server.url}/api/rows?limit=200")
        times.add("first page", OURS, time.perf_counter() - began)
        sides.get(f"{server.url}/api/facets")
        times.add("memory", OURS, server.peak())


def without_copies(times: Times) -> None:
    """The first page of a store of which this machine has no copies of columns yet."""
    shutil.rmtree(storage_of(FOLDER / "store").working_folder() / "scalars", ignore_errors=True)
    with serving(sides.ours(FOLDER), FOLDER) as server:
        began = time.perf_counter()
        sides.get(f"{server.url}/api/rows?limit=200&columns=env,success,reward,prompt")
        times.add("first page without copies", OURS, time.perf_counter() - began)
        times.add("memory without copies", OURS, server.peak())


def repetition(browser: Any, servers: dict[str, Server], stay: dict[str, Any], times: Times, turn: int) -> None:
    ours, other = servers[OURS], servers.get("Inspect")
    buffer = TrajectoryBuffer(FOLDER / "store")

    def opened(action: Callable[[Tab], None]) -> None:
        with pages.table(browser, ours) as page:
            action(page)

    for name, server in servers.items():
        tried(times, name, "overview", lambda server=server: pages.overview(browser, server, times))
    tried(times, OURS, "keys", lambda: pages.keys(browser, ours, times, turn))
    if "Inspect" in stay:
        tried(times, "Inspect", "keys", lambda: pages.inspect_keys(stay["Inspect"], times, turn))
    tried(times, OURS, "trajectories", lambda: pages.trajectory(browser, ours, times, turn, LENGTHS))
    if other:
        tried(times, "Inspect", "trajectory", lambda: pages.inspect_sample(browser, other, times, turn, LENGTHS[0]))
    tried(times, "spans", "an element per token", lambda: pages.spans(browser, ours, times, turn, LENGTHS[0]))
    tried(times, OURS, "task", lambda: opened(lambda page: pages.task(page, times, turn, ROWS, ATTEMPTS)))
    tried(times, OURS, "commits", lambda: pages.commits(browser, ours, times, buffer, COMMITS))
    if "Phoenix" in stay:
        tried(times, "Phoenix", "commits", lambda: pages.phoenix_commits(*stay["Phoenix"], times, 2))


def processor_times(browser: Any, ours: Server, times: Times) -> None:
    """Pages that are much work once more, for the processor time of their longest task."""
    work: dict[str, Callable[[Tab], None]] = {
        "task": lambda page: pages.task(page, Times(), 0, ROWS, ATTEMPTS),
    }
    work |= {f"{n:,} tokens": lambda page, n=n: pages.read(page, n) for n in LENGTHS}

    def measure(name: str) -> None:
        with pages.table(browser, ours) as page, traced(browser, page, times, f"processor time: {name}"):
            work[name](page)

    for name in list(work)[-1 if SMALL else 0 :]:
        tried(times, OURS, f"{name}, traced", lambda name=name: measure(name))


def trackio(browser: Any, times: Times) -> None:
    """The live steps in Trackio, which runs only meanwhile."""
    side = sides.trackio(FOLDER)
    if not sides.is_installed(side):
        report(f"Trackio is not installed in {sides.VIEWERS}: left out", "-")
        return
    shutil.rmtree(FOLDER / "trackio", ignore_errors=True)

    def show() -> None:
        with serving(side, FOLDER) as server:
            pages.trackio_live(browser, server, times, FOLDER, STEPS)

    tried(times, side.name, "live", show)


def tried(times: Times, side: str, what: str, action: Callable[[], None]) -> None:
    """What fails, or never comes onto a page, is counted and said; the others go on."""
    try:
        action()
    except Exception as error:
        times.add("failed", side, 1)
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        report(f"{side}, {what}: {why}"[:110], "failed")


# the table


def below(what: str, value: float, limit: float, unit: str, digits: int = 0) -> None:
    report(what, f"{value:,.{digits}f} {unit}", f"< {limit:g} {unit}", value < limit)


def against(times: Times, what: str, side: str, least: float, label: str = "") -> None:
    """How many times as long, or as much, another side took in the median."""
    if times.has(what, side) and times.has(what):
        theirs, mine = times.median(what, side), times.median(what)
        note = f"; p95 {times.p95(what, side):,.0f}"
        report(
            f"  {side}{label}: {theirs:,.0f}{note}", f"{theirs / mine:,.1f}x", f">= {least:g}x", theirs / mine >= least
        )


def told(times: Times, what: str, label: str, limit: float, by: str = "median") -> None:
    if not times.has(what):
        report(label, "never came", f"< {limit:g} ms", False)
        return
    value = getattr(times, by)(what)
    other = f"p95 {times.p95(what):,.0f}" if by == "median" else f"median {times.median(what):,.0f}"
    below(f"{label}, {by}; {other}", value, limit, "ms")


def table(times: Times) -> None:
    told(times, "overview", "overview, empty cache, to the first row", 600)
    against(times, "overview", "Inspect", 3)
    against(times, "overview", "Phoenix", 1)
    if times.has("bytes"):
        below(f"bytes until then, {times.median('requests'):.0f} requests", times.median("bytes"), 120, "kB")
    against(times, "bytes", "Inspect", 10, " kB")
    against(times, "bytes", "Phoenix", 10, " kB")
    told(times, "key", f"key -> rows and 12 histograms of {ROWS:,} rows", 150, "p95")
    against(times, "key", "Inspect", 10, ", rows alone")
    told(times, "long", f"open {LENGTHS[0]:,} tokens under a lens, by a link", 400)
    told(times, "long by address", "  by its address, empty cache", 400)
    against(times, "long by address", "Inspect", 5, ", no lens")
    told(times, "longest row", f"open {LENGTHS[1]:,} tokens under a lens, by a link", 1000)
    for what, label in (("lens", "change the lens"), ("jump", "jump to the last token")):
        told(times, what, f"{label} of {LENGTHS[0]:,} tokens", 100)
        against(times, what, "spans", 20, ", an element per token")
    told(times, "task", f"task with {ATTEMPTS:,} attempts, two aligned", 300)
    told(times, "commit", "commit -> row on the screen", 1500, "p95")
    if times.has("commit", "Phoenix"):
        report("  Phoenix, p95", f"{times.p95('commit', 'Phoenix'):,.0f} ms")
    if times.has("live bytes"):
        below(f"{STEPS:,} live steps x {data.SERIES} series: a step", times.median("live bytes") / 1000, 5, "kB", 2)
        against(times, "live bytes", "Trackio", 1, ", bytes")
        below("  growth of the heap", times.median("live heap"), 20, "MiB", 1)
    if times.has("live heap", "Trackio"):
        report("  Trackio, growth of the heap", f"{times.median('live heap', 'Trackio'):.1f} MiB")
    servers(times)
    tasks(times)


def servers(times: Times) -> None:
    """How soon each viewer answers, and what it holds."""
    below("`agentrl view` until it answers, median", times.median("start"), 1.5, "s", 2)
    below("  first page and histograms: memory, greatest", times.greatest("memory"), 400, "MiB")
    report("  first page after that, median", f"{times.median('first page'):.2f} s")
    report("  first page, no copies of columns yet", f"{times.median('first page without copies'):.2f} s")
    below("  memory then", times.greatest("memory without copies"), 400, "MiB")
    held = times.greatest("memory at the end")
    report(f"  memory at the end, {LENGTHS[1]:,}-token rows were opened too", f"{held:,.0f} MiB")
    for side in ("Inspect", "Phoenix"):
        if times.has("memory at the end", side):
            held = times.greatest("memory at the end", side)
            report(
                f"  {side}: answers after {times.median('start', side):.1f} s; memory at the end", f"{held:,.0f} MiB"
            )


def tasks(times: Times) -> None:
    """Long tasks of the main thread, by page."""
    if times.has("longest task"):
        below("longest task of the main thread on any page", times.greatest("longest task"), 100, "ms")
    for what, side in sorted(times.all):
        if what.startswith("longest task: "):
            middle = statistics.median(times.all[what, side])
            report(f"  {what[14:]}, median {middle:,.0f}", f"{times.greatest(what):,.0f} ms")
    spent = {what[16:]: times.greatest(what) for what, _ in times.all if what.startswith("processor time: ")}
    if spent:
        below("  processor time of the longest task, which other load leaves alone", max(spent.values()), 100, "ms")
    for name, value in spent.items():
        report(f"    {name}", f"{value:,.0f} ms")


def main() -> None:
    report(f"load average at the start, {os.cpu_count()} cores", f"{os.getloadavg()[0]:.1f}")
    others = prepare()
    times, began = Times(), time.perf_counter()
    without_copies(times)
    for _ in range(REPETITIONS):
        start(times)
    with chromium() as browser, ExitStack() as stack:
        running: dict[str, Server] = {OURS: stack.enter_context(serving(sides.ours(FOLDER), FOLDER))}
        for side in others:
            started = serving(side, FOLDER)
            tried(
                times,
                side.name,
                "start",
                lambda name=side.name, page=started: running.update({name: stack.enter_context(page)}),
            )
        stay: dict[str, Any] = {}
        opened = {
            "Inspect": lambda: stack.enter_context(pages.inspect_rows(browser, running["Inspect"], times)),
            "Phoenix": lambda: stack.enter_context(pages.phoenix_spans(browser, running["Phoenix"])),
        }
        for name in running.keys() & opened.keys():
            times.add("start", name, running[name].seconds)
            tried(times, name, "all rows", lambda name=name: stay.update({name: opened[name]()}))
        for turn in range(REPETITIONS):
            repetition(browser, running, stay, times, turn)
        processor_times(browser, running[OURS], times)
        tried(times, OURS, "live", lambda: pages.live(browser, running[OURS], times, FOLDER / "store", STEPS))
        if not SMALL:
            trackio(browser, times)
        for name, server in running.items():
            times.add("memory at the end", name, server.peak())
    table(times)
    for (what, who), values in sorted(times.all.items()):
        if what == "failed":
            report(f"failed, or not on the page after {PATIENCE_MS / 1000:g} s: {who}", str(len(values)))
    report(f"repetitions; seconds that they took: {time.perf_counter() - began:,.0f}", str(REPETITIONS))
    report("load average at the end", f"{os.getloadavg()[0]:.1f}")
    if any(line[3] == "MISSED" for line in lines) and os.environ.get("CHECK"):
        sys.exit(1)


if __name__ == "__main__":
    main()
