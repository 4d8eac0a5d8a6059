"""An S3 server for tests whose conditional puts are atomic, and a second door to it at which requests go wrong.

    python s3_server.py PORT FAULTY_PORT SEED

moto alone checks ``If-None-Match`` and ``If-Match`` in one step and writes in another: of six clients that create one
name at once, several are told that they did. Here requests are served one at a time. Both doors lead to the same
buckets. At the faulty one a request is delayed, or refused with 500 or 503, or carried out without an answer: the
connection is cut, or a 500 is all that comes back. SIGTERM ends the server, which then prints how often each happened.
"""

import io
import json
import logging
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

DELAY_S = 0.3
FAULTS = {"delay": 0.01, "refuse": 0.01, "swallow": 0.005, "cut": 0.005}
"""Shares of the requests at the faulty door."""


class OneAtATime:
    """A WSGI application that serves one request after the other."""

    def __init__(self) -> None:
        self._app = create_backend_app("s3")  # to find a service by the request takes longer than to serve it
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # the body first: a client that is stopped in mid-upload must not stop the others
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            return list(self._app(environ | {"wsgi.input": io.BytesIO(body)}, start_response))


class Faulty:
    """The same application, seen over a bad line."""

    def __init__(self, app: OneAtATime, seed: int) -> None:
        self._app = app
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        [fault] = self._random.choices([*FAULTS, "none"], [*FAULTS.values(), 1 - sum(FAULTS.values())])
        self.counts[fault] += 1
        if fault == "delay":
            time.sleep(DELAY_S)
        if fault in ("swallow", "cut"):
            self._app(environ, lambda *_: None)
        if fault == "cut":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        if fault in ("refuse", "swallow", "cut"):
            status = self._random.choice(["500 Internal Server Error", "503 Slow Down"])
            start_response(status, [("Content-Length", "0")])
            return [b""]
        return self._app(environ, start_response)


def main() -> None:
    port, faulty_port, seed = map(int, sys.argv[1:4])
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = OneAtATime()
    faulty = Faulty(app, seed)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # for the threads too
    for number, door in ((faulty_port, faulty), (port, app)):
        server = make_server("127.0.0.1", number, door, threaded=True, request_handler=MotoRequestHandler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.sigwait([signal.SIGTERM])
    print(json.dumps(dict(faulty.counts - Counter(none=faulty.counts["none"]))), flush=True)


if __name__ == "__main__":
    main()
