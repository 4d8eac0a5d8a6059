"""Pages of what was chosen and why, in a real browser: curation, attempts as trees, two runs, what-if plans."""

import re

import pytest
from strange_rows import PAYLOADS
from watched import Watched, until

from agentrl.datastore.buffer import TrajectoryBuffer

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


def test_attempts_at_a_task_are_a_tree_with_mean_rewards(seen: Watched, store: str) -> None:
    query = "select task_id from trajectories where stage = 'grpo' order by task_id limit 1"
    task = TrajectoryBuffer(store).sql(query)["task_id"][0]
    page = seen.open(f"/task?env=lookup&task_id={task}", ".tree tbody tr")
    branches = seen.ask(f"/api/task/tree?env=lookup&task_id={task}")["branches"]
    assert page.locator(".tree tbody tr").count() == len(branches) > 1
    assert re.search(r"\(\d.*to.*\), n \d+", page.inner_text(".tree tbody tr"))
    steps = page.eval_on_selector_all(".tree td.cut", "cells => cells.map((cell) => parseInt(cell.style.paddingLeft))")
    deeper = [steps[branch["parent"]] + 12 if branch["parent"] is not None else 0 for branch in branches]
    assert steps == deeper, "each stands further to the right than the one from which it goes on"
    page.locator("summary", has_text="the attempts as a tree").click()
    until(page, "location.search.includes('tree=closed')")
    page.reload()
    page.wait_for_selector(".strip")
    assert page.locator(".tree").count() == 0


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
