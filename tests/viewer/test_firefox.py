"""The pages in Firefox, which Debian has as firefox-esr. It is asked through WebDriver BiDi, which it speaks itself: a
driver of its own is not in Debian, and that of Playwright is for browsers that Playwright patches."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from watched import ENV

pytestmark = pytest.mark.viewer

PAGES = {
    "/": ".graph",
    "/buffer": ".grid [role=gridcell] a",
    "/row/breach": ".turn",
    "/row/breach?lens=logprob&t=60": ".t.now",
    "/row/long?lens=logprob": ".t",
    "/evaluation": ".lines",
    "/task?env=lookup&task_id=breach": ".strip",
    "/pair": ".lines",
    "/training": ".chart canvas",
    "/curation": ".lines",
    "/runs": ".narrow",
}

LEFT = re.compile(r"/api/events was interrupted while the page was loading|establish a connection to .*/api/events")
"""What Firefox says of a stream of events whose page was left, once it was open and before."""


class Firefox:
    """A window of Firefox. Questions and answers are WebDriver BiDi: https://www.w3.org/TR/webdriver-bidi/"""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.numbers = count(1)
        self.errors: list[str] = []
        self.ask("session.new", capabilities={})
        self.ask("session.subscribe", events=["log.entryAdded"])
        self.context = self.ask("browsingContext.create", type="tab")["context"]

    def ask(self, method: str, **params: Any) -> Any:
        """Raises RuntimeError with what Firefox says."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=60))
            if answer.get("method") == "log.entryAdded" and answer["params"]["level"] == "error":
                text = str(answer["params"]["text"])
                if not LEFT.search(text):
                    self.errors.append(text)
            if answer.get("id") == number:
                if "result" not in answer:
                    raise RuntimeError(f"{method}: {answer.get('message')}")
                return answer["result"]

    def value(self, expression: str) -> Any:
        target = {"context": self.context}
        answer = self.ask("script.evaluate", expression=expression, target=target, awaitPromise=True)
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.1)

    def open(self, url: str, ready: str) -> None:
        self.ask("browsingContext.navigate", context=self.context, url=url, wait="complete")
        self.until(f"document.querySelector({json.dumps(ready)}) !== null")


@pytest.fixture(scope="module")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    from websockets.sync.client import connect

    program = shutil.which("firefox-esr") or shutil.which("firefox")
    if program is None:
        pytest.skip("Firefox is not installed: sudo apt-get install firefox-esr")
    profile = tmp_path_factory.mktemp("firefox")
    command = [program, "--headless", "--no-remote", "--profile", str(profile), "--remote-debugging-port", "0"]
    environment = {**ENV, "HOME": str(profile)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            listening = (re.search(r"BiDi listening on (ws://\S+)", line) for line in process.stderr)
            address = next(match[1] for match in listening if match)
            with connect(f"{address}/session", max_size=None) as socket:
                yield Firefox(socket)
        finally:
            process.terminate()


def test_pages_work_in_firefox(firefox: Firefox, url: str) -> None:
    for path, ready in PAGES.items():
        firefox.open(url + path, ready)
        assert firefox.value("document.documentElement.scrollWidth <= innerWidth"), path
    opens = """new Promise((done) => {
      const events = new EventSource("/api/events");
      events.onopen = () => done(true);
      events.onerror = () => done(false);
    })"""
    assert firefox.value(opens)
    assert firefox.errors == []


def test_filters_keys_and_lenses_work_in_firefox(firefox: Firefox, url: str) -> None:
    firefox.open(f"{url}/buffer", ".grid a")
    firefox.value("""(() => {
      const box = document.querySelector("#filter");
      box.value = "stage = 'grpo'";
      box.dispatchEvent(new InputEvent("input", { bubbles: true }));
    })()""")
    firefox.until("document.querySelector('.counts b').textContent === '64 rows'")
    press = "(key => document.body.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true })))"
    firefox.value("document.activeElement.blur()")
    firefox.value(f"{press}('Enter')")
    firefox.until("document.querySelector('.turn') !== null")
    firefox.value(f"{press}('l')")
    firefox.until("document.querySelectorAll('.t').length > 10")
    firefox.value(f"{press}(']')")
    firefox.until("location.search.includes('lens=logprob')")
    assert firefox.errors == []
