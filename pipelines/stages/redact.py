"""The stage that replaces secrets of stored trajectories by placeholders."""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pydantic import Field

from agentrl.datastore.redaction.settings import OnTokens, Redaction
from agentrl.pipelines.handles import Table, Trajectories
from agentrl.pipelines.parts.common import count
from agentrl.pipelines.parts.distinct import distinct, weights_of
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.redaction.rows import RowRedaction

SHARD_ROWS = 512
"""Rows that are read at once, and whose redacted copies are appended at once."""

COUNTS_SCHEMA = pa.schema(
    [
        pa.field("stage", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("places", pa.int64(), nullable=False),
    ]
)
"""Rows of each stage that had secrets of a kind, and the places in their texts where these stood."""

REDACTED_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("parent_id", pa.string(), nullable=False),
        pa.field("kinds", pa.list_(pa.string()), nullable=False),
        pa.field("places", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
    ]
)
"""Each redacted row: the row that it was made of, the kinds of its secrets, the places where they stood, and the token
ids that gave way."""


class RedactConfig(StageConfig):
    secrets: Redaction = Field(Redaction(), description="what is replaced, and what is left as it is")
    tokens: OnTokens = Field(
        "rewrite",
        description="of rows with secrets: rewrite encodes the text again where it was replaced, drop leaves the "
        "tokens out, for rows whose tokenizer the store does not keep",
    )


class RedactedRows(NamedTuple):
    trajectories: Trajectories
    counts: Table
    redacted: Table


@stage("trajectories.redact", version=1, requires={"detect_secrets": "redact", "phonenumbers": "redact"})
def redact(context: Context, config: RedactConfig, trajectories: list[Trajectories]) -> RedactedRows:
    """Rows in which typed placeholders such as ``<EMAIL_1>`` stand for secrets, equal ones for equal values of this
    run, in texts, JSON and token ids. They are new rows with the tag ``redacted`` and the row as parent; rows without
    secrets are in the output as they are. Tokens that were replaced were not sampled: their mask is false. Weights
    stay.

    ``counts`` has the rows and places of each kind by the stage that the rows came from; ``redacted`` has each redacted
    row with its parent. A value of a secret is in neither, nor in an error.

    Raises StoreError if a row has tokens of a tokenizer that the store does not keep.
    """
    from agentrl.datastore.redaction.rows import RowRedaction, unread_tokens

    given, weights = distinct(trajectories), weights_of(trajectories)
    redaction = RowRedaction(context.buffer.storage, config.secrets, config.tokens)
    rows_of, places_of = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    weight_of: dict[str, float] = {}
    made = unread = 0
    with context.growing_table(REDACTED_SCHEMA, "redacted") as (table, add):
        for shard, start in enumerate(range(0, len(given), SHARD_ROWS)):
            rows = context.buffer.get_many(given.slice(start, SHARD_ROWS))
            changed: list[Trajectory] = []
            records = []
            for row in rows:
                # A shard that a killed run appended is cleaned again too, since numbers of placeholders follow from
                # all rows before; it is not appended again.
                cleaned = redaction.clean(row)
                if not cleaned.changed:
                    unread += cleaned.unread
                    weight_of[row.trajectory_id] = weights[row.trajectory_id]
                    continue
                update = {"trajectory_id": context.trajectory_id(made), "parent_id": row.trajectory_id}
                changed.append(cleaned.row.model_copy(update=update))
                made += 1
                weight_of[changed[-1].trajectory_id] = weights[row.trajectory_id]
                places = cleaned.counts.total()
                records.append({**update, "kinds": sorted(cleaned.counts), "places": places, "tokens": cleaned.tokens})
                rows_of.update((row.stage, kind) for kind in cleaned.counts)
                places_of.update({(row.stage, kind): number for kind, number in cleaned.counts.items()})
            if changed:
                context.append(changed, shard)
                add(pa.Table.from_pylist(records, REDACTED_SCHEMA))
            context.progress(start + len(rows), len(given), redacted=made)
    _report(context, redaction, places_of, len(given), made)
    if unread:
        count(context, {"unread": unread})
        print(unread_tokens(unread))
    counts = [
        {"stage": stage, "kind": kind, "rows": rows_of[stage, kind], "places": places}
        for (stage, kind), places in sorted(places_of.items())
    ]
    return RedactedRows(
        context.select(pa.array(list(weight_of), pa.string()), list(weight_of.values())),
        context.table(pa.Table.from_pylist(counts, COUNTS_SCHEMA), "counts"),
        table,
    )


def _report(
    context: Context, redaction: "RowRedaction", places_of: Counter[tuple[str, str]], given: int, made: int
) -> None:
    """Counts by kind in the metrics, and in a line."""
    kinds: Counter[str] = Counter()
    for (_, kind), places in places_of.items():
        kinds[kind] += places
    count(context, {"rows": given, "redacted": made, **{f"places.{kind}": kinds[kind] for kind in sorted(kinds)}})
    context.metrics.update({f"values.{kind}": number for kind, number in sorted(redaction.placeholders.values.items())})
    what = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common()) or "nothing"
    print(f"redacted {made} of {given} rows; replaced: {what}")
