"""How a reader of the store answers each question of a browser."""

import gzip
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
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
    RunQuery,
    SaveQuery,
    SearchQuery,
    SideQuery,
    SomeRows,
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


Question = TypeVar("Question", bound=Query)
Answering = Callable[["StoreReader", Request, Question], Response]


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


def _overview(reader: "StoreReader", request: Request, question: OfPipeline) -> Response:
    return _json(reader.overview(question.pipeline))


def _tabs(reader: "StoreReader", request: Request, question: Query) -> Response:
    return _json(reader.tabs())


def _plan(reader: "StoreReader", request: Request, question: WhatIf) -> Response:
    return _json(reader.plan(question.pipeline, question.set))


def _settings(reader: "StoreReader", request: Request, question: NamedPipeline) -> Response:
    return _json(reader.settings(question.pipeline))


def _runs(reader: "StoreReader", request: Request, question: TwoRuns) -> Response:
    return _json(reader.runs(question.a, question.b, question.at))


def _rows(reader: "StoreReader", request: Request, question: Page) -> Response:
    body, headers = reader.rows(question)
    return Response(body, headers=headers, media_type=ARROW)


def _facets(reader: "StoreReader", request: Request, question: Filtered) -> Response:
    return _json(reader.facets(question))


def _answers(reader: "StoreReader", request: Request, question: SomeRows) -> Response:
    return _json(reader.answers(question.id, question.at))


def _exported(reader: "StoreReader", request: Request, question: Filtered) -> Response:
    from agentrl.flows.viewer.offline.export import answer

    body, name = answer(reader, question)
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(body, headers=headers, media_type="application/octet-stream")


def _calls(reader: "StoreReader", request: Request, question: Filtered) -> Response:
    from agentrl.flows.viewer.pages.calls import calls

    return _json(calls(reader, question))


def _rule(reader: "StoreReader", request: Request, question: Filtered) -> Response:
    from agentrl.flows.viewer.pages.saving import rule

    return _json(rule(reader, question))


def _saved(reader: "StoreReader", request: Request, question: SaveQuery) -> Response:
    from agentrl.flows.viewer.pages.saving import save

    return _json(save(reader, question))


def _search(reader: "StoreReader", request: Request, question: SearchQuery) -> Response:
    return _json(reader.search(question.q, question.k))


def _row(reader: "StoreReader", request: Request, question: AtVersion) -> Response:
    return _json(reader.row(request.path_params["id"], question.at))


def _message(reader: "StoreReader", request: Request, question: MessageQuery) -> Response:
    name, number = request.path_params["id"], request.path_params["number"]
    return _json(reader.message(name, number, question.at, question.start, question.most))


def _fate(reader: "StoreReader", request: Request, question: AtVersion) -> Response:
    from agentrl.flows.viewer.pages.fate import fate
    from agentrl.flows.viewer.pages.trajectory import scalars_of

    row, snapshot = reader.row_of(request.path_params["id"], question.at)
    return _json(fate(reader.artifacts, snapshot, scalars_of(row)))


def _tokens(reader: "StoreReader", request: Request, question: AtVersion) -> Response:
    return Response(reader.tokens(request.path_params["id"], question.at), media_type=ARROW)


def _text(reader: "StoreReader", request: Request, question: AtVersion) -> Response:
    return Response(reader.text(request.path_params["id"], question.at), media_type="text/plain; charset=utf-8")


def _evaluations(reader: "StoreReader", request: Request, question: Query) -> Response:
    return _json(reader.evaluations())


def _compared(reader: "StoreReader", request: Request, question: ArmsQuery) -> Response:
    return _json(reader.compared(question.than, question.arm, question.greedy))


def _better(reader: "StoreReader", request: Request, question: Query) -> Response:
    return _json(reader.better())


def _task(reader: "StoreReader", request: Request, question: TaskQuery) -> Response:
    return _json(reader.task(question.env, question.task_id, question.at))


def _task_tree(reader: "StoreReader", request: Request, question: TaskQuery) -> Response:
    return _json(reader.task_tree(question.env, question.task_id, question.at))


def _curation(reader: "StoreReader", request: Request, question: AtVersion) -> Response:
    return _json(reader.curation(question.at))


def _aligned(reader: "StoreReader", request: Request, question: TwoRows) -> Response:
    return _json(reader.aligned(question.a, question.b, question.at))


def _pairs(reader: "StoreReader", request: Request, question: ArtifactPage) -> Response:
    return _json(reader.pairs(question.artifact, question.offset, question.limit))


def _pair(reader: "StoreReader", request: Request, question: PairQuery) -> Response:
    return _json(reader.pair(question.artifact, question.pair_id))


def _pair_tokens(reader: "StoreReader", request: Request, question: SideQuery) -> Response:
    return Response(reader.pair_tokens(question.artifact, question.pair_id, question.side), media_type=ARROW)


def _pair_text(reader: "StoreReader", request: Request, question: SideQuery) -> Response:
    body = reader.pair_text(question.artifact, question.pair_id, question.side)
    return Response(body, media_type="text/plain; charset=utf-8")


def _training(reader: "StoreReader", request: Request, question: Query) -> Response:
    return _json(reader.training())


def _metrics(reader: "StoreReader", request: Request, question: ArtifactQuery) -> Response:
    return Response(reader.metrics(question.artifact), media_type=ARROW)


def _rows_of_step(reader: "StoreReader", request: Request, question: StepQuery) -> Response:
    body, headers = reader.rows_of_step(question.artifact, question.step, question.at)
    return Response(body, headers=headers, media_type=ARROW)


def _lines(reader: "StoreReader", request: Request, question: LinesQuery) -> Response:
    """Compressed: the same names come with each step."""
    answer = _json(reader.lines(question.run_id, question.stage, question.cursor))
    if len(answer.body) < SHORT or "gzip" not in request.headers.get("accept-encoding", ""):
        return answer
    headers = {"content-encoding": "gzip", "vary": "accept-encoding"}
    return Response(gzip.compress(answer.body, 4), headers=headers, media_type=answer.media_type)


def _run(reader: "StoreReader", request: Request, question: RunQuery) -> Response:
    return _json(reader.run(question.run))


def _doctor(reader: "StoreReader", request: Request, question: RunQuery) -> Response:
    return _json(reader.doctor.of(question.run))


def _labels(reader: "StoreReader", request: Request, question: LabelQuery) -> Response:
    from agentrl.flows.viewer.pages.labels import queue

    return _json(queue(reader, question, reader.labels))


def _labels_of_row(reader: "StoreReader", request: Request, question: LabelledRow) -> Response:
    from agentrl.flows.viewer.pages.labels import row_labels

    return _json(row_labels(reader, question.row))


def _annotated(reader: "StoreReader", request: Request, question: AnnotationQuery) -> Response:
    from agentrl.flows.viewer.pages.labels import give

    return _json(give(reader, question))


QUESTIONS: list[tuple[str, type[Any], Answering[Any]]] = [
    ("/api/overview", OfPipeline, _overview),
    ("/api/tabs", Query, _tabs),
    ("/api/plan", WhatIf, _plan),
    ("/api/settings", NamedPipeline, _settings),
    ("/api/runs/compare", TwoRuns, _runs),
    ("/api/rows", Page, _rows),
    ("/api/answers", SomeRows, _answers),
    ("/api/facets", Filtered, _facets),
    ("/api/export", Filtered, _exported),
    ("/api/calls", Filtered, _calls),
    ("/api/rule", Filtered, _rule),
    ("/api/search", SearchQuery, _search),
    ("/api/rows/{id:path}/messages/{number:int}", MessageQuery, _message),  # ids of imports may hold slashes
    ("/api/rows/{id:path}/fate", AtVersion, _fate),
    ("/api/rows/{id:path}", AtVersion, _row),
    ("/api/tokens/{id:path}/text", AtVersion, _text),
    ("/api/tokens/{id:path}", AtVersion, _tokens),
    ("/api/evaluations", Query, _evaluations),
    ("/api/compare", ArmsQuery, _compared),
    ("/api/better", Query, _better),
    ("/api/task", TaskQuery, _task),
    ("/api/task/tree", TaskQuery, _task_tree),
    ("/api/align", TwoRows, _aligned),
    ("/api/curation", AtVersion, _curation),
    ("/api/pairs", ArtifactPage, _pairs),
    ("/api/pair", PairQuery, _pair),
    ("/api/pair/tokens", SideQuery, _pair_tokens),
    ("/api/pair/text", SideQuery, _pair_text),
    ("/api/training", Query, _training),
    ("/api/training/metrics", ArtifactQuery, _metrics),
    ("/api/training/rows", StepQuery, _rows_of_step),
    ("/api/live/lines", LinesQuery, _lines),
    ("/api/doctor", RunQuery, _doctor),
    ("/api/run", RunQuery, _run),
    ("/api/labels", LabelQuery, _labels),
    ("/api/labels/row", LabelledRow, _labels_of_row),
]

ACTIONS: list[tuple[str, type[Any], Answering[Any]]] = [
    ("/api/selection", SaveQuery, _saved),
    ("/api/annotation", AnnotationQuery, _annotated),
]
"""What POST does, with a JSON object instead of a query; only with ``agentrl view --write``."""
