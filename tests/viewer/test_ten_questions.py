"""The ten questions of docs/how-to/viewer.md: each is answered by at most two clicks or keys, beside what is typed."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
from watched import ROOT, Watched, until

pytestmark = pytest.mark.viewer
MOST = 2


@dataclass
class Counted:
    """A page whose clicks and keys are counted. What is typed into a field is no key."""

    page: Any
    acts: int = 0

    def click(self, selector: str) -> None:
        self.acts += 1
        self.page.locator(selector).first.click()

    def press(self, key: str) -> None:
        self.acts += 1
        self.page.keyboard.press(key)

    def sees(self, expression: str) -> None:
        """The answer is there, after at most :data:`MOST` acts."""
        until(self.page, expression, 120)
        assert self.acts <= MOST, f"{self.acts} clicks and keys"


def shows(selector: str, text: str) -> str:
    return f"[...document.querySelectorAll({selector!r})].some((part) => part.innerText.includes({text!r}))"


def test_the_page_of_the_viewer_lists_them() -> None:
    text = (ROOT / "docs/how-to/viewer.md").read_text()
    part = text.partition("## Ten questions")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| [a-z]", part, re.MULTILINE)) - 1 == 10  # and the head of the table


def test_better(seen: Watched) -> None:
    counted = Counted(seen.open("/", "h1"))
    counted.sees(shows(".headline", "95 % interval"))


def test_where_worse(seen: Watched) -> None:
    counted = Counted(seen.open("/", ".headline:not(.waiting)"))
    counted.click("a:has-text('the whole comparison')")
    counted.sees(shows("h3", "Lost: "))


def test_tool_errors(seen: Watched) -> None:
    counted = Counted(seen.open("/", ".headline"))
    counted.click("nav a:has-text('calls')")
    counted.page.wait_for_selector("#failed ~ .wide-table a, #failed")
    counted.sees(shows("p[role=status]", "failed in"))
    counted.sees(shows(".lines th", "median of a call"))
    number = re.search(r"[?&]m=(\d+)", str(counted.page.locator("#page a[href*='/row/']").first.get_attribute("href")))
    assert number is not None
    counted.click("#page a[href*='/row/']")
    counted.sees(f"document.querySelector('#m{number[1]}')?.classList.contains('failed')")


def test_which_token(seen: Watched) -> None:
    counted = Counted(seen.open("/row/breach?lens=text", ".turn"))
    counted.press("]")
    counted.sees("document.querySelectorAll('.t').length > 0")
    counted.press("b")
    counted.sees(shows(".inspector", "breaks the mask's proof"))


def test_which_rows_trained_a_step(seen: Watched) -> None:
    counted = Counted(seen.open("/", ".headline"))
    counted.click("nav a:has-text('training')")
    counted.page.wait_for_selector(".chart canvas")
    counted.press("j")
    counted.sees("document.querySelectorAll('section[aria-labelledby=step] tbody tr').length > 0")


def test_why_dropped(seen: Watched) -> None:
    funnels = seen.ask("/api/curation")["funnels"]
    dropped = next(funnel for funnel in funnels if funnel["stage"] == "curated")
    counted = Counted(seen.open("/", ".headline"))
    counted.click("nav a:has-text('curation')")
    counted.page.wait_for_selector(".funnel a")
    counted.click(f"section[aria-label='{dropped['artifact']}'] .funnel a")
    counted.sees("document.querySelectorAll('.part').length > 0 && document.querySelectorAll('.grid a').length > 0")
    row = str(counted.page.locator(".grid a").first.get_attribute("href"))
    counted = Counted(seen.open(row.partition("?")[0], ".turn"))
    counted.press("f")
    counted.sees(shows("#fate tr", "✗ dropped"))
    assert dropped["levels"][0]["rule"] in counted.page.inner_text("#fate")
    assert "+ made" in counted.page.inner_text("#fate")
    assert seen.faults() == []


def test_what_would_run_again(seen: Watched) -> None:
    counted = Counted(seen.open("/", ".graph .box"))
    counted.press("w")
    counted.page.keyboard.type("grpo.samples = 2")
    counted.press("Enter")
    counted.sees(shows(".urgent", "will run"))


def test_two_runs(seen: Watched) -> None:
    counted = Counted(seen.open("/", ".headline"))
    counted.click("a:has-text('compare')")
    counted.sees(shows("h1", "Two runs") + " && document.querySelectorAll('table').length > 1")


def test_rows_that_mention_a_name(seen: Watched, store: str) -> None:
    from agentrl.datastore.buffer import TrajectoryBuffer

    query = "select count(*) as n from trajectories where matches(messages, 'Ann')"
    rows = TrajectoryBuffer(store).sql(query)["n"][0]
    assert rows > 0
    counted = Counted(seen.open("/", ".headline"))
    counted.press("/")
    until(counted.page, "document.activeElement.id === 'filter'")
    counted.page.keyboard.type("Ann")
    counted.sees(f"document.querySelector('.counts b')?.textContent.startsWith('{rows:,} row')")
    until(counted.page, "document.querySelectorAll('.grid mark').length > 0")
    assert set(counted.page.locator(".grid mark").all_inner_texts()) <= {"Ann", "ann", "ANN"}
    seen.console.clear()  # a letter alone may be no filter yet
    counted.page.locator(".grid a").first.click()
    counted.page.wait_for_selector(".turn")
    assert "found=Ann" in counted.page.url
    until(counted.page, "(CSS.highlights.get('found')?.size ?? 0) > 0")


def test_keep_and_share(seen: Watched) -> None:
    counted = Counted(seen.open("/buffer?filter=success", ".grid a"))
    counted.press("s")
    counted.sees("document.querySelector('details.saving[open]') !== null")
    counted = Counted(seen.open("/buffer?filter=success", ".grid a"))
    counted.press("y")
    counted.sees(shows(".said", "link"))
