"""Links and anchors of the pages, over their sources: what a site would show broken is broken here first."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "pipelines/methods").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
]


def prose(path: Path) -> str:
    """The page without its fenced blocks and its code in backticks."""
    text = re.sub(r"^( *)(```+).*?^\1\2 *$", "", path.read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The ids of a page's headings, as GitHub and the site make them, and those that it writes by hand."""
    text = re.sub(r"^( *)(```+).*?^\1\2 *$", "", path.read_text(), flags=re.M | re.S)
    ids = set(re.findall(r'(?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#+ +(.*?) *#*$", text, re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        ids.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return frozenset(ids)


def links(path: Path) -> Iterator[tuple[str, str]]:
    """(file, anchor) of each link of a page to something of this project."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not re.match(r"[a-z]+:", target):
            yield tuple(unquote(part) for part in target.partition("#")[::2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path) -> None:
    for file, anchor in links(page):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.relative_to(ROOT)}: there is no {file}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), (
                f"{page.relative_to(ROOT)}: {file} has no #{anchor}; it has {anchors(target)}"
            )


def test_each_proof_names_a_test_or_a_page_of_results() -> None:
    page = ROOT / "docs/explanations/proof-without-a-gpu.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        assert re.search(r"\]\(\.\./\.\./(tests/\w+/test_\w+\.py|benchmarks/results/\w+\.md)\)", row), row


def named_pages() -> Iterator[tuple[Path, str]]:
    """(file, page) of each mention of a page in code, messages, pipeline files and tests."""
    for folder in ("agentrl", "schemas", "datastore", "pipelines", "flows", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml", ".js", ".j2") and path.is_file():
                yield from ((path, name) for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text()))


def test_pages_that_code_names_exist() -> None:
    missing = {(str(path.relative_to(ROOT)), name) for path, name in named_pages() if not (ROOT / name).exists()}
    assert not missing


def test_every_page_is_found_from_the_index() -> None:
    seen, ahead = set(), [ROOT / "docs/README.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        targets = {(page.parent / file).resolve() for file, _ in links(page) if file.endswith(".md")}
        ahead += [target for target in targets - seen if target.is_file()]
    lost = {path.relative_to(ROOT) for path in PAGES if "docs" in path.relative_to(ROOT).parts} - {
        path.relative_to(ROOT) for path in seen
    }
    assert not lost
