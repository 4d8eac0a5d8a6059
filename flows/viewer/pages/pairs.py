"""Preference pairs: which tokens both sides share, which ones the loss covers, and how far apart a reference is."""

from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.pages.tokens import side_table, text_of
from agentrl.flows.viewer.query.artifacts import Artifacts, TrainingScalars, label, numbers, row_at
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, Query, RefusedError
from agentrl.schemas.manifest import Kind, Manifest, OutputRecord

LINES = ("pair_id", "task_id", "kind", "chosen_id", "rejected_id", "chosen_reward", "rejected_reward", "shared_prefix")
SIDES = {"chosen": 1, "rejected": -1}
"""Side -> its label in training rows."""


class ArtifactPage(Query):
    artifact: str | None = None
    offset: int = Field(0, ge=0, lt=2**31)
    limit: int = Field(100, ge=1, le=1000)


class PairQuery(Query):
    artifact: str
    pair_id: str


class SideQuery(PairQuery):
    side: Literal["chosen", "rejected"]


class PairLine(Answer):
    pair_id: str
    task_id: str
    kind: str
    chosen_id: str
    rejected_id: str
    chosen_reward: float | None
    rejected_reward: float | None
    shared_prefix: int


class PairLines(Answer):
    """``artifacts`` are all artifacts of the store that hold pairs, newest first; the first is shown unless asked for
    another."""

    artifacts: list[str]
    artifact: str | None
    total: int
    pairs: list[PairLine]


class PairSide(Answer):
    """``covered`` counts the tokens that the loss covers, ``tokens`` all; ``ref_logprob`` is the sum over covered ones
    under the reference, if a training stage recorded it."""

    trajectory_id: str
    reward: float | None
    tokens: int
    covered: int
    covered_in_prefix: int
    ref_logprob: float | None


class PairAnswer(Answer):
    """``margin`` is the chosen side's ``ref_logprob`` less the rejected one's. ``trained_by`` is STAGE/FINGERPRINT.
    ``previous`` and ``next`` are the pairs before and after it."""

    pair_id: str
    task_id: str
    kind: str
    method: str
    shared_prefix: int
    chosen: PairSide
    rejected: PairSide
    margin: float | None
    trained_by: list[str]
    previous: str | None
    next: str | None


def pairs(reader: StoreReader, question: ArtifactPage) -> PairLines:
    """A page of the pairs of one artifact. Raises RefusedError if it has none."""
    artifacts, artifact = reader.artifacts, question.artifact
    made = {label(manifest): (manifest, output) for manifest, output in _with_pairs(artifacts)}
    if artifact is None and not made:
        return PairLines(artifacts=[], artifact=None, total=0, pairs=[])
    shown = artifact or next(iter(made))
    with _file(artifacts, *_named(made, shown)) as file:
        table = file.read(list(LINES))
    lines = [PairLine(**line) for line in table.slice(question.offset, question.limit).to_pylist()]
    return PairLines(artifacts=list(made), artifact=shown, total=table.num_rows, pairs=lines)


def _with_pairs(artifacts: Artifacts) -> list[tuple[Manifest, OutputRecord]]:
    """Artifacts with pairs, newest first."""
    return [
        (manifest, output)
        for manifest in artifacts.all()
        for output in manifest.outputs.values()
        if output.kind is Kind.PAIRS
    ]


def _named(made: dict[str, tuple[Manifest, OutputRecord]], artifact: str) -> tuple[Manifest, OutputRecord]:
    if artifact not in made:
        reason = f"no artifact {artifact[:100]!r} holds pairs"
        raise RefusedError(reason, field="artifact", allowed=list(made), status=404)
    return made[artifact]


def _file(artifacts: Artifacts, manifest: Manifest, output: OutputRecord) -> pq.ParquetFile:
    return pq.ParquetFile(artifacts.catalog.open(manifest, output.path))


class PairRow(NamedTuple):
    """A pair by column, the artifact that holds it, and the pairs before and after it."""

    manifest: Manifest
    scalars: TrainingScalars
    previous: str | None
    next: str | None


def pair_row(artifacts: Artifacts, question: PairQuery) -> PairRow:
    """One pair, read from its row group alone. Raises RefusedError if there is none."""
    made = {label(manifest): (manifest, output) for manifest, output in _with_pairs(artifacts)}
    manifest, output = _named(made, question.artifact)
    with _file(artifacts, manifest, output) as file:
        ids = file.read(["pair_id"])["pair_id"].to_pylist()
        if question.pair_id not in ids:
            reason = f"{question.artifact} has no pair {question.pair_id[:100]!r}"
            raise RefusedError(reason, field="pair_id", status=404)
        index = ids.index(question.pair_id)
        before, _, after = [None, *ids, None][index : index + 3]
        return PairRow(manifest, row_at(file, index), before, after)


def side_tokens(reader: StoreReader, question: SideQuery) -> pa.Table:
    """The tokens of a side of a pair."""
    pair = pair_row(reader.artifacts, question).scalars
    ids, mask = pair[f"{question.side}_ids"], pair[f"{question.side}_mask"]
    text, reason = text_of(reader, numbers(ids, np.int32), pair["tokenizer"].as_py(), "")
    return side_table(ids, mask, text, reason)


def pair(reader: StoreReader, question: PairQuery) -> PairAnswer:
    artifacts = reader.artifacts
    manifest, pair, before, after = pair_row(artifacts, question)
    trained = [
        trained_manifest
        for trained_manifest in artifacts.all()
        if _reads(trained_manifest, manifest) and "rows" in trained_manifest.outputs
    ]
    sides = {side: _side(pair, side, _reference(artifacts, trained, pair, side)) for side in SIDES}
    chosen, rejected = sides["chosen"].ref_logprob, sides["rejected"].ref_logprob
    return PairAnswer(
        **{name: pair[name].as_py() for name in ("pair_id", "task_id", "kind", "method", "shared_prefix")},
        chosen=sides["chosen"],
        rejected=sides["rejected"],
        margin=None if chosen is None or rejected is None else chosen - rejected,
        trained_by=[label(trained_manifest) for trained_manifest in trained],
        previous=before,
        next=after,
    )


def _reads(manifest: Manifest, pairs: Manifest) -> bool:
    records = [record for each in manifest.ingredients.inputs.values() for record in each]
    return any((record.stage, record.fingerprint) == (pairs.ingredients.stage, pairs.fingerprint) for record in records)


def _side(pair: TrainingScalars, side: str, reference: float | None) -> PairSide:
    mask = numbers(pair[f"{side}_mask"], bool)
    return PairSide(
        trajectory_id=pair[f"{side}_id"].as_py(),
        reward=pair[f"{side}_reward"].as_py(),
        tokens=len(mask),
        covered=int(mask.sum()),
        covered_in_prefix=int(mask[: pair["shared_prefix"].as_py()].sum()),
        ref_logprob=reference,
    )


def _reference(artifacts: Artifacts, trained: list[Manifest], pair: TrainingScalars, side: str) -> float | None:
    """The log-prob of a side's covered tokens under the reference, from the newest training that recorded it."""
    ids = numbers(pair[f"{side}_ids"], np.int32)
    for manifest in trained:
        try:
            with _file(artifacts, manifest, manifest.outputs["rows"]) as file:
                keys = file.read(["row_id", "label"])
                same = pc.and_(pc.equal(keys["row_id"], pair["pair_id"]), pc.equal(keys["label"], SIDES[side]))
                places = np.flatnonzero(same.to_numpy())
                row: dict[str, Any] = row_at(file, int(places[-1])) if len(places) else {}
        except (OSError, StoreError, pa.ArrowException):  # freed since the list was read
            continue
        if not row or not np.array_equal(numbers(row["input_ids"], np.int32), ids):
            continue
        logprobs = numbers(row["ref_logprobs"], np.float64)
        if len(logprobs) == len(ids):
            return float(logprobs[numbers(row["mask"], bool)].sum())
    return None
