"""The files of the front-end, in memory. A browser that has them never asks for them again: their addresses hold a
digest of them all, and modules name each other relative to their own address."""

import gzip
import hashlib
import mimetypes
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import Response

TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
TYPES |= {".woff2": "font/woff2", ".html": "text/html", ".json": "application/json", ".png": "image/png"}
FOREVER = "public, max-age=31536000, immutable"
INDEX, MAIN = "index.html", "main.js"
PAGES = {"": "overview.js", "row": "trajectory.js"}
"""Modules of pages by the first part of the address, unless the module has its name."""
ASKED_FIRST = {
    "": ["/api/overview", "/api/evaluations"],
    "row": ["/api/rows/{}", "/api/tokens/{}"],
}
"""What a page asks as soon as its scripts have run, by the first part of its address; ``{}`` is the second part."""
ASKED_OTHERWISE = {"pipeline", "at"}
"""Parameters of an address with which a page asks something else."""

DEEPEST = 8
"""Slashes of an address that are counted. No page of the viewer has more than two."""

_IMPORTED = re.compile(r"""\b(?:import|from)\s*["']\./([^"']+)["']""")
_IMPORTED_LATER = re.compile(r"""=> import\(["']\./([^"']+)["']\)""")


class StaticFile:
    """A file, also compressed."""

    def __init__(self, name: str, body: bytes) -> None:
        kind = TYPES.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        self.type = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        self.body = body
        small = gzip.compress(self.body, 9, mtime=0)
        self.compressed = small if len(small) < len(self.body) * 0.9 else None
        self.tag = f'"{hashlib.blake2b(self.body, digest_size=12).hexdigest()}"'

    def answer(self, request: Request, kept: str = "no-cache") -> Response:
        headers = {"etag": self.tag, "cache-control": kept, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        body = self.body
        if self.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["content-encoding"] = self.compressed, "gzip"
        return Response(body, headers=headers, media_type=self.type)


class FrontEnd:
    """The files below a folder. Names are looked up and never joined to the folder."""

    def __init__(self, folder: Path) -> None:
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
        bodies = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        self.files = {name: StaticFile(name, body) for name, body in bodies.items()}
        everything = "".join(f"{name} {file.tag}\n" for name, file in self.files.items())
        self.digest = hashlib.blake2b(everything.encode(), digest_size=8).hexdigest()
        self._texts = dict(self._made(bodies)) if INDEX in bodies else {}
        self._pages: dict[tuple[str, int], StaticFile] = {}

    def _made(self, bodies: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
        """``index.html`` by the module of its page. It names all modules that this needs, so that the browser asks for
        them at once."""
        text = bodies[INDEX].decode().replace("/static/", f"/static/{self.digest}/")
        imported = {name: _IMPORTED.findall(body.decode()) for name, body in bodies.items() if name.endswith(".js")}
        main = bodies.get(MAIN, b"").decode()
        for page in (MAIN, *_IMPORTED_LATER.findall(main)):
            needed = _reached(imported, MAIN, page)
            links = "".join(f'<link rel="modulepreload" href="/static/{self.digest}/{name}">\n' for name in needed)
            yield page, text.replace("</head>", f"{links}</head>")

    def page(self, path: str) -> StaticFile | None:
        """The document for an address as it stands in a request; None if there is no front-end. It names its files
        relative to its own address, since a proxy may show the viewer below a path of its own."""
        room = path.split("/")[1] if "/" in path else ""
        page = PAGES.get(room, f"{room}.js")
        page = page if page in self._texts else MAIN
        depth = min(path.count("/") - 1, DEEPEST)
        if page in self._texts and (page, depth) not in self._pages:
            text = self._texts[page].replace('="/static/', f'="{up(depth)}static/')
            self._pages[page, depth] = StaticFile(INDEX, text.encode())
        return self._pages.get((page, depth))

    def answer(self, request: Request, name: str) -> Response | None:
        """A file by its name, or by the digest of all and its name; None if there is none."""
        digest, _, rest = name.partition("/")
        if digest == self.digest and rest in self.files:
            return self.files[rest].answer(request, FOREVER)
        return self.files[name].answer(request) if name in self.files else None


def raw_path(request: Request) -> str:
    """The path as the browser wrote it: a slash within an id is %2F there."""
    return str(request.scope["raw_path"].decode("ascii", "replace"))


def up(depth: int) -> str:
    """The way to the viewer's first page from one with so many slashes in its address besides the first."""
    return "../" * depth or "./"


def asked_first(request: Request) -> str:
    """The header ``Link`` of a page, so that the browser asks the page's questions while it loads the scripts; empty if
    there are none. A link that differs in one letter from what the scripts ask would be asked in vain."""
    path = raw_path(request)
    _, room, *rest = path.split("/")
    if ASKED_OTHERWISE & set(request.query_params):
        return ""
    name = quote(unquote(rest[0]) if rest else "", safe="!'()*~-._")  # as encodeURIComponent does
    links = [address.format(name) for address in ASKED_FIRST.get(room, ()) if name or "{" not in address]
    root = up(path.count("/") - 1)
    return ", ".join(f"<{root}{link.removeprefix('/')}>; rel=preload; as=fetch; crossorigin" for link in links)


def _reached(imported: Mapping[str, list[str]], *names: str) -> list[str]:
    """These modules and all that they import, each once."""
    reached: dict[str, None] = {}
    todo = [*names]
    while todo:
        name = todo.pop(0)
        if name in reached or name not in imported:
            continue
        reached[name] = None
        beside = name.rpartition("/")[0]
        todo += [f"{beside}/{module}" if beside else module for module in imported[name]]
    return list(reached)
