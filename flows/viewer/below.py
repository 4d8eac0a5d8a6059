"""Viewers below paths: behind a proxy that hands on the whole path, and of several stores behind one port.

What is asked for is handed on without the path that it is below, so that neither the guard nor the pages know of it:
pages name everything relative to their own address.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from urllib.parse import unquote

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.flows.viewer.guard import HEADERS

_BASE = re.compile(r"(/[A-Za-z0-9._~@:+=,-]+)*")


def base_of(text: str) -> str:
    """A path as ``--base-path`` has it, without a slash at its end. Raises ValueError with what is allowed."""
    base = f"/{text.strip('/')}" if text.strip("/") else ""
    if not _BASE.fullmatch(base) or {".", ".."} & set(base.split("/")):
        raise ValueError("a base path has letters, digits and ._~@:+=,- between slashes, as in /user/ann/proxy/8322")
    return base


def named(stores: Sequence[str]) -> dict[str, str]:
    """Stores by the names of their paths: the last parts of their places, with a number where two are equal."""
    by_name: dict[str, str] = {}
    for store in stores:
        last = re.sub(r"[^A-Za-z0-9._-]", "-", PurePosixPath(store.rstrip("/")).name).strip(".") or "store"
        name, number = last, 1
        while name in by_name:
            number += 1
            name = f"{last}-{number}"
        by_name[name] = store
    return by_name


class Below:
    """``apps`` by their paths, such as ``/proxy/8322/runs``. Every other address leads to the first of them."""

    def __init__(self, apps: Mapping[str, ASGIApp]) -> None:
        self.apps = dict(apps)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        for prefix in sorted(self.apps, key=len, reverse=True):
            if (rest := _rest(scope, prefix)) is not None:
                path = {"path": unquote(rest.decode("ascii", "replace")), "raw_path": rest}
                await self.apps[prefix]({**scope, **path}, receive, send)
                return
        first = f"{next(iter(self.apps))}/"
        await RedirectResponse(first, 307, headers={**HEADERS, "cache-control": "no-store"})(scope, receive, send)


def _rest(scope: Scope, prefix: str) -> bytes | None:
    """The path of a request below a prefix, as the browser wrote it; None if it is not below. A slash that is written
    as %2F is none, so that a name within the prefix cannot be made of two."""
    raw: bytes = scope["raw_path"].partition(b"?")[0]
    depth = prefix.count("/")
    parts = raw.split(b"/")
    if len(parts) <= depth + 1 or [unquote(part.decode("ascii", "replace")) for part in parts[: depth + 1]] != (
        prefix.split("/")
    ):
        return None
    return b"/" + b"/".join(parts[depth + 1 :])
