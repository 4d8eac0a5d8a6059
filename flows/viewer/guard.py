"""Who may ask the viewer, who may change something, and what a browser may do with its answers.

Pages of other sites run in the same browser. They must not read a store through it: so the name that a request is sent
to must be one of this server's own (DNS rebinding), and a request that another site caused is refused. GET changes
nothing. POST does, and is let in only by ``agentrl view --write``, with a key that only the viewer's pages can read.
"""

import hmac
import ipaddress
import json
import re
import secrets
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)

HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
"""Of every answer, errors too."""

TOKEN_HEADER = "x-agentrl-token"
SESSION = "/api/session"
"""Where a token is exchanged for a cookie."""
KEY_HEADER = "x-agentrl-key"
"""Of every POST: the door's key. A page of another site cannot read it, nor send a header of this name."""


_ORIGIN = re.compile(r"https?://[A-Za-z0-9.*-]+(:(\d{1,5}|\*))?")


def is_origin(text: str) -> bool:
    """Whether a text is an origin as ``frame-ancestors`` takes it: ``http://localhost:8888``, ``https://*.example.org``,
    ``http://localhost:*``."""
    return _ORIGIN.fullmatch(text) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Door:
    """Where the viewer listens, and what opens it. ``token`` None lets in everybody who reaches the address. ``write``
    lets in POST, with the ``key``. Pages of the origins ``framed_by`` may show the viewer in a frame; None may if there
    are none. Browsers see the viewer below the path ``base``."""

    host: str
    port: int
    token: str | None = None
    write: bool = False
    framed_by: tuple[str, ...] = ()
    base: str = ""
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def cookie(self) -> str:
        """Cookies are shared by all ports of a host, so the port is in the name."""
        return f"agentrl-view-{self.port}"

    def is_ours(self, name: str) -> bool:
        """Whether a host name or address is this server's. An address cannot be rebound, so all count if the server
        listens beyond this machine."""
        if is_loopback(name):
            return True
        if is_loopback(self.host):
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            machine = socket.gethostname().lower()
            return name in (self.host.lower(), machine, machine.partition(".")[0])
        return True

    def knows(self, headers: Headers) -> bool:
        """Whether who sent these may ask about the store: there is no token, or it was exchanged for the cookie."""
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        return self.token is None or hmac.compare_digest(cookie.encode(), self.session.encode())

    def refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, error and next step of a request that is refused; None lets it in."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.is_ours(_name(hosts[0])):
            shown = ", ".join(hosts)[:100] or "none"
            return 403, f"host {shown!r} is not this server's", "open the address that `agentrl view` printed"
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            return 403, f"origin {origin[:100]!r} is another site's", "open the viewer itself"
        is_page = not scope["path"].startswith(("/api/", "/static/"))
        linked = is_page and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not linked:
            return 403, "another site caused this request", "open the viewer itself"
        if scope["method"] == "POST" and self.write:
            refused = self._refused_write(headers)
            if refused is not None:
                return refused
        elif scope["method"] not in ("GET", "HEAD"):
            following = "agentrl view --write" if scope["method"] == "POST" else "ask with GET"
            return 405, f"{scope['method']} is not allowed: the viewer only reads", following
        if self.token is None or not scope["path"].startswith("/api/"):
            return None  # pages and scripts hold no data
        if scope["path"] == SESSION:
            given = headers.get(TOKEN_HEADER, "")
            if hmac.compare_digest(given.encode(), self.token.encode()):
                return None
            return 401, "the token is wrong", "open the whole address that `agentrl view` printed, with its #token"
        if not self.knows(headers):
            return 401, "no session", "open the whole address that `agentrl view` printed, with its #token"
        return None

    def _refused_write(self, headers: Headers) -> tuple[int, str, str] | None:
        """Why a POST is refused that is sent to this server and that no other site caused. Forms can send neither this
        type of body nor the key."""
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return 403, "no page of this viewer caused this request", "open the viewer itself"
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return 415, "the body of a POST is JSON", "send content-type: application/json"
        if not hmac.compare_digest(headers.get(KEY_HEADER, "").encode(), self.key.encode()):
            return 403, f"the key in {KEY_HEADER} is wrong", "reload the page"
        return None


def _name(host: str) -> str:
    """The name or address in a Host header, without the port; empty if it is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "") if not set(host) & set("/@?#\\") else ""
    except ValueError:
        return ""


class Guard:
    """The application behind a door. It stands outside of all else, so that errors have the headers too."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self.app = app
        self.door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # nothing here speaks through web sockets
            return
        opened = scope["path"] == SESSION

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if self.door.framed_by:
                    framed = f"frame-ancestors {' '.join(self.door.framed_by)}"
                    policy = CONTENT_SECURITY_POLICY.replace("frame-ancestors 'none'", framed)
                    headers["content-security-policy"] = policy
                if "cache-control" not in headers:
                    headers["cache-control"] = "no-store"
                if opened and self.door.token and message["status"] < 400:
                    headers["set-cookie"] = (
                        f"{self.door.cookie}={self.door.session}; Path={self.door.base}/; HttpOnly; SameSite=Strict"
                    )
            await send(message)

        refused = self.door.refusal(scope)
        if refused is None:
            await self.app(scope, receive, sent)
            return
        status, error, following = refused
        body = json.dumps({"error": error, "field": None, "allowed": [], "next": following}).encode()
        start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        await sent(start)
        await sent({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
