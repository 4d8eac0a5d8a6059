"""What MkDocs does beside its own: a Markdown twin of each page, ``llms.txt`` and ``llms-full.txt``."""

import re
from pathlib import Path
from typing import Any

Entry = tuple[str, str, str]
"""Section, title and path of a page."""


def entries(navigation: list[Any], section: str = "") -> list[Entry]:
    """The pages of the navigation in order; pages below a heading belong to the section that it is in."""
    matches: list[Entry] = []
    for item in navigation:
        [(label, below)] = item.items()
        matches += [(section or label, label, below)] if isinstance(below, str) else entries(below, section or label)
    return matches


def first_sentence(text: str) -> str:
    """The first sentence of a page's first paragraph of prose, without Markdown's marks."""
    for block in re.sub(r"^(```+).*?^\1$", "", text, flags=re.M | re.S).split("\n\n"):
        if block.strip() and not re.match(r"\s*([#|<!:>`-]|\d+\.)", block):
            sentence = re.split(r"(?<=[.?!]) ", " ".join(block.split()))[0]
            return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence)
    return ""


def on_post_build(config: Any) -> None:
    site, pages = Path(config["site_dir"]), Path(config["docs_dir"])
    short = [f"# {config['site_name']}\n\n> {config['site_description']}: pages as Markdown.\n"]
    full: list[str] = []
    before = ""
    for section, label, name in entries(config["nav"]):
        text = (twins if (twins := pages.parent / "twins" / name).is_file() else pages / name).read_text()
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
        if section != before:
            short.append(f"\n## {section}\n")
            before = section
        about = first_sentence(text)
        short.append(f"- [{label}]({name}){': ' + about if about else ''}")
        full.append(f"<!-- {name} -->\n\n{text.strip()}\n")
    (site / "llms.txt").write_text("\n".join(short) + "\n")
    (site / "llms-full.txt").write_text("\n\n".join(full))
