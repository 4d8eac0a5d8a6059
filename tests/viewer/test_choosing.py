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
    assert not level["mostly_successes"]
    warned = page.locator(f"section[aria-label='{failures['artifact']}']")
    assert "most of what it dropped had succeeded" in warned.inner_text()
    assert page.locator(f"section[aria-label='{successes['artifact']}'] .bad").count() == 0
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


def test_a_lasso_on_the_map_is_a_filter(seen: Watched) -> None:
    page = seen.open("/map?filter=stage = 'grpo'", ".plane")
    until(page, "document.querySelector('b[role=status]')?.textContent === '64 rows'")
    ink = "(([c]) => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size)"
    until(page, f"{ink}(document.querySelectorAll('.plane')) > 8")
    box = page.locator(".plane").bounding_box()
    for right, rows in ((0.01, 0), (0.997, 64)):  # the margin holds no point, the whole holds all
        page.mouse.move(box["x"] + 2, box["y"] + 2)
        page.mouse.down()
        for x, y in ((right, 0.005), (right, 0.995), (0.002, 0.995)):
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=4)
        page.mouse.up()
        until(page, f"document.querySelector('b[role=status]')?.textContent === '{rows} rows in the lasso'")
        assert "lasso=" in page.url
    assert page.locator("details[open] tbody tr").count() > 0
    page.keyboard.press("Enter")
    page.wait_for_selector(".grid a")
    assert page.inner_text(".counts b").startswith(f"{rows} row")
    page.get_by_role("link", name="map", exact=True).last.click()
    page.wait_for_selector(".plane")
    page.keyboard.press("c")
    until(page, "!location.search.includes('lasso')")
    page.keyboard.press("+")
    page.keyboard.press("v")
    until(page, "location.search.includes('lasso=') && location.search.includes('view=')")
    page.keyboard.press("0")
    until(page, "!location.search.includes('view=')")
    page.get_by_label("draw").select_option("density")
    until(page, "document.querySelector('.legend').textContent.includes('rows in a cell')")


def test_a_wheel_moves_the_map_at_once_and_writes_the_address_when_it_rests(seen: Watched) -> None:
    page = seen.open("/map", ".plane")
    count = "() => +document.querySelector('.plane').getAttribute('aria-label').match(/, (\\d+) in view/)[1]"
    until(page, f"({count})() > 3")
    all_points = page.evaluate(count)
    page.evaluate("""() => {
      window.written = [];
      const write = history.replaceState.bind(history);
      history.replaceState = (...all) => { window.written.push(all[2]); write(...all); };
    }""")
    asked: list[str] = []
    page.on("request", lambda request: "/api/" in request.url and asked.append(request.url))
    box = page.locator(".plane").bounding_box()
    page.evaluate(
        """([x, y]) => { for (let i = 0; i < 30; i++) document.querySelector('.plane').dispatchEvent(
             new WheelEvent('wheel', {deltaY: -1, clientX: x, clientY: y, bubbles: true, cancelable: true})) }""",
        [box["x"] + 1, box["y"] + 1],
    )
    until(page, f"({count})() < {all_points}")
    until(page, "location.search.includes('view=')")
    assert len(page.evaluate("window.written")) == 1
    assert asked == []
    width = float(page.url.split("view=")[1].split("%2C")[2])
    page.keyboard.press("0")
    until(page, f"({count})() === {all_points}")
    until(page, "!location.search.includes('view=')")
    assert width < 0.8**29 * 100  # each turn of the wheel counted


def test_very_many_points_are_dots_whose_colours_say_how_they_ended(seen: Watched) -> None:
    page = seen.open("/map", ".plane")
    painted = page.evaluate("""async () => {
      const { paint } = await import("/static/plane.js");
      const found = [];
      for (const count of [20_000, 20_001]) {
        const canvas = document.querySelector(".page").appendChild(document.querySelector(".plane").cloneNode());
        const of = (kind) => kind.from({ length: count }, (_, i) => (kind === Float32Array ? i / count : 1));
        const cloud = { x: of(Float32Array), y: of(Float32Array), rows: of(Int32Array), scored: of(Int32Array),
          solved: of(Int32Array).map((_, i) => (i < count / 2 ? 1 : 0)) };
        const told = paint(canvas, cloud, { x: 0.5, y: 0.5, width: 3 }, [], "points");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const pixels = new Uint32Array(data.buffer);
        const colours = new Set(pixels.filter(Boolean));
        found.push([told.points, told.density, pixels.filter(Boolean).length, colours.size]);
      }
      return found;
    }""")
    (shapes, _, most, blended), (dots, density, ink, colours) = painted
    assert (shapes, dots, density) == (20_000, 20_001, False)
    assert ink < most
    assert blended > colours == 2, "a dot has one colour, that of the first point in its place"


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
