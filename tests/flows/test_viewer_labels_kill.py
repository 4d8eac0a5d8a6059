"""kill -9 of the viewer while two people label: no label that was acknowledged is lost, and none is there twice."""

import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from viewer_store import make_store

from agentrl.flows.api.store import Store

pytestmark = pytest.mark.slow
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
KILLS, AUTHORS = 6, ("ann", "bob")


class Page:
    """What the page of labels sends: the session of one address, with its key."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        self._to = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        token = {"X-Agentrl-Token": parts.fragment.removeprefix("token=")}
        self._headers = {"Cookie": self._asked("GET", "/api/session", token)[0]}
        self._headers["X-Agentrl-Key"] = json.loads(self._asked("GET", "/api/writing", self._headers)[1])["key"]

    def _asked(self, method: str, path: str, headers: dict[str, str], body: str | None = None) -> tuple[str, bytes]:
        self._to.request(method, path, body, headers)
        answer = self._to.getresponse()
        text = answer.read()
        assert answer.status < 300, text
        return (answer.getheader("Set-Cookie") or "").partition(";")[0], text

    def give(self, label: str, row: str, author: str) -> None:
        fields = {"annotation_id": label, "trajectory_id": row, "name": "stars", "value": "4", "author": author}
        headers = {**self._headers, "Content-Type": "application/json"}
        self._asked("POST", "/api/annotation", headers, json.dumps(fields))


@contextmanager
def viewer(store: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, "-m", "agentrl.flows.cli", "view", "--store", str(store), "--port", "0", "--json"]
    with subprocess.Popen([*command, "--write"], env=ENV, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            text = ""
            while "\n}" not in text:
                text += process.stdout.readline()
            yield json.loads(text)["url"], process
        finally:
            process.kill()


def labelling(url: str, author: str, rows: list[str], again: list[str], acknowledged: list[str]) -> None:
    """Gives labels until the server is gone: first ``again`` what was sent last, of which it was not known."""
    page, first = Page(url), len(acknowledged)
    names = [*again, *(f"{author}-{number:08d}" for number in range(first, first + 100_000))]
    for label in dict.fromkeys(names):
        again[:] = [label]
        try:
            page.give(label, rows[int(label[-8:]) % len(rows)], author)
        except (OSError, http.client.HTTPException):
            return
        if label not in acknowledged:
            acknowledged.append(label)


def test_no_acknowledged_label_is_lost_to_kills_of_the_viewer(tmp_path: Path) -> None:
    store, chance = tmp_path / "store", random.Random(0)
    make_store(store)
    rows = Store(store).rows.select("trajectory_id").collect()["trajectory_id"].to_list()
    acknowledged: dict[str, list[str]] = {author: [] for author in AUTHORS}
    last: dict[str, list[str]] = {author: [] for author in AUTHORS}
    for _ in range(KILLS):
        with viewer(store) as (url, process):
            threads = [
                threading.Thread(target=labelling, args=(url, author, rows, last[author], acknowledged[author]))
                for author in AUTHORS
            ]
            counts = {author: len(acknowledged[author]) for author in AUTHORS}
            for thread in threads:
                thread.start()
            while any(len(acknowledged[author]) < counts[author] + 2 for author in AUTHORS):
                assert all(thread.is_alive() for thread in threads)
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.3))
            process.kill()
            for thread in threads:
                thread.join(60)
        log = Store(store).annotation_log()["annotation_id"].to_list()
        assert len(log) == len(set(log))
        assert {label for own in acknowledged.values() for label in own} <= set(log)
        assert len(log) <= sum(map(len, acknowledged.values())) + len(AUTHORS), "what was sent last, and no more"
    assert sum(map(len, acknowledged.values())) >= 2 * KILLS * len(AUTHORS)
