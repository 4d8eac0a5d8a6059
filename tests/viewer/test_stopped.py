"""What stopped is not forgotten, what runs says how far it is, and the graph shows both wherever it is drawn."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from serving import serving, window
from test_training import RUN, Training, copied
from watched import ENV, PICTURES, Watched, until

pytestmark = pytest.mark.viewer
__all__ = ["copied"]

LOST = {"env": "lookup", "task_id": "lost-one", "prompt": "capital of Ann?", "before": 1.0, "after": 0.0}


def recorded(training: Training, **stage: Any) -> None:
    training.record["stages"]["late"].update(stage)
    training.catalog.write_run(training.record)


def picture(page: Any, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for width in (390, 900, 1400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} at {width}"
        page.screenshot(path=PICTURES / f"{name}-{width}.png")


def test_every_page_says_how_far_a_stage_is_and_that_one_stopped(browser: Any, copied: str) -> None:
    training = Training(copied)
    training.step(2)
    recorded(training, progress={"done": 13, "total": 400, "left_s": 960.0})
    with serving(copied) as url, window(browser, url) as seen:
        for path in ("/", "/buffer", "/evaluation", "/curation", "/row/breach"):
            page = seen.open(path, ".now .running")
            assert page.inner_text(".now") == "◌ late 13 of 400, 16 min left", path
        training.record["state"] = "failed"
        recorded(training, status="failed", cause="out of memory")
        page.wait_for_selector(".now .failed:has-text('late of')")
        assert seen.faults() == []
        page.locator(".now .failed").click()
        page.wait_for_selector(".stopped")
        assert page.inner_text("h1") == RUN


def test_a_run_names_shards_that_are_slow_and_that_were_set_aside(browser: Any, copied: str) -> None:
    training = Training(copied)
    training.step(2)
    tries = [
        {"shard": "bucket 7", "state": "set aside", "worker": "a, process 4", "problem": "it was killed (signal 9)"},
        {"shard": "bucket 8", "state": "slow", "worker": "b, process 5", "seconds": 61.2},
        {"shard": "bucket 9", "state": "waiting"},
    ]
    counts = {"set aside": 1, "slow": 1, "waiting": 3}
    shards = {"what": "pairs", "counts": counts, "notice": "nobody works in the pool", "tries": tries}
    recorded(training, progress={"done": 12, "total": 17, "left_s": None}, shards=shards)
    with serving(copied) as url, window(browser, url) as seen:
        page = seen.open(f"/run/{RUN}", ".shards table")
        assert "12 of 17" in page.inner_text("section[aria-labelledby=stages]")
        told = page.inner_text(".shards")
        assert "pairs, 1 set aside, 1 slow, 3 waiting, nobody works in the pool" in told
        assert "and 2 more that are not done" in told
        rows = page.locator(".shards tbody tr").all_inner_texts()
        assert [row.split("\t") for row in rows] == [
            ["bucket 7", "✗ set aside", "a, process 4", "", "it was killed (signal 9)"],
            ["bucket 8", "◌ slow", "b, process 5", "1 min", ""],
            ["bucket 9", "▸ waiting", "", "", ""],
        ]
        picture(page, "run-shards")
        training.record["state"] = "failed"
        recorded(training, status="failed", cause="shard 'bucket 7' ended its process 3 times")
        page.wait_for_selector(".shards h2:has-text('as it was last heard of')")
        assert seen.faults() == []


def test_a_stage_that_was_killed_has_its_curves_its_log_and_the_command_that_goes_on(
    browser: Any, store: str, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    shutil.copytree(store, folder / "store")
    shutil.copy(Path(__file__).parent / "small.yaml", folder)
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "small.yaml", "--store", "store", "--until", "grpo"]
    command += ["--set", "stages.grpo.with.iterations=500"]
    before = set((folder / "store/runs").glob("*.json"))
    with subprocess.Popen(command, env=ENV, cwd=folder, stdout=subprocess.DEVNULL) as run:
        try:
            wait_for(lambda: set((folder / "store/runs").glob("*.json")) - before, 300)
            [record] = set((folder / "store/runs").glob("*.json")) - before
            log = record.with_suffix("") / "live/grpo.jsonl"
            wait_for(lambda: log.exists() and log.stat().st_size, 300)
            wait_for(lambda: json.loads(record.read_text())["stages"]["grpo"].get("progress"), 60)
        finally:
            os.kill(run.pid, signal.SIGKILL)
    with serving(str(folder / "store")) as url, window(browser, url) as seen:
        page = seen.open(f"/run/{record.stem}", ".stopped p > code")
        told = page.inner_text(".stopped")
        assert "✗ grpo killed at" in told
        assert "of 500" in told
        assert f"process {run.pid}" in told
        assert (
            f"go on: agentrl run small.yaml --set stages.grpo.with.iterations=500 --until grpo --store {folder}" in told
        )
        picture(page, "run-killed")
        assert seen.faults() == []
        page.locator("a", has_text="its curves").click()
        page.wait_for_selector(".chart canvas")
        assert "✗ grpo killed at" in page.inner_text(".stopped")
        picture(page, "training-killed")
        page = seen.open("/", ".box.killed")
        assert "killed: grpo" in page.inner_text(".urgent")
        assert "killed" in page.inner_text(f"tr:has(a[href='/run/{record.stem}'])")
        picture(page, "overview-killed")
        assert seen.faults() == []


def wait_for(true: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.parametrize("width", [390, 900, 1400])
def test_the_graph_fits_the_page_also_after_a_what_if(seen: Watched, width: int) -> None:
    page = seen.page
    page.set_viewport_size({"width": width, "height": 900})
    seen.open("/?set=grpo.samples%3D2", ".graph .box")
    until(page, "document.querySelectorAll('.box.run').length >= 4", 120)  # a plan takes seconds of a whole core
    out = """[...document.querySelectorAll('.box')].filter((box) => {
      const { left, right } = box.getBoundingClientRect();
      return left < 0 || right > innerWidth;
    }).length"""
    assert page.evaluate(out) == 0
    assert "will run: grpo" in page.inner_text(".urgent")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_nothing_is_up_to_date_while_its_plan_is_made(seen: Watched) -> None:
    answer = seen.ask("/api/overview")
    seen.page.route("**/api/overview*", lambda route: route.fulfill(json=answer | {"planning": True}))
    page = seen.open("/?stage=grpo", ".graph .box")
    assert page.locator(".box.cached").count() == 0
    assert "up to date" not in page.inner_text("section[aria-labelledby=stages]")
    assert "being planned" in page.inner_text("section[aria-labelledby=stages] table")


def test_the_overview_and_the_evaluations_begin_with_whether_it_is_better(seen: Watched) -> None:
    page = seen.open("/", ".headline:not(.waiting)")
    sentence = page.inner_text(".headline")
    assert "grpo is not shown to be better or worse than warm" in sentence or "than warm: " in sentence
    assert "95 % interval" in sentence
    assert "p = 0.000" not in sentence
    assert "the control was not run" in page.inner_text(".learned")
    page.get_by_role("link", name="the whole comparison").click()
    page.wait_for_selector("#verdict")
    assert page.inner_text(".headline") == sentence
    page = seen.open("/evaluation", ".headline")
    assert page.inner_text(".headline") == sentence
    assert page.evaluate(
        "document.querySelector('.headline').compareDocumentPosition(document.querySelector('table')) & 4"
    )
    heads = page.locator("thead th").all_inner_texts()
    assert not {"than", "arm"} & set(heads)
    page.get_by_role("checkbox", name="compare greedy").check()
    until(page, "document.querySelector('.headline')?.textContent.includes('greedily')")
    picture(page, "evaluations")
    assert seen.faults() == []


def test_the_overview_names_tasks_that_were_lost(seen: Watched) -> None:
    answer = seen.ask("/api/better")
    answer["difference"] |= {"lost": [LOST], "tasks_lost": 7, "shown": True, "mean": -0.2}
    seen.page.route("**/api/better", lambda route: route.fulfill(json=answer))
    page = seen.open("/", ".headline.bad")
    link = page.get_by_role("link", name="capital of Ann?")
    assert "task_id=lost-one" in str(link.get_attribute("href"))
    assert "1 of 7 tasks" in page.inner_text("section[aria-labelledby=better]")
