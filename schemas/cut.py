"""The manifest of a cut, ``cut.json``: which rows were chosen, from what, by which rules, and what was found in them.

It holds no time, no machine, no run and not its own name: two cuts of one version of a table by the same rules and seed
are equal byte for byte.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

CUT_VERSION = 1

MAKE_CUT, IMPORT_CUT = "trajectories.cut", "trajectories.import_cut"
"""Stages that leave a cut. Its name is that of the stage in its pipeline, or the one that a command gave it."""

NEWEST = "newest"
"""In place of a fingerprint, as an edge of a pipeline: the newest cut of that name."""

UNKNOWN_LICENCE = "unknown"
"""Licence of rows of which nobody said under which they are."""

CUT_ROWS_SCHEMA = pa.schema(
    [pa.field("trajectory_id", pa.string(), nullable=False), pa.field("digest", pa.binary(), nullable=False)]
)
"""``rows.parquet``: the rows of a cut in its order, each with the digest of its content."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CutTable(_Part):
    """The table that a cut was made from: its id, which no other table has, its version, and that of its columns."""

    id: str
    version: int
    columns: int


class CutOrigin(_Part):
    """A selection that a cut was made from, by name and by the digest of the content of its rows."""

    stage: str
    output: str
    rows: int
    digest: str


class CutLevel(_Part):
    """A rule of the funnel, with the rows before and after it."""

    rule: str
    before: int
    after: int


class CutSource(_Part):
    """Rows of one origin: what made them, with whose model, and under which licence they are."""

    licence: str
    source: str
    stage: str
    env: str
    model: str
    rows: int
    tasks: int
    tokens: int
    successes: int


class CutCounts(_Part):
    """Totals over the rows of a cut. ``unscored`` rows have no outcome; in ``redacted`` rows placeholders stand for
    secrets."""

    tasks: int
    episodes: int
    steps: int
    tool_calls: int
    tokens: int
    action_tokens: int
    successes: int
    failures: int
    unscored: int
    redacted: int


class CutSecrets(_Part):
    """What a search for secrets found in the rows of a cut: the ``rows`` that hold some, and the ``places`` where these
    stand, by kind. The tokens of ``unread`` rows were not searched, since nobody knows what they say; it is written
    only if there are such rows, as cuts of older releases have it."""

    rows: int
    places: dict[str, int]
    unread: int = 0

    @model_serializer(mode="wrap")
    def _as_before(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = written(self)
        return fields if self.unread else {name: value for name, value in fields.items() if name != "unread"}


class EvaluationSet(_Part):
    """An evaluation set that the rows were compared with. ``digest`` is over its ``questions``, each once, sorted. A
    row was ``dropped`` that holds one of them, as the rule ``decontaminate`` says with these settings."""

    name: str
    questions: int
    digest: str
    ngram: int
    overlap: float
    cosine: float | None
    dropped: int


def question_digest(questions: Iterable[str]) -> str:
    """A digest of a set of questions, whatever their order; where one ends counts."""
    total = hashlib.blake2b(digest_size=16)
    for text in sorted(set(questions)):
        total.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    return total.hexdigest()


class CutHeldOut(_Part):
    """The rows of the buffer that the rule ``decontaminate`` and evaluation sets compared the rows of a cut with: those
    of these ``splits`` in this ``version`` of the table, and the digest of their content. ``heldout.parquet`` names
    each."""

    version: int
    splits: list[str]
    rows: int
    digest: str


class CutAnnotations(_Part):
    """Annotations that a rule read: those of a ``name`` in a version of their table, how many they are, and the digest
    of all that they say."""

    name: str
    version: int
    annotations: int
    digest: str


class CutManifest(_Part):
    """What ``cut.json`` holds. ``digest`` is over the content of the rows in their order; ``files`` has the SHA-256 of
    every other file of the cut, so that the digest of ``cut.json`` vouches for all of them. ``secrets`` is None if
    nobody looked for any, and ``heldout`` if no row of the buffer counted as held out; that is not written, as cuts of
    older releases have it."""

    cut: int = CUT_VERSION
    rows: int
    digest: str
    table: CutTable
    origin: list[CutOrigin]
    split: str | None
    seed: int
    embedder: str
    rules: list[dict[str, Any]]
    funnel: list[CutLevel]
    counts: CutCounts
    licences: dict[str, str]
    sources: list[CutSource]
    evaluation_sets: list[EvaluationSet]
    annotations: list[CutAnnotations]
    secrets: CutSecrets | None
    heldout: CutHeldOut | None = None
    files: dict[str, str]

    @model_serializer(mode="wrap")
    def _as_before(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = written(self)
        return fields if self.heldout else {name: value for name, value in fields.items() if name != "heldout"}

    def text(self) -> str:
        """The very text of ``cut.json``."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @property
    def identity(self) -> str:
        """SHA-256 of ``cut.json``: two cuts that have the same are the same."""
        return hashlib.sha256(self.text().encode()).hexdigest()
