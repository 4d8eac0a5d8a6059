"""The SQL console in a real browser."""

import re
from urllib.parse import quote

import pytest
from strange_rows import PAYLOADS
from watched import PICTURES, Watched, both_themes, until

pytestmark = pytest.mark.viewer
BY_STAGE = "select stage, count(*) as n, avg(success) as success from trajectories group by stage order by stage"


@both_themes
def test_the_console_is_accessible_in_both_themes(seen: Watched, request: pytest.FixtureRequest) -> None:
    page = seen.open("/sql", ".page button.mono")
    assert seen.faults() == []
    page = seen.open(f"/sql?query={quote(BY_STAGE)}", "table.sql td")
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"sql-{request.node.callspec.params['seen']}.png")
    assert seen.faults() == []


def test_a_query_is_asked_by_keys_and_stays_in_the_address(seen: Watched) -> None:
    page = seen.open("/buffer?filter=success&at=3", ".grid a")
    page.get_by_role("link", name="SQL").click()
    page.wait_for_selector("textarea")
    assert "where (success)" in page.input_value("textarea")
    page.keyboard.press("/")
    page.fill("textarea", BY_STAGE)
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelectorAll('table.sql th').length === 3", 60)
    assert "at=3" in page.url
    assert "version 3" in page.inner_text(".counts")
    found = page.inner_text("table.sql")
    page.reload()
    page.wait_for_selector("table.sql td", timeout=60_000)
    assert page.inner_text("table.sql") == found
    page.fill("textarea", "select trajectory_id, reward from trajectories order by reward limit 3")
    page.get_by_role("button", name="ask", exact=True).click()
    until(page, "document.querySelectorAll('table.sql a').length === 3", 60)
    name = page.locator("table.sql a").first.inner_text()
    page.locator("table.sql a").first.click()
    page.wait_for_selector(".ribbon")
    assert page.inner_text("h1").startswith(name)


def test_what_is_refused_is_said_and_payloads_are_text(seen: Watched) -> None:
    attack = quote("select * from read_csv('/etc/passwd')")
    page = seen.open(f"/sql?query={attack}", ".problem")
    told = page.inner_text(".problem")
    assert "read_csv" in told
    assert not re.search(r"root:|/bin/", told)
    page = seen.open(f"/sql?query={quote(PAYLOADS[1])}", ".problem")
    assert PAYLOADS[1] in page.input_value("textarea")
    assert all("status of 400" in text for text in seen.console)
    seen.console.clear()
    query = "select distinct env, task_id, stage from trajectories where stage = 'strange' order by env"
    page = seen.open(f"/sql?query={quote(query)}", "table.sql td")
    shown = page.inner_text("table.sql")
    assert sum(payload in shown for payload in PAYLOADS) > 10
    assert page.locator("table.sql :is(script, img, iframe, svg)").count() == 0
