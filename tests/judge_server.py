"""A server of the OpenAI protocol on loopback that answers as a function says: what judges are tested against."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """``reply`` gives the text of the answer to a request's last message; ``requests`` keeps what was asked."""

    daemon_threads = True

    def __init__(self, reply: Callable[[dict[str, Any]], str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def engine(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.server_port}/v1"
        return {"type": "openai", "model": "judge", "base_url": url, "api_key": "${JUDGE_KEY}", "retries": 1}

    def prompts(self) -> list[str]:
        return [request["messages"][-1]["content"] for request in self.requests]


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(request)
            text = self.server.reply(request)
        message = {"role": "assistant", "content": text}
        body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def judging(reply: Callable[[dict[str, Any]], str]) -> Iterator[JudgeServer]:
    server = JudgeServer(reply)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
