"""Times in a real browser: Debian's Chromium without a window, through Playwright.

A time ends with the frame after the one in which a condition became true, so what the reader waits for is on the
screen. Times of loading count from the navigation, and times of keys from the moment that the browser got the key.
"""

import json
import math
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_MS = 30_000
"""After this a page is given up."""
WATCH = """
(() => {
  const bench = (window.bench = { tasks: [], key: 0 });
  new PerformanceObserver((list) => {
    for (const one of list.getEntries()) bench.tasks.push([one.startTime, one.duration]);
  }).observe({ type: "longtask", buffered: true });
  addEventListener("keydown", (event) => (bench.key = event.timeStamp), true);
  bench.until = (test, patience = PATIENCE) => new Promise((done, fail) => {
    const late = performance.now() + patience;
    const look = () => {
      let seen = false;
      try { seen = test(); } catch { /* not there yet */ }
      if (seen) requestAnimationFrame(() => done(performance.now()));
      else if (performance.now() > late) fail(new Error("never true: " + test));
      else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
  });
  bench.text = (selector) => document.querySelector(selector)?.textContent.trim() ?? "";
})();
""".replace("PATIENCE", str(PATIENCE_MS))


class Times:
    """Measured values by what was measured and by viewer."""

    def __init__(self) -> None:
        self.all: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def add(self, what: str, side: str, value: float) -> None:
        self.all[what, side].append(value)

    def median(self, what: str, side: str = "agentrl") -> float:
        return statistics.median(self.all[what, side])

    def p95(self, what: str, side: str = "agentrl") -> float:
        """The nearest rank, which of few values is the greatest."""
        values = sorted(self.all[what, side])
        return values[math.ceil(0.95 * len(values)) - 1]

    def greatest(self, what: str, side: str = "agentrl") -> float:
        return max(self.all[what, side])

    def has(self, what: str, side: str = "agentrl") -> bool:
        return (what, side) in self.all


class Tab:
    """A window of 1280 by 800 pixels with an empty cache."""

    def __init__(self, page: Any, client: Any) -> None:
        self.page, self.client = page, client
        self.bytes = self.requests = 0
        """What came over the wire, with headers; of event streams what they have sent so far."""
        self._streams: set[str] = set()
        client.on("Network.responseReceived", self._began)
        client.on("Network.dataReceived", self._streamed)
        client.on("Network.loadingFinished", self._loaded)

    def _began(self, event: dict[str, Any]) -> None:
        if event["type"] == "EventSource":
            self._streams.add(event["requestId"])

    def _streamed(self, event: dict[str, Any]) -> None:
        if event["requestId"] in self._streams:
            self.bytes += int(event["dataLength"])

    def _loaded(self, event: dict[str, Any]) -> None:
        self.bytes += int(event["encodedDataLength"])
        self.requests += 1

    def open(self, url: str, test: str, patience_ms: int = PATIENCE_MS) -> float:
        """Milliseconds from the navigation until an expression is true on the page."""
        self.page.goto("about:blank")
        self.page.add_init_script(f"bench.opened = bench.until(() => {test}, {patience_ms})")
        self.page.goto(url, wait_until="commit")
        return float(self.page.evaluate("bench.opened"))

    def act(self, script: str, test: str) -> float:
        """Milliseconds from a statement until an expression is true."""
        timed = f"const from = performance.now(); {script}; return await bench.until(() => {test}) - from;"
        return float(self.page.evaluate(f"(async () => {{ {timed} }})()"))

    def press(self, key: str, test: str) -> float:
        """Milliseconds from a key until an expression is true."""
        self.page.evaluate(f"void (bench.wanted = bench.until(() => {test}))")
        self.page.keyboard.press(key)
        return float(self.page.evaluate("bench.wanted.then((when) => when - bench.key)"))

    def wait(self, test: str) -> None:
        self.page.evaluate(f"bench.until(() => {test})")

    def longest(self) -> float:
        """Milliseconds of the longest task of the main thread so far; 0 if none took more than 50."""
        return float(self.page.evaluate("Math.max(0, ...bench.tasks.map((one) => one[1]))"))

    def forget(self) -> None:
        """Long tasks until now."""
        self.page.evaluate("void (bench.tasks.length = 0)")

    def heap(self) -> float:
        """Mebibytes that scripts hold, after a collection of garbage."""
        self.client.send("HeapProfiler.collectGarbage")
        return float(self.client.send("Runtime.getHeapUsage")["usedSize"]) / 2**20


@contextmanager
def traced(browser: Any, page: Tab, times: Times, what: str) -> Iterator[None]:
    """Adds the milliseconds of processor time of the longest task of the main thread meanwhile, which unlike its
    duration does not grow with other load of the machine."""
    browser.start_tracing(page=page.page, categories=["toplevel"])
    yield
    events = json.loads(browser.stop_tracing())["traceEvents"]
    names = ((event, event["args"]["name"]) for event in events if event["name"] == "thread_name")
    main = {(event["pid"], event["tid"]) for event, name in names if name == "CrRendererMain"}
    tasks = (event for event in events if event["name"].endswith("RunTask") and (event["pid"], event["tid"]) in main)
    times.add(what, "agentrl", max(event.get("tdur", 0) for event in tasks) / 1000)


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "the benchmark needs Debian's chromium: sudo apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def tab(browser: Any) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.add_init_script(WATCH)
    client = context.new_cdp_session(page)
    client.send("Network.enable")
    try:
        yield Tab(page, client)
    finally:
        context.close()
