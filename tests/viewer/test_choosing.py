"""Pages of what was chosen and why, in a real browser: curation, trees, two runs, what-if plans."""

import re

import pytest
from strange_rows import PAYLOADS, WIDE
from watched import Watched, until

pytestmark = pytest.mark.viewer


def test_each_rule_opens_the_rows_that_it_dropped(seen: Watched) -> None:
    page = seen.open("/curation", ".funnel")
    successes, failures, *_ = seen.ask("/api/curation")["funnels"]
    [level] = successes["levels"]  # the second run kept successes alone
    assert not level["worry"]
    warned = page.locator(f"section[aria-label='{failures['artifact']}']")
    assert failures["levels"][0]["successes"] == failures["levels"][0]["n"] > 0
    assert warned.locator(".bad").count() == 0, "a rule that asks for failures drops successes as it should"
    assert page.locator(f"section[aria-label='{successes['artifact']}'] .level").count() == 1
    page.keyboard.press("j")
    until(page, "location.search.includes('rule=')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".part")
    assert "dropped by" in page.inner_text(".part")
    assert page.inner_text(".counts b") == f"{level['before'] - level['after']} rows"
    page.get_by_role("button", name="true", exact=False).first.wait_for()
    page.get_by_role("button", name="show all rows").click()
    until(page, "!location.search.includes('among')")


def test_a_search_tree_is_walked_by_keys_and_opens_its_rows(seen: Watched) -> None:
    page = seen.open("/tree", ".lines")
    page.locator(".lines a").first.click()
    page.wait_for_selector(".leaf")
    assert page.locator(".leaf.best").count() >= 2
    page.get_by_text("as a table").click()
    page.wait_for_selector("details tbody tr")
    assert page.locator(".leaf").count() == page.locator("details tbody tr").count()
    page.locator(".leaf.chosen").focus()
    page.keyboard.press("ArrowRight")
    until(page, "location.search.includes('node=')")
    until(page, "document.activeElement.classList.contains('chosen')")
    assert "n " in page.inner_text("section.node p")
    assert page.inner_text("section.node pre").strip() != ""
    page.keyboard.press("ArrowLeft")
    until(page, "location.search.includes('node=0')")
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("b")
    until(page, "document.querySelector('section.node h2').textContent.includes('best path')")
    page.keyboard.press("Enter")
    page.wait_for_selector(".t.now")


def test_of_a_tree_of_many_nodes_those_in_view_are_drawn_and_keys_reach_all(seen: Watched) -> None:
    page = seen.open("/tree?artifact=strange/57a46e57&task_id=wide", ".leaf")
    until(page, "document.querySelectorAll('.leaf').length > 20")
    assert page.locator(".leaf").count() < 300
    assert seen.faults() == []  # not after the drawing was scrolled: then axe takes titles for text that is shown
    corner = "document.querySelector('.drawing').scrollTo(1e6, 1e6)"
    titles = "[...document.querySelectorAll('.leaf title')].map((one) => one.textContent).join()"
    before = page.evaluate(titles)
    page.evaluate(corner)
    until(page, f"{titles} !== {before!r}")
    assert page.locator(".leaf.chosen").count() == 1, "the stop of the tabulator stays where it was"
    page.locator(".leaf.chosen").focus()
    for key, node in [("ArrowRight", 1), ("ArrowRight", 5), ("ArrowRight", 21), ("ArrowRight", 85)] + [
        ("ArrowDown", 85 + number) for number in range(1, 30)
    ]:
        page.keyboard.press(key)
        until(page, f"location.search.endsWith('node={node}') && document.activeElement.matches('.chosen')")
    inside = """(([leaf, box]) => leaf.top >= box.top && leaf.bottom <= box.bottom)(
      [document.activeElement, document.querySelector('.drawing')].map((one) => one.getBoundingClientRect()))"""
    until(page, inside)
    page.get_by_text("as a table").click()
    page.wait_for_selector("details tbody tr")
    assert page.locator("details tbody tr").count() == WIDE


def test_attempts_at_a_task_are_a_tree_with_mean_rewards(seen: Watched) -> None:
    rows = seen.ask("/api/evaluations")["evaluations"]
    assert rows
    task = seen.ask("/api/search-trees")["tasks"][0]["task_id"]
    page = seen.open(f"/task?env=lookup&task_id={task}", ".leaf")
    branches = seen.ask(f"/api/task/tree?env=lookup&task_id={task}")["branches"]
    assert page.locator(".leaf").count() == len(branches) > 1
    assert re.search(r"\(\d.*to.*\), n \d+", page.inner_text(".drawing + .node p"))
    page.locator(".leaf").nth(1).click()
    until(page, "location.search.includes('branch=1')")
    page.locator("summary", has_text="the attempts as a tree").click()
    until(page, "location.search.includes('tree=closed')")
    page.reload()
    page.wait_for_selector(".strip")
    assert page.locator(".leaf").count() == 0


def test_two_runs_differ_by_config_metrics_and_rows(seen: Watched) -> None:
    page = seen.open("/runs", ".narrow")
    curated = page.locator("section[aria-label=curated]")
    assert "not success" in curated.inner_text()
    assert re.search("rows of trajectories", curated.inner_text())
    assert page.locator("section").count() == 1, "all other stages are the same, or were not part of the second run"
    curated.get_by_role("link", name=re.compile("row")).first.click()
    page.wait_for_selector(".part")
    page.go_back()
    page.wait_for_selector(".narrow")
    page.keyboard.press("s")
    until(page, "new URLSearchParams(location.search).get('a') > new URLSearchParams(location.search).get('b')")


def test_what_if_says_which_stages_would_run(seen: Watched) -> None:
    page = seen.open("/", ".what-if")
    page.keyboard.press("w")
    page.keyboard.type("grpo.samples = 2")
    page.keyboard.press("Enter")
    page.wait_for_selector(".what-if .tag")
    assert "set=grpo.samples" in page.url
    until(page, "document.querySelector('.what-if + p')?.textContent.includes('would run')", 120)
    told = page.inner_text(".what-if + p")
    assert all(stage in told for stage in ("grpo", "pairs", "eval_grpo", "curated"))
    assert "eval_warm" not in told
    assert page.locator(".graph .box.cached").count() == 6
    assert page.locator("#settings option[value^='grpo.samples = ']").count() == 1
    page.get_by_role("button", name="without grpo.samples=2").click()
    until(page, "!location.search.includes('set=') && !document.querySelector('.what-if .tag, .what-if + p')")


def test_pairs_are_turned_by_keys(seen: Watched) -> None:
    page = seen.open("/pair?artifact=strange/57a46e57", ".lines")
    page.locator(".lines a").first.click()
    page.wait_for_selector(".versus")
    assert page.inner_text("h1") == PAYLOADS[0]
    page.keyboard.press("n")
    until(page, f"document.querySelector('h1').textContent === {PAYLOADS[1]!r}")
    page.wait_for_selector(".versus")
    page.keyboard.press("p")
    until(page, f"document.querySelector('h1').textContent === {PAYLOADS[0]!r}")
