"""Every question of a browser: its path, what it holds, and the function of a page that answers it."""

import gzip
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.responses import Response

from agentrl.flows.viewer.wire.labels import AnnotationQuery, LabelledRow, LabelQuery
from agentrl.flows.viewer.wire.queries import (
    ArmsQuery,
    ArtifactPage,
    ArtifactQuery,
    AtVersion,
    Filtered,
    LinesQuery,
    MessageQuery,
    NamedPipeline,
    OfPipeline,
    Page,
    PairQuery,
    Query,
    RowQuery,
    RunQuery,
    SaveQuery,
    SearchQuery,
    SideQuery,
    SomeRows,
    StagesQuery,
    StepQuery,
    TaskQuery,
    TwoRows,
    TwoRuns,
    WhatIf,
)

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader

ARROW = "application/vnd.apache.arrow.stream"
SHORT = 1000
"""Bytes below which nothing is compressed."""

QUESTIONS: list[tuple[str, type[Query], str]] = [
    ("/api/overview", OfPipeline, "pages.overview:overview"),
    ("/api/tabs", Query, "pages.overview:tabs"),
    ("/api/plan", WhatIf, "pages.overview:plan"),
    ("/api/settings", NamedPipeline, "pages.overview:settings"),
    ("/api/runs/compare", TwoRuns, "pages.runs:runs_compared"),
    ("/api/rows", Page, "pages.rows:rows"),
    ("/api/answers", SomeRows, "pages.rows:answers"),
    ("/api/facets", Filtered, "pages.rows:facets"),
    ("/api/search", SearchQuery, "pages.rows:search"),
    ("/api/export", Filtered, "offline.export:answer"),
    ("/api/calls", Filtered, "pages.calls:calls"),
    ("/api/rule", Filtered, "pages.saving:rule"),
    ("/api/rows/{id:path}/messages/{number:int}", MessageQuery, "pages.trajectory:message"),  # ids may hold slashes
    ("/api/rows/{id:path}/fate", RowQuery, "pages.fate:fate"),
    ("/api/rows/{id:path}", RowQuery, "pages.trajectory:row"),
    ("/api/tokens/{id:path}/text", RowQuery, "pages.tokens:text"),
    ("/api/tokens/{id:path}", RowQuery, "pages.tokens:tokens"),
    ("/api/evaluations", Query, "pages.compare:evaluations"),
    ("/api/compare", ArmsQuery, "pages.compare:compared"),
    ("/api/better", Query, "pages.better:better"),
    ("/api/task", TaskQuery, "pages.compare:task"),
    ("/api/task/tree", TaskQuery, "pages.tree:task_tree"),
    ("/api/align", TwoRows, "pages.compare:aligned"),
    ("/api/curation", AtVersion, "pages.curation:funnels"),
    ("/api/pairs", ArtifactPage, "pages.pairs:pairs"),
    ("/api/pair", PairQuery, "pages.pairs:pair"),
    ("/api/pair/tokens", SideQuery, "pages.pairs:side_tokens"),
    ("/api/pair/text", SideQuery, "pages.pairs:side_text"),
    ("/api/training", StagesQuery, "pages.training:stages"),
    ("/api/training/metrics", ArtifactQuery, "pages.training:metrics"),
    ("/api/training/rows", StepQuery, "pages.training:rows_of"),
    ("/api/live/lines", LinesQuery, "pages.training:lines"),
    ("/api/doctor", RunQuery, "pages.doctor:doctor"),
    ("/api/run", RunQuery, "pages.run:run"),
    ("/api/labels", LabelQuery, "pages.labels:queue"),
    ("/api/labels/row", LabelledRow, "pages.labels:row_labels"),
]

ACTIONS: list[tuple[str, type[Query], str]] = [
    ("/api/selection", SaveQuery, "pages.saving:save"),
    ("/api/annotation", AnnotationQuery, "pages.labels:give"),
]
"""What POST does, with a JSON object instead of a query; only with ``agentrl view --write``."""


def answered(reader: "StoreReader", page: str, question: Query, compressed: bool) -> Response:
    """What the function ``page`` answers: a model is JSON, a table Arrow, with headers if there are any, and bytes are
    text. JSON may be ``compressed``. Modules of pages are imported when they are asked first."""
    module, _, name = page.partition(":")
    answer: Any = getattr(import_module(f"agentrl.flows.viewer.{module}"), name)(reader, question)
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
