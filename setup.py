"""What pyproject.toml cannot say: on a package index, links of the README lead to the files of this version."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+\))")
"""A link or an image whose target is neither an address nor a place on the page; texts may hold line breaks."""


def absolute(text: str) -> str:
    """The same Markdown, with targets that do not depend on where it is shown."""
    base = f"{PROJECT['urls']['Repository']}/{{}}/v{PROJECT['version']}/"
    return LINK.sub(lambda link: link[1] + link[2] + base.format("raw" if link[1] else "blob") + link[3], text)


if __name__ == "__main__":
    setup(long_description=absolute((ROOT / "README.md").read_text()), long_description_content_type="text/markdown")
