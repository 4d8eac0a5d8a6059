"""Payloads in every field of a row are text on every page."""

from urllib.parse import quote

import pytest
from strange_rows import PAYLOADS
from watched import Watched, until

pytestmark = pytest.mark.viewer


def test_payloads_in_every_column_of_the_buffer_are_text(seen: Watched) -> None:
    columns = "trajectory_id,episode_id,task_id,agent,source,env,env_version,split,prompt,policy,run_id"
    page = seen.open(f"/buffer?filter=stage = 'strange'&sort=trajectory_id&desc=false&cols={columns}", ".grid a")
    shown = page.inner_text(".grid") + page.inner_text(".facets")
    page.evaluate("document.querySelectorAll('.facet button.quiet').forEach((more) => more.click())")
    assert sum(payload in shown for payload in PAYLOADS) > 20  # as many as fit the window
    page.evaluate("document.querySelector('.grid').scrollTop = 1e9")
    page.wait_for_selector(f"#row-{len(PAYLOADS) + 3} a")
    page.fill("#filter", "stage = 'strange' and env = '<img src=x onerror=window.pwned=1>'")
    until(page, "document.querySelector('.counts b').textContent === '1 row'")


def test_payloads_in_every_field_of_a_row_are_text(seen: Watched) -> None:
    for number, payload in enumerate(PAYLOADS):
        page = seen.open(f"/row/{quote(f'xss-{number:02d}-{payload}', safe='')}", ".turn")
        page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        until(page, "document.querySelectorAll('.more details[open] pre').length === 2")
        shown = page.evaluate("document.querySelector('.page').textContent")
        assert shown.count(payload) >= 20, (payload, shown.count(payload))
        assert (
            page.evaluate(
                "document.querySelectorAll('.conversation :is(script, img, iframe, svg, a, style, form, base)').length"
            )
            == 0
        )
        seen.check()


def test_payloads_in_rules_and_tasks_are_text(seen: Watched) -> None:
    page = seen.open("/curation", ".funnel")
    shown = page.inner_text("section[aria-label^='strange/']")
    assert all(payload in shown for payload in PAYLOADS)
    page = seen.open(f"/buffer?among=strange/57a46e57&rule={quote(PAYLOADS[1])}", ".part")
    assert PAYLOADS[1] in page.inner_text(".part")
    for payload in PAYLOADS[:3]:
        page = seen.open(f"/task?env={quote(payload)}&task_id={quote(payload)}", ".strip")
        assert payload in page.inner_text("h1")
        assert payload in page.inner_text(".prompt")
    page = seen.open(f"/?set={quote(PAYLOADS[1])}%3D1", ".what-if .tag")
    assert PAYLOADS[1] in page.inner_text(".what-if .tag")


def test_payloads_in_the_address_are_text(seen: Watched) -> None:
    for payload in PAYLOADS[:8]:
        page = seen.open(f"/buffer?filter={quote(payload)}&q=&sort={quote(payload)}", ".problem")
        assert payload in page.input_value("#filter")
        page = seen.open(f"/row/{quote(payload, safe='')}", ".problem")
        assert payload in page.inner_text("h1")
        page = seen.open(f"/{quote(payload, safe='')}", "h1")
    assert all("status of 40" in text for text in seen.console)
    seen.console.clear()
