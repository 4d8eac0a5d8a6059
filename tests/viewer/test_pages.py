"""The pages of the viewer in a real browser: what they show, and what keys and clicks do."""

import re
from typing import Any
from urllib.parse import quote

import pytest
from pages import LAID_OUT, PAGES, named
from strange_rows import PAYLOADS
from watched import PICTURES, Watched, both_themes, until

from agentrl.datastore.buffer import TrajectoryBuffer

pytestmark = pytest.mark.viewer


def total(page: Any) -> int:
    return int(page.inner_text(".counts b").split()[0].replace(",", ""))


def rows_are(page: Any, count: int) -> None:
    until(page, f"document.querySelector('.counts b')?.textContent.replace(',', '').startsWith('{count} ')")


@both_themes
@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_accessible_in_both_themes(seen: Watched, name: str, request: pytest.FixtureRequest) -> None:
    path, ready = PAGES[name]
    page = seen.open(named(seen, path), ready)
    page.evaluate(LAID_OUT)
    page.wait_for_timeout(200)
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}-{request.node.callspec.params['seen']}.png")
    assert seen.faults() == []
    if name == "no-row":
        seen.console.clear()  # the browser reports the answer 404 by itself


def test_the_overview_shows_results_with_intervals_stages_and_runs(seen: Watched) -> None:
    page = seen.open("/", ".graph")
    until(page, "!document.body.textContent.includes('the plan is being made')")
    assert page.locator(".better tbody tr").count() == 4  # two policies, each sampled and greedy
    assert "16" in page.inner_text(".better tbody tr:first-child")
    assert page.locator(".graph .box").count() == 10
    assert page.locator(".graph .box.cached").count() == 10
    assert "completed" in page.inner_text("section[aria-labelledby=runs]").lower()
    page.locator(".graph .box").first.focus()
    page.keyboard.press("Enter")
    assert "stage=" in page.url
    page.get_by_role("link", name="rows of grpo").click()
    page.wait_for_selector(".grid a")
    rows_are(page, 64)


def test_a_filter_is_typed_clicked_and_dragged(seen: Watched, store: str) -> None:
    page = seen.open("/buffer", ".grid a")
    whole = total(page)
    page.keyboard.press("/")
    page.keyboard.type("stage = 'grpo'")
    rows_are(page, 64)
    assert "filter=stage" in page.url
    page.keyboard.press("Escape")
    page.locator("section[aria-label=success] .value", has_text="false").click()
    until(page, "location.search.includes('success')")
    until(page, "document.querySelector('.value.on')")
    query = "select count(*) as n from trajectories where stage = 'grpo' and not success"
    rows_are(page, TrajectoryBuffer(store).sql(query)["n"][0])
    assert page.input_value("#filter") == "stage = 'grpo' and not success"
    page.locator("section[aria-label=success] .value", has_text="false").click()
    rows_are(page, 64)
    assert whole > 64
    bars = page.locator("section[aria-label=n_tokens] .bar")
    bars.nth(0).hover()
    page.mouse.down()
    bars.nth(5).hover()
    page.mouse.up()
    until(page, "location.search.includes('n_tokens')")
    assert "(n_tokens >= " in page.input_value("#filter")
    page.fill("#filter", "sucess = 1")
    page.wait_for_selector("#filter-problem .problem")
    assert "success" in page.inner_text("#filter-problem")  # did you mean
    assert len([text for text in seen.console if "400" in text]) == len(seen.console)
    seen.console.clear()


def test_bars_are_reached_and_pressed_by_keys_alone(seen: Watched) -> None:
    page = seen.open("/buffer", ".grid a")
    page.locator("section[aria-label=stage] .value[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".value.on")
    assert "stage = " in page.input_value("#filter")


def test_keys_walk_select_and_open_rows_of_the_table(seen: Watched) -> None:
    page = seen.open("/buffer?filter=stage = 'grpo'&sort=trajectory_id&desc=false", ".grid a")
    assert page.get_attribute(".grid", "aria-rowcount") == "65"
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("x")
    assert "1 row selected" in page.inner_text(".counts")
    second = str(page.text_content("#row-1 a"))
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn")
    assert page.inner_text("h1").startswith(second)
    page.go_back()
    page.wait_for_selector("#row-1.current")
    assert "1 row selected" in page.inner_text(".counts")
    assert page.url.endswith("row=1")
    page.fill("#filter", "stage = 'grpo' and n_steps > 0")
    page.wait_for_selector("#row-0.current")
    assert "row=" not in page.url


def test_a_link_to_a_row_far_down_shows_it(seen: Watched) -> None:
    page = seen.open("/buffer?row=140", "#row-140.current a")
    assert page.evaluate("document.querySelector('.grid').scrollTop") > 2000


def test_keys_of_one_character_can_be_turned_off(seen: Watched) -> None:
    page = seen.open("/buffer", ".grid a")
    page.get_by_role("button", name="keys").click()
    page.get_by_role("checkbox", name="keys of one character").uncheck()
    page.get_by_role("button", name="close").click()
    page.keyboard.press("j")
    page.keyboard.press("?")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#row-1.current")
    assert page.locator("dialog[open]").count() == 0
    page = seen.open("/buffer", ".grid a")
    page.keyboard.press("j")
    page.get_by_role("button", name="keys").click()
    page.get_by_role("checkbox", name="keys of one character").check()
    page.get_by_role("button", name="close").click()
    assert page.locator("#row-0.current").count() == 1
    page.keyboard.press("j")
    page.wait_for_selector("#row-1.current")


def test_a_table_holds_only_what_is_in_view_and_sorts(seen: Watched) -> None:
    page = seen.open("/buffer", ".grid a")
    count = total(page)
    assert count > 150
    assert page.locator(".grid [role=row]").count() < 60
    page.get_by_role("button", name="n_tokens", exact=True).click()
    page.get_by_role("button", name="n_tokens ↑").click()
    until(page, "document.querySelector('#row-0 a')?.textContent === 'long'")
    page.evaluate("document.querySelector('.grid').scrollTop = 1e9")
    page.wait_for_selector(f"#row-{count - 1} a")


def test_keys_of_the_trajectory(seen: Watched) -> None:
    page = seen.open("/buffer?filter=stage = 'grpo' and n_steps > 1&sort=trajectory_id&desc=false", ".grid a")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.id") == "m1"
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.id") == "m0"
    first = page.inner_text("h1")
    page.keyboard.press("p")
    until(page, f"document.querySelector('h1').textContent !== {first!r}")
    page.keyboard.press("n")
    until(page, f"document.querySelector('h1').textContent === {first!r}")
    page.keyboard.press("l")
    page.wait_for_selector(".t.trained")
    page.keyboard.press("]")
    page.wait_for_selector("[class*=heat-]")
    assert "lens=logprob" in page.url
    page.keyboard.press("[")
    page.wait_for_selector(".t.trained")
    page.keyboard.press("ArrowRight")
    assert re.search("not (trained|sampled)", page.inner_text(".inspector"))
    assert "token 0 of" in page.inner_text(".inspector")
    assert "t=0" in page.url
    page.keyboard.press("?")
    assert "next tool error" in page.inner_text("dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    page.keyboard.press("y")
    page.wait_for_selector(".said:not(.empty)")
    assert "link" in page.inner_text(".said")


def test_characters_that_nobody_sees_are_shown(seen: Watched) -> None:
    page = seen.open("/", ".better")
    hidden = ["\ufeff", "\ufe00", "\u2800", "\U000e0100", "\U000e01ef", "\U0001d173", "\U0001bca0", "\u200b"]
    shown = page.evaluate("async (all) => all.map((await import('/static/text.js')).visible)", hidden)
    assert shown == [f"⟦U+{ord(character):04X}⟧" for character in hidden]
    assert page.evaluate("async () => (await import('/static/text.js')).visible('❤️ 👩‍🚀 é')") == "❤️ 👩‍🚀 é"


def test_tokens_of_messages_without_places_stand_at_the_last_one(seen: Watched) -> None:
    page = seen.open("/", ".better")
    shares = "async (ends) => (await import('/static/tokens.js')).shares(ends.map((token_end) => ({ token_end })), 9)"
    assert page.evaluate(shares, [None, None, None]) == [[0, 0], [0, 0], [0, 9]]
    assert page.evaluate(shares, [3, None, 6, None]) == [[0, 3], [3, 3], [3, 9], [9, 9]]


def test_lenses_colour_tokens_in_place_and_the_others_say_what_fills_them(seen: Watched) -> None:
    page = seen.open("/row/breach?lens=mask", ".t.trained")
    assert page.locator(".t").count() > 30
    assert page.locator(".t.breach").count() == 2
    assert "2 tokens break the mask's proof" in page.inner_text(".proof")
    page.keyboard.press("b")
    assert "breaks the mask's proof: " in page.inner_text(".inspector")
    page.get_by_role("radio", name="log-prob", exact=True).check()
    page.wait_for_selector("[class*=heat-]")
    assert "−7" in page.inner_text(".legend")
    page.keyboard.press("?")  # keys count on a lens that was just chosen
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.type") == "radio", "arrows choose the next lens"
    page.get_by_role("radio", name="log-prob", exact=True).check()
    off = page.locator(".lensbar label.off")
    assert off.count() >= 3
    assert all(off.nth(i).get_attribute("title") for i in range(off.count()))
    page.get_by_role("radio", name="text", exact=True).check()
    page.wait_for_selector(".call")
    assert page.locator(".t").count() == 0


def test_what_learned_from_a_row_is_named_in_its_ribbon(seen: Watched) -> None:
    page = seen.open("/buffer?filter=stage = 'grpo'&sort=trajectory_id&desc=false", ".grid a")
    page.keyboard.press("Enter")
    page.wait_for_selector(".ribbon")
    told = page.inner_text(".ribbon")
    assert "warm/" in told
    assert "grpo/" in told.partition("this row")[2]
    prefix = page.inner_text("h1").rpartition("-")[0]
    lineages = ((name, seen.ask(f"/api/rows/{name}")["lineage"]) for name in (f"{prefix}-{n:06d}" for n in range(64)))
    trained = next(name for name, lineage in lineages if any(run["steps"] for run in lineage["learned_by"]))
    page = seen.open(f"/row/{trained}?lens=weight", ".legend")
    until(page, "document.querySelector('.legend').textContent.includes('by grpo/')")
    page.get_by_role("radio", name="log-prob", exact=True).check()
    until(page, "!document.querySelector('.legend').textContent.includes('by grpo/')")


def test_questions_that_a_page_names_are_asked_once(seen: Watched) -> None:
    asked: list[str] = []
    seen.page.on("request", lambda request: asked.append(request.url))
    for path, ready, questions in (
        ("/", ".better", ["/api/overview"]),
        ("/row/long?lens=logprob", ".t", ["/api/rows/long", "/api/tokens/long"]),
    ):
        asked.clear()
        seen.open(path, ready)
        times = {question: asked.count(seen.url + question) for question in questions}
        assert times == dict.fromkeys(questions, 1)
        first = min(asked.index(seen.url + question) for question in questions)
        assert first < min(number for number, url in enumerate(asked) if url.endswith("/vendor/preact.js"))


def test_modules_of_other_pages_are_there_before_these_are_opened(seen: Watched) -> None:
    page = seen.open("/", ".better")
    until(page, "performance.getEntriesByType('resource').some((one) => one.name.endsWith('/conversation.js'))")
    page.context.set_offline(True)
    page.click("nav a[href='/curation']")
    page.wait_for_selector(".page.curation")
    page.wait_for_selector(".problem")
    assert "does not answer" in page.inner_text(".problem")
    page.context.set_offline(False)
    seen.console.clear()  # the browser says that it is offline


def test_a_hundred_thousand_tokens_are_drawn_block_by_block(seen: Watched) -> None:
    page = seen.open("/row/long?lens=logprob", ".t")
    assert page.evaluate("document.querySelectorAll('.block').length") > 190
    assert 100 < page.locator(".t").count() < 20_000
    page.locator(".minimap").click(position={"x": 30, "y": 660})
    page.wait_for_selector(".t.now", timeout=60_000)  # all messages are there first
    last = int(page.evaluate("new URLSearchParams(location.search).get('t')"))
    assert last > 95_000
    assert page.locator(".t.now").is_visible()
    assert page.evaluate("document.querySelector('.conversation').textContent.length") > 200_000  # for find and copy
    page.reload()
    page.wait_for_selector(".t.now", timeout=60_000)  # all messages are there first
    until(
        page, "(([box]) => box.top > 0 && box.bottom < innerHeight)(document.querySelector('.t.now').getClientRects())"
    )


def test_controls_are_shown_colours_parsed_and_pictures_stay_text(seen: Watched) -> None:
    page = seen.open("/row/signs", ".turn")
    text = page.inner_text("#m0")
    assert "a⟦U+202E⟧b⟦U+200B⟧c red ␇ d⟦U+2066⟧e" in text
    assert page.locator("#m0 .ansi-red").inner_text() == "red"
    assert page.locator("#m1 img").count() == 0
    assert "data:image/png;base64," in page.inner_text("#m1")


def test_a_long_message_is_cut_until_asked_for(seen: Watched) -> None:
    page = seen.open("/row/huge", ".turn")
    assert page.evaluate("document.querySelector('#m1').textContent.length") < 25_000
    page.get_by_role("button", name="show all").click()
    until(page, "document.querySelector('#m1').textContent.length > 280_000")


def test_rows_without_tokens_say_so(seen: Watched) -> None:
    page = seen.open("/row/huge", ".turn")
    assert "no tokens" in page.inner_text(".lensbar")
    assert "3.5 s at the endpoint" in page.inner_text(".title")
    assert page.locator(".minimap").count() == 0


TIMES = "[...document.querySelector('.lines').tBodies[0].rows].map((row) => row.innerText.split('\\t').slice(-2))"
MARK = "(({ display, outlineStyle }) => [display, outlineStyle])(getComputedStyle(document.querySelector('.t.now')))"


def test_messages_and_calls_say_how_long_they_took(seen: Watched) -> None:
    page = seen.open("/row/signs", ".turn")
    assert ("1.5 s" in page.inner_text("#m0 header"), "1.5 s" in page.inner_text("#m1 header")) == (False, True)
    assert "turns took 1.5 s" in page.inner_text(".title")
    assert "latency_s" not in page.inner_text(".title"), "the column says more than the tag"
    page = seen.open("/row/breach", ".outline")
    turns = page.locator(".turn").count()
    assert page.locator(".outline a", has_text="3.5 s").count() == turns
    page = seen.open("/calls?filter=" + quote("trajectory_id like 'xss-%'"), ".lines")
    assert page.evaluate(TIMES) == [["2.5 s", "2.5 s"]] * len(PAYLOADS)


def test_a_chosen_token_stays_within_its_lines(seen: Watched) -> None:
    page = seen.open("/row/breach?lens=logprob&t=60", ".t.now")
    assert page.evaluate(MARK) == ["inline", "solid"], "a frame around the token, and none across the page"


@both_themes
def test_two_evaluations_are_compared_on_the_tasks_of_both(seen: Watched) -> None:
    page = seen.open("/evaluation", ".lines")
    page.get_by_role("radio", name=re.compile("compared with: eval_warm")).check()
    page.get_by_role("radio", name=re.compile("this one: eval_grpo")).check()
    page.wait_for_selector("#verdict")
    assert "16 tasks of both" in page.inner_text("section[aria-labelledby=verdict]")
    assert page.locator("section[aria-labelledby=verdict] h3").count() == 2
    assert "not paired" not in page.inner_text("#page")
    assert seen.faults() == []


def test_evaluations_of_different_tasks_are_said_not_to_be_paired(seen: Watched) -> None:
    def partly(route: Any) -> None:
        route.fulfill(json={**route.fetch().json(), "unshared": 3})

    seen.page.route("**/api/compare?*", partly)
    page = seen.open("/evaluation", ".lines")
    page.wait_for_selector("#verdict")
    assert "3 tasks of one alone are not paired" in page.inner_text("section[aria-labelledby=verdict] .bad")


@both_themes
def test_two_attempts_are_aligned_where_they_part(seen: Watched, store: str) -> None:
    query = "select trajectory_id, task_id from trajectories where stage = 'grpo' order by n_tokens"
    rows = TrajectoryBuffer(store).sql(query)
    shortest, longest = next(
        (group["trajectory_id"][0], group["trajectory_id"][-1])
        for group in rows.partition_by("task_id")
        if group.height > 1
    )
    task = rows.filter(rows["trajectory_id"] == shortest)["task_id"][0]
    page = seen.open(f"/task?env=lookup&task_id={task}", ".strip")
    page.locator(f".mark[title^='{shortest}:']").click()
    page.locator(f".mark[title^='{longest}:']").click()
    page.wait_for_selector(".versus .sides section")
    assert "both begin with the same" in page.inner_text(".versus summary")
    assert page.locator(".versus .sides section").count() == 2
    page.locator(".versus summary").click()
    page.wait_for_selector(".versus details .t.faint")
    assert seen.faults() == []


@both_themes
def test_a_pair_parts_at_its_branching_token(seen: Watched) -> None:
    page = seen.open("/pair", ".lines")
    page.locator(".lines a").first.click()
    page.wait_for_selector(".versus .t.trained")
    assert "the loss covers" in page.inner_text(".sides")
    assert "chosen: " in page.inner_text(".sides")
    assert seen.faults() == []
