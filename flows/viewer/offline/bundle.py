"""One HTML file out of modules, style sheets and data, which a browser opens without a server.

The policy of the file allows one script by its hash: a loader that holds the modules as texts. It makes them known to
the browser as blobs, and nothing but blobs can be loaded: no address of the network. Markup cannot name a blob that is
made later, and trusted types let no module write markup. Data stands in blocks that browsers do not run, as base64, so
that no byte of a store is ever read as markup.
"""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

STATIC = Path(__file__).parents[1] / "static"
PLACES = {"served.js": "exported.js"}
"""Modules that are something else in a file."""

_IMPORT = re.compile(
    r"""^(?:import(?:[\w\s{},*]+from)?|export[\w\s{},*]+from)\s*"\./([^"]+)"|=> import\("\./([^"]+)"\)""", re.MULTILINE
)
_VENDORED = re.compile(r'\b(?:from|import)"\./([^"]+)"')
_FONT = re.compile(r'url\("([^":]+)"\)')

LOADER = """const parts = %s;
const urls = new Map();
function url(name) {
  if (!urls.has(name)) {
    const source = parts[name].map((part, i) => (i %% 2 ? url(part) : part));
    urls.set(name, URL.createObjectURL(new Blob(source, { type: "text/javascript" })));
  }
  return urls.get(name);
}
await import(url(%s));
"""


def page(entry: str, about: str, blocks: Mapping[str, str]) -> str:
    """The file. ``entry`` is the module that starts it, ``about`` the text of JSON that it finds as ``contents``, and
    ``blocks`` are texts by id as :func:`block` makes them."""
    loader = LOADER % (_in_script(modules(entry)), json.dumps(entry))
    style = "\n".join(_style(name) for name in ("theme.css", "style.css"))
    if re.search(r"</style|<!--", style, re.IGNORECASE):
        raise ValueError("a style sheet ends its own element")
    policy = (
        f"default-src 'none'; script-src '{_hash(loader)}' blob:; style-src '{_hash(style)}'; "
        "img-src data:; font-src data:; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    data = "\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in blocks.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>agentrl</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}">
<style>{style}</style>
</head>
<body><div id="app"></div><noscript>This file is drawn by JavaScript; it loads nothing from elsewhere.</noscript>
<script type="application/json" id="contents">{_escaped(about)}</script>
{data}
<script type="module">{loader}</script>
</body></html>
"""


def block(data: bytes) -> str:
    """Data as a block holds it: compressed, in base64. Equal data give equal texts."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def modules(entry: str) -> dict[str, list[str]]:
    """The modules that a module loads, by name: pieces of text, of which every second one is the name of a module."""
    pieces_of: dict[str, list[str]] = {}
    open_: list[str] = []

    def add(name: str) -> None:
        if name in open_:
            raise ValueError(f"modules load each other: {' -> '.join([*open_, name])}")
        if name in pieces_of:
            return
        open_.append(name)
        source = (STATIC / name).read_text(encoding="utf-8")
        folder = name.rpartition("/")[0]
        pieces, end = [], 0
        for match in (_VENDORED if folder == "vendor" else _IMPORT).finditer(source):
            group = match.lastindex or 1
            loaded = f"{folder}/{match[group]}" if folder else match[group]
            loaded = PLACES.get(loaded, loaded)
            pieces += [source[end : match.start(group) - 2], loaded]  # without ./
            end = match.end(group)
            add(loaded)
        pieces_of[name] = [*pieces, source[end:]]
        open_.pop()

    add(entry)
    return pieces_of


def _style(name: str) -> str:
    def inside(match: re.Match[str]) -> str:
        return f'url("data:font/woff2;base64,{base64.b64encode((STATIC / match[1]).read_bytes()).decode()}")'

    return _FONT.sub(inside, (STATIC / name).read_text(encoding="utf-8"))


def _in_script(value: object) -> str:
    return _escaped(json.dumps(value, ensure_ascii=False))


def _escaped(text: str) -> str:
    """JSON that ends no script and begins no comment in one."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
