"""An exported file in a real browser that has no network: its pages, its filters, and rows that attack it."""

import json
import random
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
    command += ["--redact", "pet of the boss"]
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
    said = page.inner_text(".facts")
    assert "39: trajectory_id, episode_id" in said
    assert "by 1 pattern" in said
    assert f"version of the buffer\t{StoreReader(store).tables.newest()}" in said
    page.get_by_role("link", name="Look at the rows").click()
    page.wait_for_selector(".grid a")
    assert page.title() == "buffer · agentrl"


def test_filters_sorts_and_bars_work_in_a_file(alone: Watched) -> None:
    page = alone.open("/buffer", ".grid a")
    page.fill("#filter", "stage = 'grpo' and not success")
    until(page, "decodeURIComponent(location.hash).replaceAll('+', ' ').includes('not success')")
    until(page, "document.querySelector('.value.on')")
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
    page.fill("#filter", "sucess")
    page.wait_for_selector("#filter-problem .problem")
    assert "there is no column 'sucess'" in page.inner_text("#filter-problem")


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
        inside = [one for one in links if one.startswith("#/")]
        assert inside
        assert [one for one in inside if one.split("?")[0].split("/")[1] not in ("", "buffer", "row", "task")] == []
        assert [one for one in inside if "among=" in one] == []


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
    page = alone.open("/buffer?filter=stage = 'grpo' and n_steps > 1", ".grid a")
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
    for number in (0, 1, 4, 7, 13, 27, 28):
        page.fill("#filter", f"trajectory_id like 'xss-{number:02d}-%'")
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


# filters in the page and on the server

TEXTS = ["stage", "env", "prompt", "trajectory_id", "policy"]
NUMBERS = ["reward", "level", "n_tokens", "n_steps", "n_tool_errors"]
LITERALS = ["'grpo'", "'lookup'", "'%a%'", "'it''s'", "''", "'é'"]


def random_filter(chance: random.Random, depth: int = 2) -> str:
    pick = chance.choice
    if depth and chance.random() < 0.6:
        a, b = random_filter(chance, depth - 1), random_filter(chance, depth - 1)
        return pick(
            [
                f"({a} and {b})",
                f"({a} or {b})",
                f"not {a}",
                f"case when {a} then {b} else true end",
                f"{a} and {b} or {a}",
            ]
        )
    number = pick(
        [
            pick(NUMBERS),
            f"abs({pick(NUMBERS)} - 3)",
            f"{pick(NUMBERS)} * 2 + 1",
            f"length({pick(TEXTS)})",
            f"coalesce({pick(NUMBERS)}, 1)",
            f"floor({pick(NUMBERS)})",
            f"-{pick(NUMBERS)}",
            f"strpos({pick(TEXTS)}, 'o')",
            f"{pick(NUMBERS)} / 4",
            f"greatest({pick(NUMBERS)}, 2)",
            f"nullif({pick(NUMBERS)}, 1)",
        ]
    )
    text = pick([pick(TEXTS), f"lower({pick(TEXTS)})", f"upper({pick(TEXTS)})"])
    return pick(
        [
            f"{number} {pick(['<', '<=', '>', '>=', '=', '<>'])} {pick(['0', '1', '0.5', '7', '40'])}",
            f"{number} between 0 and {pick(['1', '30'])}",
            f"{text} {pick(['=', '<>', '<', '>=', 'like', 'not like', 'ilike'])} {pick(LITERALS)}",
            f"{text} {pick(['in', 'not in'])} ({pick(LITERALS)}, {pick(LITERALS)})",
            f"{pick(NUMBERS)} {pick(['in', 'not in'])} (0, 1, 2)",
            f"starts_with({text}, 'g')",
            f"regexp_like({text}, '^[a-m].*[0-9]$')",
            "success",
            f"{pick([*NUMBERS, 'success'])} is {pick(['null', 'not null'])}",
            f"success is {pick(['true', 'not false'])}",
            "created_at >= date '2020-01-01'",
            "created_at < '2030-01-31T12:00:00Z'::timestamptz",
        ]
    )


def test_filters_find_the_same_rows_in_a_file_as_on_the_server(alone: Watched, store: str) -> None:
    """300 filters made at random, through the page's own answers."""
    snapshot = StoreReader(store).tables.at(None)
    chance = random.Random(7)
    asked = sorted({random_filter(chance) for _ in range(300)})
    page = alone.open("/buffer", ".grid a")
    found = page.evaluate(
        """async (asked) => {
          const told = [];
          for (const filter of asked) {
            const answer = await window.agentrl("/api/facets?" + new URLSearchParams({ filter }));
            const body = await answer.json();
            told.push(answer.ok ? body.filtered : body.error);
          }
          return told;
        }""",
        asked,
    )
    own = snapshot.matching(SELECTION)
    assert own is not None
    expected = [int((own & snapshot.matching(one)).sum()) for one in asked]  # type: ignore[operator]
    wrong = {one: (mine, server) for one, mine, server in zip(asked, found, expected, strict=True) if mine != server}
    assert wrong == {}, json.dumps(wrong, indent=1)
