"""Every question of a browser: its path, and the function of a page that answers it. What it holds is said by the
function: ``question`` is a model of it."""

import gzip
from concurrent.futures import Future
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.responses import Response

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader

ARROW = "application/vnd.apache.arrow.stream"
SHORT = 1000
"""Bytes below which nothing is compressed."""

QUESTIONS = {
    "/api/overview": "pages.overview:overview",
    "/api/tabs": "pages.overview:tabs",
    "/api/plan": "pages.overview:plan",
    "/api/settings": "pages.overview:settings",
    "/api/runs/compare": "pages.runs:runs_compared",
    "/api/rows": "pages.rows:rows",
    "/api/answers": "pages.rows:answers",
    "/api/facets": "pages.rows:facets",
    "/api/export": "offline.export:answer",
    "/api/calls": "pages.calls:calls",
    "/api/rows/{id:path}/messages/{number:int}": "pages.trajectory:message",  # ids may hold slashes
    "/api/rows/{id:path}/fate": "pages.fate:fate",
    "/api/rows/{id:path}": "pages.trajectory:row",
    "/api/tokens/{id:path}": "pages.tokens:tokens",
    "/api/evaluations": "pages.compare:evaluations",
    "/api/compare": "pages.compare:compared",
    "/api/better": "pages.compare:better",
    "/api/task": "pages.task:task",
    "/api/task/tree": "pages.task:task_tree",
    "/api/curation": "pages.curation:funnels",
    "/api/pairs": "pages.pairs:pairs",
    "/api/pair": "pages.pairs:pair",
    "/api/pair/tokens": "pages.pairs:side_tokens",
    "/api/training": "pages.training:stages",
    "/api/training/metrics": "pages.training:metrics",
    "/api/training/rows": "pages.training:rows_of",
    "/api/live/lines": "pages.training:lines",
    "/api/doctor": "pages.doctor:doctor",
    "/api/run": "pages.run:run",
    "/api/labels": "pages.labels:queue",
    "/api/labels/row": "pages.labels:row_labels",
}

ACTIONS = {
    "/api/selection": "pages.saving:save",
    "/api/annotation": "pages.labels:give",
}
"""What POST does, with a JSON object instead of a query; only with ``agentrl view --write``."""


def answered(opened: "Future[StoreReader]", page: str, given: Any, compressed: bool) -> Response:
    """What the function ``page`` answers: a model is JSON, a table Arrow, with headers if there are any, and bytes are
    text. JSON may be ``compressed``. Modules of pages are imported when they are asked first."""
    module, _, name = page.partition(":")
    function = getattr(import_module(f"agentrl.flows.viewer.{module}"), name)
    question = function.__annotations__["question"].model_validate(given)
    answer: Any = function(opened.result(), question)
    if isinstance(answer, BaseModel):
        body = answer.model_dump_json().encode()
        if not compressed or len(body) < SHORT:
            return Response(body, media_type="application/json")
        headers = {"content-encoding": "gzip", "vary": "accept-encoding"}
        return Response(gzip.compress(body, 1), headers=headers, media_type="application/json")
    if isinstance(answer, Response):
        return answer
    if isinstance(answer, bytes):
        return Response(answer, media_type="text/plain; charset=utf-8")
    from agentrl.flows.viewer.query.tables import stream

    table, headers = answer if isinstance(answer, tuple) else (answer, {})
    return Response(stream(table), headers=headers, media_type=ARROW)
