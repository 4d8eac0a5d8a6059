"""Training, runs and the doctor in a real browser, and what they show while a stage trains."""

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from serving import serving, window
from strange_rows import PAYLOADS
from watched import PICTURES, Watched, both_themes, until

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.live_metrics import LiveLog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines.run.runs import this_process

pytestmark = pytest.mark.viewer
RUN = "20991231-235959-live"


@both_themes
def test_training_is_accessible_in_both_themes(seen: Watched, request: pytest.FixtureRequest) -> None:
    page = seen.open("/training?step=0", ".chart canvas")
    page.wait_for_selector("section[aria-labelledby=step] tbody tr")
    page.locator("summary", has_text="as a table").click()
    page.wait_for_selector("details.numbers td")
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"training-{request.node.callspec.params['seen']}.png", full_page=True)
    assert seen.faults() == []


def test_a_step_is_chosen_by_keys_in_the_table_and_in_a_chart(seen: Watched, store: str) -> None:
    [grpo] = Catalog(store).manifests("grpo")
    page = seen.open("/training", ".chart canvas")
    page.locator("a", has_text="grpo/").first.click()
    until(page, f"location.search.includes('{grpo.fingerprint[:8]}')")
    page.wait_for_selector(".chart canvas")
    names = page.locator(".chart b").all_inner_texts()
    assert {"loss", "grad_norm", "success"} <= set(names)
    page.keyboard.press("j")
    page.wait_for_selector("section[aria-labelledby=step] tbody tr")
    assert "step=0" in page.url
    page.keyboard.press("j")
    until(page, "document.querySelector('#step').textContent === 'Step 1'")
    page.wait_for_selector("section[aria-labelledby=step] tbody tr")
    assert "32 rows in 8 groups" in page.inner_text("section[aria-labelledby=step]")
    page.locator("summary", has_text="as a table").click()
    page.get_by_role("button", name="0", exact=True).click()
    until(page, "document.querySelector('#step').textContent === 'Step 0'")
    chart = page.locator(".chart", has_text="loss").locator(".u-over").first
    chart.click(position={"x": chart.bounding_box()["width"] - 3, "y": 30})
    until(page, "document.querySelector('#step').textContent === 'Step 1'")


def test_groups_without_a_spread_are_flagged_and_lead_to_their_rows(seen: Watched, store: str) -> None:
    rows = TrajectoryBuffer(store).sql("select group_id, reward from trajectories where stage = 'grpo'")
    spread = {group["group_id"][0]: group["reward"].n_unique() for group in rows.partition_by("group_id")}
    flagged = 0
    for step in (0, 1):
        page = seen.open(f"/training?step={step}", "section[aria-labelledby=step] tbody tr")
        for name in page.locator("tr.flat button").all_inner_texts():
            assert spread.pop(name.lstrip("▸ ")) == 1
            flagged += 1
        assert (f"{flagged} group" in page.inner_text("section[aria-labelledby=step]")) == (step == 0 and flagged > 0)
    assert all(n > 1 for n in spread.values())
    page.locator("section[aria-labelledby=step] tbody tr:not(.flat) button").first.click()
    link = page.locator("tr.member a").first
    name = link.inner_text()
    link.click()
    page.wait_for_selector(".ribbon")
    assert page.inner_text("h1").startswith(name)
    page.locator(".ribbon a[href*='/training']").first.click()
    page.wait_for_selector("#step")
    assert "step=1" in page.url


def test_bounds_of_the_doctor_are_named_beside_their_curve(seen: Watched) -> None:
    page = seen.open("/training", ".chart canvas")
    assert "sick above 0.3" in page.locator(".chart", has_text="clip_share").first.inner_text()


@pytest.fixture
def copied(store: str, tmp_path: Path) -> str:
    """A copy of the store, in which a run of this process trains."""
    path = tmp_path / "store"
    shutil.copytree(store, path)
    return str(path)


class Training:
    """A stage that trains now, as the store sees it."""

    def __init__(self, store: str) -> None:
        catalog = Catalog(store)
        now = datetime.now(UTC).isoformat(sep=" ")
        stages = {"late": {"status": "running", "fingerprint": "3" * 32, "reasons": [], "started_at": now}}
        self.record = {
            "run_id": RUN, "pipeline": "<img src=x onerror=window.pwned=1>", "file": "/nowhere.yaml",
            "command": "agentrl run <script>window.pwned=1</script>", "engine": "none", "engine_reason": "",
            "state": "running", "started_at": now, "stages": stages, **this_process(),
        }  # fmt: skip
        self.catalog = catalog
        catalog.write_run(self.record)
        self.log = LiveLog(catalog.storage, RUN, "late", Path(store) / "tmp" / "late.jsonl")
        self.taken = 0

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            values = {f"series_{n:02d}": (self.taken * 37 + n) % 100 / 7 for n in range(39)}
            self.log.write({"step": self.taken, "loss": 1 / (self.taken + 1), **values})
            self.taken += 1

    def end(self) -> None:
        self.record["state"] = "completed"
        self.record["stages"]["late"]["status"] = "ran"
        self.catalog.write_run(self.record)


def told(page: Any, step: int) -> None:
    """Waits until the chart of the loss shows a step."""
    until(page, f"document.querySelector('.chart span')?.textContent.endsWith(' at {step}')")


def test_a_stage_at_work_is_drawn_as_it_goes_on(browser: Any, copied: str) -> None:
    training = Training(copied)
    training.step(3)
    with serving(copied) as url, window(browser, url) as seen:
        page = seen.open(f"/training?run={RUN}&stage=late", ".chart canvas")
        assert page.locator(".chart").count() == 40
        told(page, 2)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/api/" in request.url else None)
        training.step()
        told(page, 3)
        training.step(5)
        told(page, 8)
        assert all("/api/live/lines" in url and "cursor=0" not in url for url in asked), asked
        assert len(asked) <= 6
        # a hidden tab asks for nothing, and catches up
        page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        asked.clear()
        training.step(2)
        page.wait_for_timeout(1500)
        assert asked == []
        assert "at 8" in page.locator(".chart span").first.inner_text()
        page.evaluate("Object.defineProperty(document, 'hidden', {value: false, configurable: true})")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        told(page, 10)
        # its run, and the end of it
        page = seen.open(f"/run/{RUN}", "a:has-text('11 steps')")
        assert "loss 0.09" in page.inner_text("tbody")
        training.step()
        page.wait_for_selector("a:has-text('12 steps')")
        assert seen.faults() == []
        page = seen.open("/", f"tr:has(a[href='/run/{RUN}']):has-text('running')")
        training.end()
        page.wait_for_selector(f"tr:has(a[href='/run/{RUN}']):has-text('completed')")


def test_a_stage_that_begins_comes_to_a_page_that_is_open(browser: Any, copied: str) -> None:
    """Its log is there a while after the stage is said to run."""
    training = Training(copied)
    [log] = Path(copied).glob(f"runs/{RUN}/live/late.jsonl")
    log.rename(aside := log.with_suffix(".aside"))
    with serving(copied) as url, window(browser, url) as seen:
        page = seen.open("/training", "summary")
        page.wait_for_timeout(1500)
        assert "late" not in page.inner_text("details")
        aside.rename(log)
        training.step(3)
        page.wait_for_selector("details tr:has-text('late')", state="attached")


def test_rows_come_to_the_buffer_while_nobody_has_moved(browser: Any, copied: str) -> None:
    buffer = TrajectoryBuffer(copied)
    row = buffer.get(
        buffer.sql("select trajectory_id from trajectories where stage = 'grpo' limit 1")["trajectory_id"][0]
    )

    def append(name: str) -> None:
        own = {"trajectory_id": name, "episode_id": name, "created_at": datetime.now(UTC), "fingerprint": name}
        buffer.append([row.model_copy(update=own)], stage="late", fingerprint=name)

    with serving(copied) as url, window(browser, url) as seen:
        page = seen.open("/buffer", ".grid a")
        append("first-of-them")
        page.wait_for_selector("#row-0 a:has-text('first-of-them')")
        page.keyboard.press("j")
        append("second-of-them")
        page.wait_for_selector("button:has-text('newer rows: show them')")
        assert "first-of-them" in page.text_content("#row-0")
        page.get_by_role("button", name="newer rows: show them").click()
        page.wait_for_selector("#row-0 a:has-text('second-of-them')")


def test_pages_go_on_when_the_server_begins_again(browser: Any, copied: str) -> None:
    training = Training(copied)
    training.step(2)
    with serving(copied) as url:
        opened = window(browser, url)
        seen = opened.__enter__()
        page = seen.open(f"/training?run={RUN}&stage=late", ".chart canvas")
        told(page, 1)
    page.wait_for_selector("text=the server does not answer")
    training.step(2)
    with serving(copied, port=int(urlsplit(url).port or 0)):
        told(page, 3)
        page.wait_for_selector("text=the server does not answer", state="detached")
        assert all(
            "ERR_CONNECTION_REFUSED" in line or "ERR_INCOMPLETE" in line or "ERR_EMPTY" in line for line in seen.console
        )
        seen.console.clear()
        opened.__exit__(None, None, None)


@both_themes
def test_a_run_and_its_doctor_are_accessible(seen: Watched, request: pytest.FixtureRequest) -> None:
    page = seen.open("/", "section[aria-labelledby=runs] a")
    page.locator("section[aria-labelledby=runs] a[href^='/run/']").last.click()
    page.wait_for_selector("section[aria-labelledby=stages] tbody tr")
    assert "train.grpo" in page.inner_text("tbody")
    theme = request.node.callspec.params["seen"]
    page.screenshot(path=PICTURES / f"run-{theme}.png")
    assert seen.faults() == []
    page.locator("a", has_text="what the doctor says").click()
    page.wait_for_selector("p.good, .finding", timeout=300_000)  # it imports torch, and loads a model
    page.screenshot(path=PICTURES / f"doctor-{theme}.png")
    assert seen.faults() == []


def test_payloads_in_answers_about_training_runs_and_the_doctor_are_text(seen: Watched) -> None:
    """As if a store had them in each name and text, also where our own commands would refuse to write them."""
    answers: dict[str, Any] = {}
    seen.page.route(
        re.compile("/api/(run|doctor|training|live/lines)([?]|$)"),
        lambda route: route.fulfill(json=answers[urlsplit(route.request.url).path.removeprefix("/api/")]),
    )
    words: dict[str, Any] = {}
    stream = {"content-type": "text/event-stream"}
    seen.page.route("**/api/events", lambda route: route.fulfill(headers=stream, body=f"data: {json.dumps(words)}\n\n"))
    page = seen.page
    for payload in PAYLOADS[:4]:
        live = {f"{payload}/{payload}": 50}
        words |= {
            "version": None,
            "runs": {payload: payload},
            "live": live,
            "stages": {f"{payload}/{payload}": "running"},
        }
        words |= {"progress": {f"{payload}/{payload}": {"done": 1, "total": 2, "left_s": 3.0}}}
        words |= {"stopped": [{"run_id": payload, "pipeline": payload, "stage": payload, "state": payload}]}
        stage = {"stage": payload, "uses": payload, "status": "failed", "artifact": payload, "reasons": [payload]}
        stage |= {
            "cause": payload,
            "warnings": [payload],
            "started": "",
            "seconds": 1.0,
            "live": False,
            "curves": True,
            "progress": {"done": 1, "total": 2, "left_s": None},
            "log": payload,
            "log_tail": payload,
        }
        run: dict[str, Any] = dict.fromkeys(
            ("run_id", "pipeline", "state", "command", "host", "started", "gone", "go_on"), payload
        )
        answers["run"] = run | {"seconds": 1.0, "stages": [stage]}
        finding: dict[str, Any] = dict.fromkeys(
            ("stage", "artifact", "name", "evidence", "threshold", "remedy"), payload
        )
        finding |= {"rows": [payload], "tokens": [1], "step": 1}
        told = {"run_id": payload, "working": False, "problem": None, "stages": [payload], "findings": [finding]}
        answers["doctor"] = told
        band: dict[str, Any] = {"metric": payload, "bound": 0.5, "above": True, "counts": payload}
        training: dict[str, Any] = {
            "artifact": None,
            "stage": payload,
            "uses": payload,
            "run_id": payload,
            "when": payload,
        }
        answers["training"] = {"stages": [training | {"steps": 1, "series": [payload], "bands": [band]}]}
        answers["live/lines"] = {"lines": [json.dumps({"step": 0, payload: 0.7})], "cursor": 50, "restarted": False}
        seen.open(f"/run/{quote(payload, safe='')}", "pre.log")
        assert page.evaluate("document.body.textContent").count(payload) >= 6
        seen.open("/doctor?run=x&at=3", ".finding dd a")
        assert page.evaluate("document.body.textContent").count(payload) >= 6
        step, row, rows = (link.get_attribute("href") or "" for link in page.locator(".finding dd a").all())
        assert ("step=1" in step, "t=1&lens=mask" in row, rows.startswith("/buffer?filter=")) == (True, True, True)
        assert all("at=3" in link for link in (step, row, rows))
        seen.open("/training", ".chart b")
        assert page.evaluate("document.body.textContent").count(payload) >= 4
        seen.check()


def test_pages_of_a_new_store_name_the_command_that_fills_them(browser: Any, tmp_path: Path) -> None:
    with serving(str(tmp_path)) as url, window(browser, url) as seen:
        for path in ("/", "/buffer", "/training", "/doctor", "/evaluation", "/pair"):
            page = seen.open(path, "code")
            command = page.text_content(".page code >> nth=0")
            assert command.startswith("agentrl run"), path
            assert command.endswith(f" --store {tmp_path}"), path
        assert all("404" in line for line in seen.console)  # there is no buffer, the browser says by itself
        seen.console.clear()


def test_how_many_tools_failed_is_said_beside_how_many_answers_read_so(seen: Watched, store: str) -> None:
    rows = TrajectoryBuffer(store).sql("select trajectory_id, n_tool_errors from trajectories order by n_tool_errors")
    name, errors = rows.row(-1)
    assert errors > 0
    page = seen.open(f"/row/{name}?lens=text", ".title")
    assert f"{errors} tool error" in page.inner_text(".title")
