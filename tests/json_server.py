"""Servers on loopback that speak JSON over HTTP."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Requests come to ``get``, and to ``post`` with their JSON. Connections stay open, and nothing is logged."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}"))

    def get(self) -> None:
        self.say({"error": "no such page"}, 404)

    def post(self, asked: Any) -> None:
        self.say({"error": "no such page"}, 404)

    def say(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(value).encode(), status, headers)

    def send(
        self, body: bytes, status: int = 200, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        """``length`` is what the header says, if it lies; the connection then ends."""
        self.send_response(status)
        length_said = len(body) if length is None else length
        kinds = {"Content-Type": "application/json", "Content-Length": str(length_said)}
        for name, value in (kinds | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.close_connection or length is not None

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serve in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
