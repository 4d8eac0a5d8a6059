"""What the viewer's server answers, as the front-end reads it: models of the JSON, and schemas of the Arrow streams.

``at`` in a query is a Delta version of the buffer, or a time; without it the newest is read. Every answer about rows
names the version that it was read from, so that a link with ``at`` shows the same again.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Refusal(Answer):
    """Any answer with a status of 400 or above. ``next`` is what the reader can do, for instance a command."""

    error: str
    field: str | None = None
    allowed: list[str] = []
    next: str | None = None


# GET /api/session with the header x-agentrl-token: TOKEN -> 204 and a cookie, or 401. An address that others reach ends
# in #token=TOKEN: the page asks this once and takes the token out of its address. Any 401 means that it has to.


# GET /api/writing


class Writing(Answer):
    """The key that POST needs in the header X-Agentrl-Key; None if the viewer was started without ``--write``."""

    key: str | None


# GET /api/overview?pipeline=NAME


class StageInput(Answer):
    """An edge of the graph: the stage that is read. ``reason`` says why this edge makes the stage run; None if it does
    not."""

    stage: str
    reason: str | None


class StageBox(Answer):
    """A stage of the pipeline. ``status`` is that of the plan (cached, run, blocked, skipped), or ``running``.
    ``x`` is the column and ``y`` the row in the drawing, from 0. ``artifact`` is STAGE/FINGERPRINT if it is there."""

    id: str
    stage: str
    uses: str
    artifact: str | None
    status: Literal["cached", "run", "blocked", "skipped", "running"]
    reason: str
    fingerprint: str
    seconds: float | None
    inputs: list[StageInput]
    x: int
    y: int


class RunLine(Answer):
    """A run, newest first. ``when`` is ISO 8601, UTC. ``log_tail`` holds the last lines of the failed stage's log."""

    run_id: str
    pipeline: str
    when: str
    seconds: float | None
    state: str
    failed_stage: str | None
    log_tail: str


class Measurement(Answer):
    """Success of one policy on one split in one stage, greedy or sampled, with Wilson's 95 % interval. ``n`` rows have
    an outcome."""

    policy: str
    stage: str
    split: str
    greedy: bool
    success: float
    low: float
    high: float
    n: int


class Overview(Answer):
    """``version`` is None, and ``rows`` 0, if nothing was ever appended. ``pipeline`` is the one that ``stages``
    shows, that of the newest run unless asked for another. If it is not planned, ``stages`` is what its newest run
    recorded and ``problem`` says why. ``runs`` are the newest of ``n_runs``. ``planning`` is true while the plan is
    being made: ask again in a second."""

    store: str
    version: int | None
    rows: int
    pipeline: str | None
    problem: str | None
    planning: bool
    stages: list[StageBox]
    runs: list[RunLine]
    n_runs: int
    results: list[Measurement]
    pipelines: list[str]


# GET /api/plan?pipeline=NAME&set=dpo.beta=0.3&set=...


class PlanAnswer(Answer):
    """What would run if these settings had these values; nothing is run. A setting is as `agentrl plan --set` takes it,
    or STAGE.KEY for ``stages.STAGE.with.KEY``. ``problem`` says why there is no plan. ``planning`` is true while it is
    being made: ask again in half a second."""

    pipeline: str
    settings: list[str]
    problem: str | None
    planning: bool
    stages: list[StageBox]


# GET /api/rows?filter=&sort=&desc=&offset=&limit=&at=&columns=&among=&rule= -> Arrow, headers X-Total, X-Version,
# X-Columns, X-Absent
# One row of the table each: trajectory_id and the scalar columns that `columns` names, with commas between; without it
# all, which X-Columns lists. What is not asked for is not read. Texts are cut after 300 characters.
# Types: utf8, int32, float64, bool, timestamp[ms, UTC]. Default: sort=created_at, desc=true, offset=0, limit=100 (at
# most 1000). ``among`` (STAGE/FINGERPRINT) leaves the rows that an artifact chose, and with ``rule`` those that this
# rule dropped; X-Absent counts those of them that this version of the buffer does not have.

# GET /api/facets?filter=&at=&among=&rule=


class Bin(Answer):
    """One bar: ``all`` rows and those ``filtered``. ``low`` <= value < ``high`` for numbers (the last bin includes
    ``high``); None otherwise. ``where`` is the SQL expression that chooses this bar alone, quoted for the filter."""

    label: str
    low: float | None
    high: float | None
    all: int
    filtered: int
    where: str


class Facet(Answer):
    """``more`` counts the values that have no bar of their own (categories beyond the 20 most frequent)."""

    column: str
    kind: Literal["number", "category", "bool"]
    bins: list[Bin]
    more: int


class Facets(Answer):
    version: int
    total: int
    filtered: int
    facets: list[Facet]


# GET /api/search?q=&k=


class Hit(Answer):
    trajectory_id: str
    score: float


class Hits(Answer):
    """Best first. ``version`` is that of the buffer which the index holds, and ``behind`` counts newer commits."""

    version: int
    behind: int
    hits: list[Hit]


# GET /api/rows/{id}?at=


class ShownCall(Answer):
    """``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


class ShownMessage(Answer):
    """A message. ``content``, ``reasoning`` and ``arguments`` are cut after 20,000 characters if ``cut`` is true;
    ``characters`` counts the whole ``content``, and GET /api/rows/{id}/messages/{number}?start=&most= gives the whole
    message, or these characters of its content, as JSON of this model. ``error`` is true if it is the answer of a tool
    that failed. ``token_start`` and ``token_end`` (exclusive) are its span."""

    number: int
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str | None
    tool_calls: list[ShownCall]
    tool_call_id: str | None
    name: str | None
    reward: float | None
    token_start: int | None
    token_end: int | None
    error: bool
    characters: int
    cut: bool


class Component(Answer):
    name: str
    value: float
    weight: float


class VersionSpan(Answer):
    """The weights of ``version`` sampled the action tokens of [start, end)."""

    version: int
    start: int
    end: int


class Maker(Answer):
    """The stage run that appended the row. ``uses`` and ``inputs`` (STAGE/FINGERPRINT) are empty if it is gone."""

    pipeline: str | None
    stage: str
    fingerprint: str
    run_id: str
    uses: str
    inputs: list[str]


class LearnedFrom(Answer):
    """What a model learned from: STAGE/FINGERPRINT of rows, as /api/rows?among= takes it, or of pairs."""

    artifact: str
    kind: Literal["rows", "pairs"]


class SampledBy(Answer):
    """What sampled the row. ``stage`` and ``fingerprint`` name the artifact if the policy is one."""

    name: str
    version: int
    stage: str | None
    fingerprint: str | None
    learned_from: list[LearnedFrom]


class LearnedBy(Answer):
    """A stage that learned from the row, newest first, in which ``steps`` as its metrics number them (optimiser steps,
    online iterations), and the ``models`` that it made, as rows that they sample name them."""

    stage: str
    fingerprint: str
    steps: list[int]
    models: list[str]


class Made(Answer):
    made_by: Maker
    policy: SampledBy
    learned_by: list[LearnedBy]


class Breach(Answer):
    """A token that is trained on and that no policy sampled, and the rule that it breaks."""

    token: int
    rule: str


class Neighbours(Answer):
    """Rows of the same stage run before and after this one, and all rows of the same task (this one too, at most
    1,024 of ``all_attempts``), in the order of time."""

    previous: str | None
    next: str | None
    attempts: list[str]
    all_attempts: int


class RowAnswer(Answer):
    """One trajectory. ``row`` holds the scalar columns by name, times as ISO 8601; ``tools`` and ``final_state`` are
    JSON texts, cut after 200,000 of so many characters. ``proof`` lists at most 1,000 breaches, ``breaches`` counts
    all."""

    version: int
    row: dict[str, Any]
    messages: list[ShownMessage]
    tools: str
    tools_characters: int
    final_state: str
    final_state_characters: int
    reward_components: list[Component]
    tags: list[str]
    spans: list[VersionSpan]
    lineage: Made
    proof: list[Breach]
    breaches: int
    neighbours: Neighbours


# GET /api/tokens/{id}?at= -> Arrow, one record per token; GET /api/tokens/{id}/text?at= -> text/plain, UTF-8

#
# Columns of every answer: start, length (int32, bytes in the text; null if the tokenizer is not known), joined (bool:
# the token starts inside a character, show it with the one before), id (int32), mask (bool), logprob (float32, null
# where the policy sampled nothing), version (int32, of the weights that sampled it; null where not known).
# Optional columns, each there only if something wrote it: weight (float32: in the loss; for policy gradients the
# advantage), trained (bool: the training row's mask), step (int32, of training that learned from it), ref_logprob,
# train_logprob, entropy (float32). They are null on tokens that are not trained on.
# Metadata of the schema, all texts: text is "yes" or "no", and reason says why not; version is that of the buffer;
# absent is JSON, optional column -> why it is not there; sources is JSON, optional column -> STAGE/FINGERPRINT.
