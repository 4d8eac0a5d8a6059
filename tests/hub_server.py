"""A stand-in for the Hugging Face hub, on loopback: it serves one model and counts who fetches what."""

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from json_server import JsonHandler, serving

NAME, REVISION = "org/small", "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """The model of ``folder`` as :data:`NAME`, at one revision. ``fetched`` counts requests for the content of files.
    Each takes ``slow_s`` seconds, so that others come meanwhile; with ``refuses`` that of weights is refused."""

    daemon_threads = True

    def __init__(self, folder: Path, slow_s: float = 0.0, refuses: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.slow_s, self.refuses = slow_s, refuses
        self.fetched: Counter[str] = Counter()
        self.counting = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, cache: Path) -> dict[str, str]:
        """What a machine with an empty cache has, whose hub is this one."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


class _Answers(JsonHandler):
    server: Hub

    def get(self) -> None:
        files = self.server.files
        if re.match(rf"/api/models/{NAME}/tree/", self.path):
            self.say([{"type": "file", "path": name, **_about(content)} for name, content in files.items()])
        elif re.match(rf"/api/models/{NAME}(/revision/.*)?(\?.*)?$", self.path):
            self.say({"id": NAME, "sha": REVISION, "siblings": [{"rfilename": name} for name in files]})
        elif match := re.match(rf"/{NAME}/resolve/[^/]+/([^?]+)", self.path):
            self.file(match[1])
        else:
            self.say({"error": "no such page"}, 404)

    def file(self, name: str) -> None:
        content = self.server.files.get(name)
        if content is None:
            self.say({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        kinds = {"ETag": f'"{_about(content)["oid"]}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        if self.command == "GET":
            with self.server.counting:
                self.server.fetched[name] += 1
            time.sleep(self.server.slow_s)
            if self.server.refuses and name.endswith("safetensors"):
                self.say({"error": "no"}, 403, {"X-Error-Message": "The disk of the hub is on fire."})
                return
        self.send(content, 200, kinds)

    def do_HEAD(self) -> None:  # noqa: N802  # http.server's name
        self.get()

    def send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None, *_: Any) -> None:
        """As it is, or the same headers without content if they alone are asked for."""
        if self.command == "GET":
            super().send(body, status, headers)
            return
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()


def _about(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def hub_of(folder: Path, **settings: Any) -> Iterator[Hub]:
    """A hub with the model of ``folder``."""
    hub = Hub(folder, **settings)
    with serving(hub):
        yield hub
