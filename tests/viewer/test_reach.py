"""Readers without a mouse, with a page at twice its size, and those whom motion disturbs: over all pages."""

from collections.abc import Iterator
from typing import Any

import pytest
from pages import LAID_OUT, PAGES, named
from serving import window
from test_pages import rows_are
from watched import PICTURES, Watched, until

from agentrl.datastore.buffer import TrajectoryBuffer

pytestmark = pytest.mark.viewer
ZOOMED = {"viewport": {"width": 700, "height": 450}, "device_scale_factor": 2}
"""A screen of 1400 by 900 pixels at 200 %."""
SIZES = {"whole": {}, "zoomed": ZOOMED}

STOPS = """() => {
  const chosen = (radio) => radio.checked ||
    !document.querySelector(`input[name="${radio.name}"]:checked`) &&
    radio === document.querySelector(`input[name="${radio.name}"]:enabled`);
  window.stops = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")].filter(
    (control) => control.tabIndex >= 0 && !control.disabled && control.checkVisibility({ visibilityProperty: true }) &&
      (control.type !== "radio" || chosen(control)));
  return window.stops.map((control) => control.outerHTML.slice(0, 160));
}"""
"""Where the tabulator has to stop, in the order of the document: of a group of radio buttons at one of them."""
ORDERED = """[...document.querySelectorAll("*")].filter((part) => part.tabIndex > 0 ||
  getComputedStyle(part).order !== "0" || getComputedStyle(part).flexDirection.endsWith("reverse")).length"""
"""Parts that are elsewhere on the screen, or for the tabulator, than in the document."""
FOCUSED = """() => {
  const control = document.activeElement;
  if (control === document.body) return [-1, true, true, "the end of the page"];
  const outlined = (part) => {
    if (!part?.matches) return false;
    const { outlineStyle, outlineWidth } = getComputedStyle(part);
    return outlineStyle !== "none" && parseFloat(outlineWidth) >= 2;
  };
  const rect = control.querySelector(":scope > rect");
  const ring = rect ? parseFloat(getComputedStyle(rect).strokeWidth) >= 2 : outlined(control) ||
    control.type === "radio" && outlined(control.nextElementSibling);
  const box = control.getClientRects()[0];
  const middle = (low, high, most) => (Math.max(low, 0) + Math.min(high, most)) / 2;
  const [x, y] = [middle(box.left, box.right, innerWidth), middle(box.top, box.bottom, innerHeight)];
  const top = document.elementFromPoint(x, y);
  const seen = top !== null && (control.contains(top) || top.contains(control) && top.id !== "page" ||
    control.labels?.length > 0 && control.labels[0].contains(top));
  return [window.stops.indexOf(control), ring, seen, control.outerHTML.slice(0, 160)];
}"""
"""Number of the stop where the focus is, whether one sees the focus, and whether nothing lies over the control."""

MOVING = """
[...document.querySelectorAll("*")].map((part) => getComputedStyle(part)).filter((style) =>
  `${style.transitionDuration},${style.animationDuration}`.split(",").some((length) => parseFloat(length) > 0.01) ||
  style.scrollBehavior !== "auto").length
"""
CUT = """() => {
  const scrolls = (part) => part && part !== document.body && part !== document.documentElement &&
    (/auto|scroll|hidden|clip/.test(getComputedStyle(part).overflowX) || scrolls(part.parentElement));
  return [...document.querySelectorAll("#app *")].filter((part) => {
    const { right, left, width } = part.getBoundingClientRect();
    const { overflowX, overflowY, textOverflow } = getComputedStyle(part);
    if (!width || part.closest(".unseen, .skip, svg, .uplot")) return false;
    const beyond = (right > innerWidth + 1 || left < -1) && !scrolls(part.parentElement);
    const hidden = /hidden|clip/;
    const across = hidden.test(overflowX) && part.scrollWidth > part.clientWidth + 1 && textOverflow !== "ellipsis";
    return beyond || across || hidden.test(overflowY) && part.scrollHeight > part.clientHeight + 6;
  }).slice(0, 3).map((part) => part.outerHTML.slice(0, 200));
}"""
"""Parts that stand beyond the edge of the window, or that are cut and cannot be scrolled."""


@pytest.fixture(params=SIZES)
def sized(request: pytest.FixtureRequest, browser: Any, url: str) -> Iterator[Watched]:
    with window(browser, url, **SIZES[request.param]) as watched:
        yield watched


def drawn(seen: Watched, name: str) -> Any:
    """A page that has all it shows."""
    path, ready = PAGES[name]
    page = seen.open(named(seen, path), ready)
    page.evaluate(LAID_OUT)
    page.wait_for_timeout(300)
    if name == "no-row":
        seen.console.clear()  # the browser reports the answer 404 by itself
    return page


def tab_to(page: Any, selector: str, most: int = 80) -> None:
    """Presses Tab until a control has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.matches({selector!r})"):
            return
    raise AssertionError(f"Tab does not reach {selector}")


@pytest.mark.parametrize("name", PAGES)
def test_tab_reaches_each_control_in_order_and_shows_where_it_is(sized: Watched, name: str) -> None:
    page = drawn(sized, name)
    stops = page.evaluate(STOPS)
    assert page.evaluate(ORDERED) == 0
    reached, hidden = [], []
    for _ in range(len(stops) + 20):
        page.keyboard.press("Tab")
        number, ring, seen, control = page.evaluate(FOCUSED)
        if number in reached:
            break
        if not (ring and seen):
            hidden.append(("no ring" if seen else "below something", control))
        if number >= 0:
            reached.append(number)
    assert hidden == []
    assert [stops[number] for number in set(range(len(stops))) - set(reached)] == []
    first = reached.index(0)  # a page may begin elsewhere, as at the token that its address names
    assert reached[first:] + reached[:first] == sorted(reached)


@pytest.mark.parametrize("name", PAGES)
def test_at_twice_the_size_nothing_is_cut_and_no_page_scrolls_sideways(browser: Any, url: str, name: str) -> None:
    with window(browser, url, **ZOOMED) as seen:
        page = drawn(seen, name)
        page.screenshot(path=PICTURES / f"zoomed-{name}.png")
        assert page.evaluate(CUT) == []
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize("name", PAGES)
def test_nothing_moves_if_the_reader_asked_for_that(browser: Any, url: str, name: str) -> None:
    with window(browser, url, reduced_motion="reduce") as seen:
        assert drawn(seen, name).evaluate(MOVING) == 0
    if name == "overview":
        with window(browser, url) as seen:
            assert drawn(seen, name).evaluate(MOVING) > 0  # so what is asked above can fail


def test_a_run_and_a_row_are_opened_by_keys(sized: Watched, store: str) -> None:
    page = sized.open("/", "section[aria-labelledby=runs] a")
    tab_to(page, "section[aria-labelledby=runs] a")
    page.keyboard.press("Enter")
    until(page, "location.pathname.startsWith('/run/') && document.querySelector('.page .lines')")
    assert page.evaluate("document.activeElement.id") == "page", "Tab goes on in the new page"
    tab_to(page, ".page a", 1)
    tab_to(page, "nav a[href='/buffer']")
    page.keyboard.press("Enter")
    page.wait_for_selector(".grid a")
    tab_to(page, "#filter")
    page.keyboard.type("stage = 'grpo' and not success")
    failed = "select count(*) as n from trajectories where stage = 'grpo' and not success"
    rows_are(page, TrajectoryBuffer(store).sql(failed)["n"][0])
    assert [text for text in sized.console if "400" not in text] == []
    sized.console.clear()  # half a filter is no filter
    tab_to(page, ".grid")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#row-1.current")
    row = page.inner_text("#row-1 .name")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn")
    assert page.inner_text("h1") in row.replace("\n", "")
    page.go_back()
    page.wait_for_selector("#row-1.current")


def test_escape_closes_dialogs_and_menus_and_the_focus_comes_back(sized: Watched) -> None:
    page = sized.open("/buffer", ".grid a")
    tab_to(page, ".top button:has(kbd)")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    assert page.evaluate("document.activeElement.matches('.top button:has(kbd)')")
    for menu, inside in ((".saving", "#selection-name"), (".columns:not(.saving)", "button")):
        tab_to(page, f"{menu} > summary")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"{menu} {inside}")
        tab_to(page, inside, 2)
        box = page.locator(f"{menu} .menu").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= page.viewport_size["width"]
        page.keyboard.press("Escape")
        assert page.evaluate(f"document.activeElement.matches('{menu} > summary')")
        assert page.locator(".menu:visible").count() == 0


@pytest.mark.parametrize("width", [390, 700, 900, 1400])
def test_tabs_stand_in_one_line_or_in_columns(browser: Any, url: str, width: int) -> None:
    places = "(all) => all.map((tab) => tab.getBoundingClientRect()).map(({ left, top }) => [left, top])"
    with window(browser, url, viewport={"width": width, "height": 600}) as seen:
        page = drawn(seen, "trajectory")
        tabs = page.eval_on_selector_all("nav[aria-label=pages] > *", places)
        lines = [[left for left, top in tabs if top == line] for line in sorted({top for _, top in tabs})]
        assert len(lines) == 1 if width >= 900 else len(lines) > 1
        assert all(line == lines[0][: len(line)] for line in lines)
        tools = page.eval_on_selector_all(".tools > button", places)
        assert len({top for _, top in tools}) == 1
