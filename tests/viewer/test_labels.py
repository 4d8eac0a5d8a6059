"""Rows labelled in a real browser, by keys alone."""

from pathlib import Path
from typing import Any

import pytest
from serving import serving, window
from watched import PICTURES, Watched, both_themes, until

from agentrl.flows.api.store import Store

pytestmark = pytest.mark.viewer
SCHEMA = """
labels:
  - {name: fault, values: [wrong tool, wrong argument, gave up], description: what went wrong}
"""


@both_themes
def test_the_page_is_accessible_in_both_themes(seen: Watched, request: pytest.FixtureRequest) -> None:
    page = seen.open("/labels", ".conversation .turn")
    assert "agentrl view --write" in page.inner_text(".problem")
    page.keyboard.press("u")
    until(page, "document.querySelector('.said').textContent.includes('only reads')")
    page.keyboard.press("j")
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"labels-{request.node.callspec.params['seen']}.png")
    assert seen.faults() == []


@both_themes
def test_the_page_of_a_row_shows_what_was_said_of_it(seen: Watched, store: str, request: pytest.FixtureRequest) -> None:
    author = f"dora {request.node.callspec.params['seen']}"
    row = Store(store).rows.filter(stage="grpo").select("trajectory_id").collect()["trajectory_id"].max()
    for value in ("up", "down"):
        Store(store).annotate(trajectory_id=row, name="thumbs", value=value, author=author, comment="<b>why</b>")
    Store(store).annotate(trajectory_id=row, name="stars", value=2, author=author, author_kind="judge", turn=0)
    page = seen.open(f"/row/{row}", ".conversation .turn")
    page.keyboard.press("a")
    page.wait_for_selector("#annotations tbody tr")
    lines = [line.inner_text().split("\t") for line in page.locator("#annotations tbody tr", has_text=author).all()]
    assert [line[:4] for line in lines] == [
        ["turn 0", "stars", "2", f"{author}, a judge"],
        ["row", "thumbs", "down · <b>why</b>", author],
        ["row", "thumbs", "up · <b>why</b> (counts no more)", author],
    ]
    assert all(line[4].startswith("20") for line in lines)
    assert "the newest counts" in page.inner_text("#annotations")
    assert seen.faults() == []
    page.locator("#annotations").get_by_role("link", name="turn 0").first.click()
    until(page, "location.search.includes('m=')")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_rows_are_labelled_by_keys_alone(browser: Any, store: str, tmp_path: Path, theme: str) -> None:
    schema = tmp_path / "labels.yaml"
    schema.write_text(SCHEMA)
    before = Store(store).annotation_log().height
    with serving(store, "--write", "--labels", str(schema)) as address:
        url, _, token = address.partition("#token=")
        with window(browser, url.rstrip("/"), theme) as seen:
            page = seen.open(f"/labels?filter=stage = 'grpo'#token={token}", ".conversation .turn")
            page.evaluate(f"localStorage.setItem('author', 'ann {theme}')")
            page = seen.open("/labels?filter=stage = 'grpo'", ".conversation .turn")
            first = page.inner_text("p a[href*='/row/']")

            def press(key: str, told: str) -> None:
                page.keyboard.press(key)
                until(page, f"document.querySelector('.said').textContent === {told!r}")

            press("u", "thumbs up of the whole row: saved")
            press("4", "stars 4 of the whole row: saved")
            page.keyboard.press("j")
            press("d", "thumbs down of turn 0: saved")
            page.keyboard.press("e")
            page.keyboard.type("the right answer")
            press("Control+Enter", "correction of turn 0: saved")
            page.keyboard.press("Escape")
            page.keyboard.press("c")
            page.keyboard.type("hm")
            press("Control+Enter", "comment of turn 0: saved")
            page.keyboard.press("Escape")
            press("x", "thumbs taken back of turn 0: saved")
            page.keyboard.press("n")
            until(page, f"document.querySelector(\"p a[href*='/row/']\").textContent !== {first!r}")
            page.locator("select").nth(1).focus()
            page.keyboard.type("fault")
            page.keyboard.press("Escape")
            until(page, "location.search.includes('name=fault')")
            page.wait_for_selector(".labels")
            press("3", "fault gave up of the whole row: saved")
            page.wait_for_selector("button[aria-label='fault: gave up'][aria-pressed=true]")
            assert seen.faults() == []
    counts = Store(store).annotations.filter(author=f"ann {theme}")
    names = {(row["name"], row["turn"]): row for row in counts.filter(trajectory_id=first).to_dicts()}
    assert {*names} == {("thumbs", None), ("stars", None), ("correction", 0), ("comment", 0), ("fault", None)}
    assert "the right answer" in names["correction", 0]["correction"]
    assert counts.filter(name="fault")["value"].to_list() == ["gave up"]
    assert Store(store).annotation_log().height == before + 7


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_tokens_are_labelled_by_the_mouse_and_by_keys(browser: Any, store: str, theme: str) -> None:
    author = f"eve {theme}"
    with serving(store, "--write") as address:
        url, _, token = address.partition("#token=")
        with window(browser, url.rstrip("/"), theme) as seen:
            page = seen.open(f"/labels?filter=stage = 'grpo'#token={token}", ".conversation .turn")
            page.evaluate(f"localStorage.setItem('author', {author!r})")
            page = seen.open("/labels?filter=stage = 'grpo'", ".conversation .turn")
            row = page.inner_text("p a[href*='/row/']")
            page.keyboard.press("ArrowRight")
            until(page, "document.querySelector('.said').textContent.includes('t shows the tokens')")
            page.keyboard.press("j")
            page.keyboard.press("t")
            page.wait_for_selector(".conversation .t.trained")
            for key in ("ArrowRight", "ArrowRight", "Shift+ArrowRight", "Shift+ArrowRight"):
                page.keyboard.press(key)
            until(page, "document.querySelectorAll('.t.picked').length === 3")
            picked = page.evaluate(
                "[...document.querySelectorAll('.t.picked')].map((span) => span.textContent).join('')"
            )
            assert page.inner_text("p[role=status] code") == picked.strip()
            page.keyboard.press("d")
            until(
                page,
                "/^thumbs down of tokens [0-9]+ to [0-9]+: saved$/.test(document.querySelector('.said').textContent)",
            )
            page.wait_for_selector("button[aria-label='thumbs: down'][aria-pressed=true]")
            assert seen.faults() == []
            page.screenshot(path=PICTURES / f"span-{theme}.png")
            page.keyboard.press("k")
            until(page, "document.querySelectorAll('.t.picked').length === 0")
            spans = page.locator(".conversation .tokens").first.locator(".t")
            box, other = spans.nth(4).bounding_box(), spans.nth(6).bounding_box()
            page.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)
            page.mouse.down()
            page.mouse.move(other["x"] + other["width"] - 1, other["y"] + other["height"] / 2, steps=5)
            page.mouse.up()
            until(page, "document.querySelectorAll('.t.picked').length > 0")
            page.keyboard.press("u")
            until(page, "document.querySelector('.said').textContent.startsWith('thumbs up of tokens 4 to 6')")
            page = seen.open(f"/row/{row}", ".conversation .turn")
            page.keyboard.press("a")
            page.locator("#annotations").get_by_role("link", name="tokens 4 to 6").first.click()
            until(page, "location.search.includes('t=4')")
    spans = Store(store).annotations.filter(author=author).sort("created_at")
    down, up = spans.select("value", "token_start", "token_end", "turn").rows()
    assert (down[0], down[2] - down[1], down[3]) == ("down", 3, None)
    assert up == ("up", 4, 7, None)
    [tokens] = Store(store).rows.filter(trajectory_id=row).select("n_tokens").collect()["n_tokens"]
    assert 0 < down[1] < down[2] <= tokens


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_people_say_by_keys_which_side_of_a_pair_is_better(browser: Any, store: str, theme: str) -> None:
    author = f"fay {theme}"
    with serving(store, "--write") as address:
        url, _, token = address.partition("#token=")
        with window(browser, url.rstrip("/"), theme) as seen:
            page = seen.open(f"/pair#token={token}", ".lines")
            page.evaluate(f"localStorage.setItem('author', {author!r})")
            page.locator(".lines a").first.click()
            page.wait_for_selector(".versus .t.trained")
            page.wait_for_selector(".labels button:enabled")
            chosen = page.locator(".sides a[href*='/row/']").first.inner_text()
            pair = page.inner_text("h1")
            for key, words in {
                "ArrowRight": "the right is better: saved",
                "x": "preference taken back: saved",
                "=": "neither is better: saved",
                "ArrowLeft": "the left is better: saved",
            }.items():
                page.keyboard.press(key)
                until(page, f"document.querySelector('.said').textContent === {words!r}")
            page.wait_for_selector(".labels button[aria-pressed=true]:has-text('the left')")
            assert seen.faults() == []
            PICTURES.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=PICTURES / f"preference-{theme}.png")
            page = seen.open(f"/row/{chosen}", ".conversation .turn")
            page.keyboard.press("a")
            page.wait_for_selector("#annotations tbody tr")
            assert f"pair {pair}" in page.inner_text("#annotations")
    log = Store(store).annotation_log().filter(author=author)
    assert log["value"].to_list() == ["rejected", None, "tie", "chosen"]
    assert set(log.select("trajectory_id", "pair_id", "name").rows()) == {(chosen, pair, "preference")}


def test_a_viewer_that_only_reads_says_how_a_pair_is_judged(seen: Watched) -> None:
    page = seen.open("/pair", ".lines")
    page.locator(".lines a").first.click()
    page.wait_for_selector(".labels button:disabled")
    assert "agentrl view --write" in page.inner_text(".labels")
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('.said').textContent.includes('only reads')")
