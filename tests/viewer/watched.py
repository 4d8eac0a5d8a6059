"""A page in a real browser, and everything about it that must stay empty."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NODE_MODULES = Path(os.environ.get("VIEWER_NODE_MODULES", ROOT / ".venv/viewer/node_modules"))
PICTURES = ROOT / "build/viewer"
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


@dataclass
class Watched:
    """A page, and everything about it that must stay empty."""

    page: Any
    url: str
    console: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def open(self, path: str, ready: str = "h1") -> Any:
        """The page, once ``ready`` is there."""
        self.page.goto(self.url + path)
        self.page.wait_for_selector(ready, state="attached")
        return self.page

    def faults(self) -> list[Any]:
        """What axe-core finds wrong with the page as it is now, from its top: what is scrolled half below the header is
        no small target."""
        self.page.evaluate("scrollTo(0, 0)")
        self.page.evaluate((NODE_MODULES / "axe-core/axe.min.js").read_text())
        rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
        results = self.page.evaluate(f"axe.run({{runOnly: {rules}}})")
        return [
            (violation["id"], [(node["html"], node["failureSummary"]) for node in violation["nodes"][:3]])
            for violation in results["violations"]
        ]

    def ask(self, path: str) -> Any:
        """What the viewer answers to another client."""
        return self.page.request.get(self.url + path).json()

    def check(self) -> None:
        """Nothing ran that came from data, nothing left the host, nothing was complained about."""
        assert self.page.evaluate("window.pwned") is None
        assert self.page.evaluate("window.violations") == []
        assert (self.console, self.outside, self.dialogs) == ([], [], [])


def until(page: Any, expression: str, seconds: float = 60) -> None:
    """Waits until an expression is true. The policy of the page refuses Playwright's own way of waiting for one."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        if time.monotonic() > end:
            problems = page.evaluate("[...document.querySelectorAll('.problem')].map((shown) => shown.textContent)")
            raise AssertionError(f"never true: {expression}; problems on the page: {problems}")
        page.wait_for_timeout(50)


both_themes = pytest.mark.parametrize("seen", ["light", "dark"], indirect=True)
