"""A conversation laid out to be read: Markdown as elements, JSON in lines, template tokens folded, an outline."""

import pytest
from watched import Watched, until

pytestmark = pytest.mark.viewer

WRITTEN = """# Plan
See **both** files and `a < b`, *now*:
- first
  - second
1. third
> quoted

| a | b |
|---|---|
| 1 | <img src=x onerror=alert(1)> |

```python
x = "**not bold**"
```
[a link](javascript:alert(1)) <script>window.pwned=1</script> __init__ 2 * 3 * 4 **open"""


def laid_out(seen: Watched, text: str) -> str:
    page = seen.open("/", "h1")
    return page.evaluate(
        """async (text) => {
          const { markdown, indented } = await import("/static/markdown.js");
          const { html, render } = await import("/static/ui.js");
          const host = document.body.appendChild(document.createElement("div"));
          render(html`<div>${markdown(text)}</div>`, host);
          return host.innerHTML;
        }""",
        text,
    )


def test_markdown_becomes_elements_and_nothing_else(seen: Watched) -> None:
    html = laid_out(seen, WRITTEN)
    for part in (
        '<p class="heading">Plan</p>',
        "<strong>both</strong>",
        "<code>a &lt; b</code>",
        "<em>now</em>",
        "<blockquote>quoted</blockquote>",
        "<td>1</td>",
        'x = "**not bold**"',
        "(javascript:alert(1",
        "__init__ 2 * 3 * 4 **open",
        "<span>1.</span><span>third</span>",
        'class="in-1"',
    ):
        assert part in html, part
    assert not any(tag in html for tag in ("<script", "<img", "<a ", "href"))


@pytest.mark.parametrize("text", ["`" * 5000, "*" * 5000, "[" * 5000, "|" * 5000 + "\n|-|\n", "- " * 3000, "> " * 3000])
def test_markdown_that_never_ends_takes_no_time(seen: Watched, text: str) -> None:
    page = seen.open("/", "h1")
    took = page.evaluate(
        """async (text) => {
          const { markdown } = await import("/static/markdown.js");
          const start = performance.now();
          markdown(text);
          return performance.now() - start;
        }""",
        text,
    )
    assert took < 1500


def test_json_gets_lines_and_keeps_its_digits(seen: Watched) -> None:
    page = seen.open("/", "h1")
    texts = ['{"a":[1,2],"b":{},"n":12345678901234567890,"s":"x, {y: 1}"}', "{no json}", "[]", '"text"']
    shown = page.evaluate(
        """async (texts) => {
          const { indented } = await import("/static/markdown.js");
          return texts.map(indented);
        }""",
        texts,
    )
    first = '{\\n  "a": [\\n    1,\\n    2\\n  ],\\n  "b": {},\\n  "n": 12345678901234567890,\\n  "s": "x, {y: 1}"\\n}'
    assert shown == [first.replace("\\n", "\n"), None, "[]", None]


def test_a_row_is_read_first_and_its_tokens_are_one_key_away(seen: Watched) -> None:
    page = seen.open("/row/breach", ".turn")
    assert page.locator(".t").count() == 0
    page.keyboard.press("l")
    page.wait_for_selector(".t.trained")
    assert page.locator(".folding .t.template.first").count() > 0
    page.get_by_role("button", name="show template tokens").click()
    until(page, "!document.querySelector('.folding') && location.search.includes('template=shown')")
    page.keyboard.press("l")
    until(page, "document.querySelectorAll('.t').length === 0")
    page.locator(".outline a").nth(2).click()
    until(page, "location.search.includes('m=2') && document.querySelector('#m2.current')")
    assert seen.faults() == []
