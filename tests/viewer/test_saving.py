"""Rows saved as a selection, and filters copied as rules, in a real browser."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import serving, window
from watched import ENV, PICTURES, Watched, both_themes, until

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer

pytestmark = pytest.mark.viewer
FILTER = "stage = 'grpo' and not success"


def test_without_write_saving_is_a_command(seen: Watched) -> None:
    page = seen.open(f"/buffer?filter={FILTER}", ".grid a")
    page.keyboard.press("s")
    until(page, "document.activeElement.id === 'selection-name'")
    page.keyboard.type("mine")
    page.wait_for_selector(".saving code")
    assert page.locator(".saving button", has_text="save").first.is_disabled()
    told = page.inner_text(".saving")
    assert "agentrl view --write" in told
    assert "agentrl buffer select mine --split all --where 'stage = '\\''grpo'\\'' and not success' --at " in told


@both_themes
def test_saving_is_accessible_in_both_themes(seen: Watched, request: pytest.FixtureRequest) -> None:
    page = seen.open(f"/buffer?filter={FILTER}", ".grid a")
    page.keyboard.press("x")
    page.keyboard.press("s")
    page.wait_for_selector(".saving code")
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"saving-{request.node.callspec.params['seen']}.png")
    assert seen.faults() == []


def test_rows_are_saved_shown_and_used_by_a_pipeline(browser: Any, own_store: str, tmp_path: Path) -> None:
    """By keys alone, with the real command behind it; then by the rows that were selected."""
    failed = TrajectoryBuffer(own_store).sql(f"select trajectory_id from trajectories where {FILTER}").height
    with serving(own_store, "--write") as address:
        url, _, token = address.partition("#token=")
        with window(browser, url.rstrip("/")) as seen:
            seen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
            page = seen.open(f"/buffer?filter={FILTER}#token={token}", ".grid a")
            page.keyboard.press("s")
            page.keyboard.type("failures")
            page.keyboard.press("Tab")
            until(page, f"document.activeElement.textContent === 'save {failed} rows'")
            page.keyboard.press("Enter")
            page.wait_for_selector(".saving [role=status] a", timeout=60_000)
            assert f"{failed} rows of version" in page.inner_text(".saving [role=status]")
            [manifest] = Catalog(own_store).manifests("failures")
            name = f"failures/{manifest.fingerprint[:8]}"
            page.get_by_role("button", name="copy for a pipeline").click()
            until(page, "document.querySelector('.said').textContent.includes('copied')")
            edge = page.evaluate("navigator.clipboard.readText()")
            page.locator(".saving [role=status] a").first.click()
            page.wait_for_selector(".part")
            assert name in page.inner_text(".part")
            page.keyboard.press("x")
            page.keyboard.press("s")
            page.keyboard.type("failures")
            page.get_by_role("button", name="save the 1 selected").click()
            page.wait_for_selector(".saving [role=status] a", timeout=60_000)
            assert "unchanged" in page.inner_text(".saving [role=status]")
            assert seen.faults() == []
            assert len(Catalog(own_store).manifests("failures")) == 2
            page = seen.open(f"/buffer?filter={FILTER}", ".grid a")
            page.keyboard.press("s")
            page.keyboard.type("by-enter")
            page.keyboard.press("Enter")
            page.wait_for_selector(".saving [role=status] a", timeout=60_000)
            assert "by-enter/" in page.inner_text(".saving [role=status]")
    assert edge == f"inputs: {{trajectories: {name}}}"
    stage = f"uses: trajectories.curate, {edge}, with: {{split: null, rules: [{{rule: filter, where: {FILTER}}}]}}"
    (tmp_path / "p.yaml").write_text(f"name: p\nstages:\n  again: {{{stage}}}\n")
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "p.yaml", "--store", own_store]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [again] = Catalog(own_store).manifests("again")
    assert again.outputs["trajectories"].rows == failed
