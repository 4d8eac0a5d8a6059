"""What a browser may ask: the query of each request, and the body of those that change something."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Query(BaseModel):
    """The query of a request. What is not a field is refused by name."""

    model_config = ConfigDict(extra="forbid")


class AtVersion(Query):
    at: str | None = None


class RowQuery(AtVersion):
    """``id`` stands in the path."""

    id: str


class MessageQuery(RowQuery):
    number: int
    start: int = Field(0, ge=0, lt=2**40)
    most: int | None = Field(None, ge=1)


class OfPipeline(Query):
    pipeline: str | None = None


class NamedPipeline(Query):
    pipeline: str = Field(min_length=1)


class WhatIf(NamedPipeline):
    set: list[str] = Field([], max_length=16)


class Filtered(AtVersion):
    """``among`` names an artifact, and ``rule`` one of its rules: see :mod:`agentrl.flows.viewer.query.among`."""

    filter: str = ""
    among: str | None = None
    rule: str | None = None


class Page(Filtered):
    sort: str = "created_at"
    desc: bool = True
    offset: int = Field(0, ge=0, lt=2**31)
    limit: int = Field(100, ge=1, le=1000)
    columns: str = Field("", max_length=1000)


class SomeRows(AtVersion):
    id: list[str] = Field(min_length=1, max_length=200)


class SaveQuery(Filtered):
    """``ids`` are those of the rows that are saved; without any, all that the rest of the question is about."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=80)
    ids: list[str] = Field([], max_length=5000)


class SearchQuery(Query):
    q: str = Field(min_length=1, max_length=4000)
    k: int = Field(20, ge=1, le=200)


class ArmsQuery(Query):
    than: str = Field(min_length=1, max_length=300)
    arm: str = Field(min_length=1, max_length=300)
    greedy: bool = False


class TaskQuery(AtVersion):
    env: str
    task_id: str


class TwoRows(AtVersion):
    a: str
    b: str


class ArtifactPage(Query):
    artifact: str | None = None
    offset: int = Field(0, ge=0, lt=2**31)
    limit: int = Field(100, ge=1, le=1000)


class PairQuery(Query):
    artifact: str
    pair_id: str


class SideQuery(PairQuery):
    side: Literal["chosen", "rejected"]


class ArtifactQuery(Query):
    """``STORE:STAGE/FINGERPRINT`` is of another store that is shown beside this one."""

    artifact: str


class StagesQuery(Query):
    """``beside``: artifacts of the stores beside this one too."""

    beside: bool = False


class StepQuery(AtVersion):
    artifact: str
    step: int = Field(ge=0, lt=2**31)


class LinesQuery(Query):
    run_id: str
    stage: str
    cursor: int = Field(0, ge=0, lt=2**53)


class TwoRuns(AtVersion):
    """Runs by their ids, or ``STORE:ID`` of another store that is shown beside this one."""

    a: str | None = None
    b: str | None = None


class RunQuery(Query):
    run: str = Field(min_length=1, max_length=300)
