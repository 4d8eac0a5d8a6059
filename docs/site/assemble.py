"""Gather the pages of the site into one folder, beside a configuration of MkDocs that names them.

    python docs/site/assemble.py build/docs

Pages are those below ``docs/``, the results of benchmarks, the README of each method and example, and the reference
that is made from the code. Their links stay links: to a page of the site, or to the file in the repository. A link to
something that does not exist ends the program.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import reference
import yaml

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/agentrl/agentrl"
SITE = Path("docs/site")
FENCE = re.compile(r"^( *)(```+|~~~+)[^\n]*\n.*?^\1\2 *$", re.M | re.S)
LINK = re.compile(r"`[^`\n]*`|(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")  # or code, which has none

Pages = dict[str, str]
"""Markdown by path on the site."""


def sources() -> dict[Path, str]:
    """The path on the site of each page in the repository, by its path there."""
    result = {path: str(path.relative_to("docs")) for path in _below("docs", "**/*.md") if SITE not in path.parents}
    result |= {path: f"results/{path.name}" for path in _below("benchmarks/results", "*.md")}
    result |= {path: f"explanations/methods/{path.parts[-2]}.md" for path in _below("pipelines/methods", "*/README.md")}
    result |= {path: f"how-to/examples/{path.parts[-2]}.md" for path in _below("examples", "*/README.md")}
    result |= {Path(name): name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
    return {path: re.sub(r"(^|/)README\.md$", r"\1index.md", target) for path, target in result.items()}


def _below(folder: str, pattern: str) -> list[Path]:
    return [path.relative_to(ROOT) for path in sorted((ROOT / folder).glob(pattern))]


def outside_fences(text: str, change: "re.Pattern[str]", by: object) -> str:
    """The text with a pattern replaced in all but its fenced blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change.sub(by, text[end : fence.start()]), fence[0]]  # type: ignore[arg-type]
        end = fence.end()
    return "".join([*parts, change.sub(by, text[end:])])  # type: ignore[arg-type]


def with_links(text: str, path: Path, target: str, pages: dict[Path, str], broken: list[str]) -> str:
    """The page at ``target`` of the site: its links, written for ``path`` in the repository, lead on from there."""

    def link(match: re.Match[str]) -> str:
        if not match[2] or re.match(r"[a-z]+:", match[2]):
            return match[0]
        aim = Path(os.path.normpath(path.parent / match[2]))
        page = pages.get(aim) or pages.get(aim / "README.md")
        if page:
            return match[1] + os.path.relpath(page, os.path.dirname(target) or ".") + match[3]
        if aim.parts[:2] == ("docs", "images") and (ROOT / aim).is_file():
            return match[1] + os.path.relpath(aim.relative_to("docs"), os.path.dirname(target) or ".") + match[3]
        if not (ROOT / aim).exists():
            broken.append(f"{path}: there is no {match[2]}")
        return f"{match[1]}{REPOSITORY}/{'tree' if (ROOT / aim).is_dir() else 'blob'}/main/{aim}{match[3]}"

    return outside_fences(text, LINK, link)


def for_markdown(text: str) -> str:
    """GitHub's Markdown as that of Python-Markdown: lists begin after an empty line, and what belongs to an item is
    indented by four spaces."""
    lines: list[str] = []
    fence = ""
    item = False
    for line in text.split("\n"):
        opening = re.match(r" *(```+|~~~+)", line)
        marked = re.match(r"( *)([-*]|\d+\.) ", line)
        if not fence and marked and lines and lines[-1].strip() and not item and not lines[-1].startswith(("|", "#")):
            lines.append("")
        if opening:
            fence = "" if fence and line.strip() == fence else fence or opening[1]
        if not fence:
            item = bool(marked) or (item and (not line.strip() or line.startswith(" ")))
        inside = item and line.startswith("  ") and line.strip()
        lines.append(re.sub(r"^ +", lambda spaces: " " * (4 * -(-len(spaces[0]) // 4)), line) if inside else line)
    return "\n".join(lines)


def title(text: str) -> str:
    heading = re.search(r"^# +(.+?) *$", text, re.M)
    return re.sub(r"[`*]", "", heading[1]) if heading else "?"


def navigation(pages: Pages) -> list[object]:
    """The sections of ``docs/README.md`` with the pages that they name, in its order; then what they lead to."""
    left = dict.fromkeys(sorted(pages))
    left.pop("index.md")
    sections: list[tuple[str, list[object]]] = []
    for part in pages["index.md"].split("\n## ")[1:]:
        named = [name for name in re.findall(r"\]\(([\w./-]+\.md)\)", part.partition("\n")[2]) if name in left]
        if not (entries := list(dict.fromkeys(named))) or ":" not in (head := part.partition("\n")[0]):
            continue
        for name in entries:
            left.pop(name)
        sections.append((head.partition(":")[0], [{title(pages[name]): name} for name in entries]))
    by_name = dict(sections)
    for name, folder, label in (
        ("Reference", "reference/stages/", "Stages"),
        ("Reference", "reference/choices/", "Choices"),
        ("Reference", "reference/", ""),
        ("Explanations", "explanations/methods/", "Methods, one by one"),
        ("Explanations", "decisions/", "Decisions, one by one"),
        ("How-to", "how-to/examples/", "Examples"),
        ("Results", "results/", ""),
    ):
        below = [page for page in left if page.startswith(folder)]
        below.sort(key=lambda page: (not page.endswith("index.md"), page))
        for page in below:
            left.pop(page)
        entries = [{title(pages[page]): page} for page in below]
        by_name[name] += [{label: entries}] if label and entries else entries
    return [
        {"Start": "index.md"},
        *({name: entries} for name, entries in sections),
        {"About": [{title(pages[page]): page} for page in left]},
    ]


def assembled() -> Pages:
    """Every page of the site by its path. Raises SystemExit if a link leads nowhere."""
    known = sources()
    broken: list[str] = []
    pages = {
        target: with_links((ROOT / path).read_text(), path, target, known, broken) for path, target in known.items()
    }
    if broken:
        raise SystemExit("\n".join(broken))
    return pages | reference.generated()


def write(folder: Path, pages: Pages, files: Iterable[Path]) -> None:
    """The pages below ``folder/pages`` with what they show, and ``folder/mkdocs.yml``. ``files`` become assets."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in pages.items():
        path = folder / "pages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(for_markdown(text))
    shutil.copytree(ROOT / "docs/images", folder / "pages/images")
    shutil.copytree(ROOT / SITE / "assets", folder / "pages/assets")
    for file in files:
        shutil.copy(file, folder / "pages/assets")
    twin = folder / "twins/reference/api.md"  # of the page that MkDocs fills
    twin.parent.mkdir(parents=True)
    twin.write_text(reference.api_twin())
    config = {"INHERIT": os.path.relpath(ROOT / SITE / "mkdocs.yml", folder), "nav": navigation(pages)}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def main() -> None:
    folder, *files = map(Path, sys.argv[1:])
    pages = assembled()
    write(folder, pages, files)
    print(f"{len(pages)} pages")


if __name__ == "__main__":
    main()
