"""An exported file in a real browser that has no network: its pages, its filters, and rows that attack it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strange_rows import PAYLOADS
from watched import ENV, WATCH, Watched, until

from agentrl.flows.viewer.reader import StoreReader

pytestmark = pytest.mark.viewer
SELECTION = "stage = 'grpo' or stage = 'strange' and trajectory_id <> 'huge'"
PAGES = {
    "contents": ("/", ".facts"),
    "rows": ("/buffer", ".grid [role=gridcell] a"),
    "row": ("/row/breach?lens=logprob&t=60", ".t"),
    "task": ("/task?env=lookup&task_id=breach", ".strip"),
}


@pytest.fixture(scope="session")
def exported(store: str) -> Path:
    file = Path(store).parent / "out.html"
    command = [sys.executable, "-m", "agentrl.flows.cli", "view", "export", SELECTION, str(file), "--store", store]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, cwd=file.parent)
    assert done.returncode == 0, done.stderr
    return file


@pytest.fixture(params=["light"])
def alone(request: pytest.FixtureRequest, browser: Any, exported: Path) -> Iterator[Watched]:
    """The file in a fresh window without a network. At the end all is checked."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=request.param, offline=True)
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(15_000)
    watched = Watched(page, f"{exported.as_uri()}#")
    page.on("console", lambda message: message.type in ("error", "warning") and watched.console.append(message.text))
    page.on("pageerror", lambda error: watched.console.append(str(error)))
    inside = (exported.as_uri(), "data:", "blob:null/")
    page.on("request", lambda asked: asked.url.startswith(inside) or watched.outside.append(asked.url))
    page.on("dialog", lambda dialog: (watched.dialogs.append(dialog.message), dialog.dismiss()))
    yield watched
    watched.check()
    context.close()


@pytest.mark.parametrize("alone", ["light", "dark"], indirect=True)
def test_pages_of_a_file_are_accessible_without_a_network(alone: Watched) -> None:
    for path, ready in PAGES.values():
        page = alone.open(path, ready)
        page.wait_for_timeout(100)
        assert alone.faults() == [], path


def test_a_file_says_what_it_holds(alone: Watched, store: str) -> None:
    page = alone.open("/", ".facts")
    facts = page.inner_text(".facts")
    assert "39: trajectory_id, episode_id" in facts
    assert f"version of the buffer\t{StoreReader(store).tables.newest()}" in facts
    page.get_by_role("link", name="Look at the rows").click()
    page.wait_for_selector(".grid a")
    assert page.title() == "buffer · agentrl"


def test_a_file_says_how_long_messages_took(alone: Watched) -> None:
    page = alone.open("/row/breach", ".outline")
    assert "3.5 s" in page.inner_text("#m1 header")
    assert page.locator(".outline a", has_text="3.5 s").count() == page.locator(".turn").count()


def test_filters_sorts_and_bars_work_in_a_file(alone: Watched) -> None:
    page = alone.open("/buffer", ".grid a")
    page.locator("section[aria-label=stage] .value", has_text="grpo").click()
    page.locator("section[aria-label=success] .value", has_text="false").click()
    until(page, "decodeURIComponent(location.hash).replaceAll('+', ' ').includes('not success')")
    until(page, "document.querySelectorAll('.value.on').length === 2")
    shown = int(page.inner_text(".counts b").split()[0])
    assert 0 < shown < 64
    bar = page.locator("section[aria-label=stage] .value", has_text="grpo")
    assert bar.inner_text().replace("\n", " ").endswith(f"{shown} of 64 rows")
    page.get_by_role("button", name="n_tokens", exact=True).click()
    until(page, "location.hash.includes('sort=n_tokens')")
    page.locator(".grid").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn")
    page.go_back()
    page.wait_for_selector(".grid a")
    assert page.input_value("#filter") == "stage = 'grpo' and not success"
    page.fill("#filter", "reward > 0.5 or not success")
    page.wait_for_selector("#filter-problem .problem")
    assert "has no expressions such as" in page.inner_text("#filter-problem")


def test_bars_and_words_find_in_a_file_what_filters_find_in_the_store(alone: Watched, store: str) -> None:
    """Each bar of each histogram, ranges of bars, and words, through the page's own answers."""
    snapshot = StoreReader(store).tables.at(None)
    own = snapshot.matching(SELECTION)
    assert own is not None
    page = alone.open("/buffer", ".grid a")
    ask = """async (filter) => {
      const answer = await window.agentrl("/api/facets?" + new URLSearchParams({ filter }));
      return answer.ok ? answer.json() : (await answer.json()).error;
    }"""
    facets = page.evaluate(ask, "")["facets"]
    filters = [bin["where"] for facet in facets for bin in facet["bins"]]
    filters += [f"({where}) and not success" for where in filters if " and " in where]
    filters += ["reward >= 0.2 and reward <= 1", "n_tokens >= 40 and n_tokens < 90 and stage = 'grpo'"]
    filters += ["trajectory_id in ('breach', 'it''s none', 'long')"]
    assert len(filters) > 40
    for text in filters:
        assert page.evaluate(ask, text)["filtered"] == int((own & snapshot.matching(text)).sum()), text
    for words in ("lookup", "WHAT is", '"the capital"', '"capital the"', "1", "nobodysaysthis"):
        quoted = words.replace("'", "''")
        expected = int((own & snapshot.matching(f"matches(messages, '{quoted}')")).sum())
        assert page.evaluate(ask, words)["filtered"] == expected, words


def test_what_a_file_does_not_know_is_refused_by_name(alone: Watched) -> None:
    page = alone.open("/buffer?among=nothing/12345678", ".page")
    until(page, "document.querySelector('.page').textContent.includes('does not know among')")


def test_a_file_has_no_links_to_pages_of_a_store(alone: Watched) -> None:
    page = alone.open("/buffer", ".grid a")
    assert page.locator(".counts a").count() == 0
    for name in ("breach", "long"):
        page = alone.open(f"/row/{name}", ".ribbon")
        until(page, f"document.querySelector('h1').textContent === '{name}'")
        links = page.eval_on_selector_all("a[href]", "all => all.map((one) => one.getAttribute('href'))")
        inside = [link for link in links if link.startswith("#/")]
        assert inside
        assert [link for link in inside if link.split("?")[0].split("/")[1] not in ("", "buffer", "row", "task")] == []
        assert [link for link in inside if "among=" in link] == []


def test_lenses_keys_and_attempts_work_in_a_file(alone: Watched) -> None:
    page = alone.open("/row/breach?lens=mask", ".t.trained")
    assert page.locator(".t.breach").count() == 2
    page.keyboard.press("]")
    page.wait_for_selector("[class*=heat-]")
    page = alone.open("/row/long?lens=logprob", ".t")
    until(page, "document.querySelector('h1').textContent === 'long'")
    page.keyboard.press("ArrowRight")
    until(page, "location.hash.includes('t=0')")
    assert "token 0 of" in page.inner_text(".inspector")
    page.keyboard.press("y")
    page.wait_for_selector(".said:not(.empty)")
    page = alone.open("/buffer?filter=stage = 'grpo' and n_steps >= 2", ".grid a")
    page.keyboard.press("Enter")
    page.wait_for_selector(".title a[href*='/task?']")
    page.locator(".title a[href*='/task?']").click()
    page.wait_for_selector(".mark")
    page.locator(".mark").nth(0).click()
    page.locator(".mark").nth(1).click()
    page.wait_for_selector(".versus .sides section")


def test_payloads_in_rows_of_a_file_are_text(alone: Watched) -> None:
    page = alone.open(
        "/buffer?filter=stage = 'strange'&sort=trajectory_id&desc=false&cols=trajectory_id,agent,env", ".grid a"
    )
    shown = page.inner_text(".grid") + page.inner_text(".facets")
    assert sum(payload in shown for payload in PAYLOADS) > 20
    ids = page.eval_on_selector_all(".grid a", "all => all.map((one) => one.textContent)")
    row_id = {int(name[4:6]): name.replace("'", "''") for name in ids if name.startswith("xss-")}
    for number in (0, 1, 4, 7, 13, 27, 28):
        page.fill("#filter", f"trajectory_id in ('{row_id[number]}')")
        until(page, "document.querySelector('.counts b').textContent === '1 row'")
        page.keyboard.press("Escape")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn")
        page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert page.evaluate("document.querySelector('.page').textContent").count(PAYLOADS[number]) >= 15
        alone.check()
        page = alone.open("/buffer", ".grid a")


def test_no_script_of_the_file_reaches_the_network_or_writes_markup(alone: Watched) -> None:
    """What a script would meet that got into the file in spite of all."""
    page = alone.open("/", ".facts")
    met = page.evaluate("""async () => {
      const said = [];
      await fetch("https://example.org/").catch(() => said.push("fetch"));
      await import("https://example.org/a.js").catch(() => said.push("import"));
      try { document.body.innerHTML = "<p>"; } catch { said.push("markup"); }
      try { eval("1"); } catch { said.push("eval"); }
      try { trustedTypes.createPolicy("own", {}); } catch { said.push("policy"); }
      return said;
    }""")
    assert met == ["fetch", "import", "markup", "eval", "policy"]
    assert len(page.evaluate("window.violations")) >= 4
    page.evaluate("window.violations = []")
    alone.console.clear()
    alone.outside.clear()
