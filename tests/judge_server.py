"""A server of the OpenAI protocol on loopback that answers as a function says: what judges are tested against."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from json_server import JsonHandler, serving


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


class _Handler(JsonHandler):
    server: JudgeServer

    def post(self, asked: dict[str, Any]) -> None:
        with self.server.lock:
            self.server.requests.append(asked)
            text = self.server.reply(asked)
        message = {"role": "assistant", "content": text}
        self.say({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@contextmanager
def judging(reply: Callable[[dict[str, Any]], str]) -> Iterator[JudgeServer]:
    server = JudgeServer(reply)
    with serving(server):
        yield server
