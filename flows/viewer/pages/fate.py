"""What became of a row: each stage that made it, saw it, kept or dropped it, paired it, or trained on it."""

from collections.abc import Iterator
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.pages.trajectory import scalars_of
from agentrl.flows.viewer.query import selections
from agentrl.flows.viewer.query.artifacts import Artifacts, label
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, RowQuery
from agentrl.schemas.manifest import Kind, Manifest

ARTIFACTS = 300
"""The newest artifacts that are looked through."""


class SeenBy(Answer):
    """What one artifact did with a row. ``why`` is the rule that dropped it, or why it was left out. ``steps`` are
    those that trained on it, or that sampled it and left it out; ``pair_id`` the pair that it is a side of."""

    artifact: str
    uses: str
    run_id: str
    when: str
    what: Literal["made", "kept", "dropped", "chosen", "rejected", "trained", "left out", "read"]
    why: str
    pair_id: str | None
    steps: list[int]


class Fate(Answer):
    """What became of a row, in the order of time. ``unread`` older artifacts were not looked through."""

    version: int
    unread: int
    seen: list[SeenBy]


def fate(reader: StoreReader, question: RowQuery) -> Fate:
    """What each artifact did with a row."""
    table, snapshot = reader.row_of(question.id, question.at)
    row, artifacts = scalars_of(table), reader.artifacts
    every = artifacts.all()
    seen: list[SeenBy] = []
    for manifest in reversed(every[:ARTIFACTS]):
        try:
            seen += _seen(artifacts, manifest, snapshot, row)
        except (OSError, StoreError, pa.ArrowException):
            continue  # freed since the list was read
    return Fate(version=snapshot.version, unread=max(0, len(every) - ARTIFACTS), seen=seen)


def _seen(artifacts: Artifacts, manifest: Manifest, snapshot: Snapshot, row: dict[str, Any]) -> Iterator[SeenBy]:
    """What one artifact did with a row; nothing if it never saw it."""
    name = row["trajectory_id"]
    own_stage, own_fingerprint = row["stage"], str(row["fingerprint"]).partition(".")[0]
    made = manifest.ingredients.stage == own_stage and manifest.fingerprint.startswith(own_fingerprint or "?")
    if made:
        yield _event(manifest, "made")
    learned = _learned(artifacts, manifest, name)
    if learned:
        yield learned
    elif made:
        yield from _left_out(artifacts, manifest, name)
    was_given = not made and _holds(selections.given(artifacts, manifest), name)
    drops = "dropped" in manifest.outputs or (not made and selections.selects(manifest))
    dropped = selections.dropped(artifacts, manifest, snapshot) if drops else None
    rules = [] if dropped is None else dropped.filter(pl.col("trajectory_id") == name)["rule"].to_list()
    if rules:
        yield _event(manifest, "dropped", "; ".join(rules))
    elif not made and selections.selects(manifest) and _holds(selections.chosen(artifacts, manifest), name):
        yield _event(manifest, "kept")
    elif was_given and not learned:
        yield from _read(artifacts, manifest, name)


def _read(artifacts: Artifacts, manifest: Manifest, name: str) -> Iterator[SeenBy]:
    """What a stage that was given a row, and neither chose nor dropped nor trained on it, made of it."""
    pairs = [output for output, record in manifest.outputs.items() if record.kind is Kind.PAIRS]
    if pairs:
        sides = [side for output in pairs for side in _sides(artifacts, manifest, output, name)]
        if not sides:
            yield _event(manifest, "left out", "it is a side of no pair")
        for side, pair in sides:
            yield _event(manifest, side, pair_id=pair)
    elif manifest.ingredients.uses.startswith("train."):
        yield _event(manifest, "left out", "no step of the training drew it")
    else:
        yield _event(manifest, "read")


def _learned(artifacts: Artifacts, manifest: Manifest, name: str) -> SeenBy | None:
    for learned in artifacts.learned(name):
        if (learned.stage, learned.fingerprint) == (manifest.ingredients.stage, manifest.fingerprint):
            return _event(manifest, "trained", steps=learned.steps)
    return None


def _left_out(artifacts: Artifacts, manifest: Manifest, name: str) -> Iterator[SeenBy]:
    """The step of online training that sampled a row and did not train on it."""
    if "steps" not in manifest.outputs or "batches" not in manifest.outputs:
        return
    table = pq.read_table(artifacts.catalog.open(manifest, manifest.outputs["steps"].path))
    for step in table.filter(pc.equal(table["trajectory_id"], name)).to_pylist():
        if not step["trained"]:
            flat = " (its advantage is 0: all rewards of its group are equal)" if not step["advantage"] else ""
            yield _event(manifest, "left out", f"of the loss{flat}", steps=[step["step"]])


def _sides(artifacts: Artifacts, manifest: Manifest, output: str, name: str) -> Iterator[tuple[str, str]]:
    file = artifacts.catalog.open(manifest, manifest.outputs[output].path)
    table = pq.read_table(file, columns=["pair_id", "chosen_id", "rejected_id"])
    for side in ("chosen", "rejected"):
        mine = table.filter(pc.equal(table[f"{side}_id"], name))
        yield from ((side, pair) for pair in mine["pair_id"].to_pylist())


def _holds(ids: pa.ChunkedArray, name: str) -> bool:
    return int(pc.index(ids, name).as_py()) >= 0


def _event(
    manifest: Manifest, what: Any, why: str = "", *, pair_id: str | None = None, steps: list[int] | None = None
) -> SeenBy:
    return SeenBy(
        artifact=label(manifest),
        uses=manifest.ingredients.uses,
        run_id=manifest.run_id,
        when=manifest.created_at.isoformat(),
        what=what,
        why=why,
        pair_id=pair_id,
        steps=steps or [],
    )
