"""The tokens of one row as Arrow: their places in the text, and what each lens shows of them."""

import json
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from agentrl.flows.viewer.pages.decoding import Decoded
from agentrl.flows.viewer.query.artifacts import LearnedTokens, numbers
from agentrl.flows.viewer.wire import RowQuery

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader

TOKEN_SCHEMA = pa.schema(
    [
        pa.field("start", pa.int32()),
        pa.field("length", pa.int32()),
        pa.field("joined", pa.bool_()),
        pa.field("id", pa.int32()),
        pa.field("mask", pa.bool_()),
        pa.field("logprob", pa.float32()),
        pa.field("version", pa.int32()),
    ]
)
"""The columns that every answer has; :mod:`agentrl.flows.viewer.wire` says what they mean."""

LENSES = {
    "weight": pa.float32(),
    "trained": pa.bool_(),
    "step": pa.int32(),
    "ref_logprob": pa.float32(),
    "train_logprob": pa.float32(),
    "entropy": pa.float32(),
}
"""Optional columns, which are there if something wrote them."""

RECORDED = {"ref_logprob": "ref_logprobs", "train_logprob": "train_logprobs", "entropy": "entropy"}
"""Lens -> column of the training rows, with a number for each token or none at all."""


def tokens(reader: "StoreReader", question: RowQuery) -> pa.Table:
    """The tokens of a row."""
    row, snapshot = reader.row_of(question.id, question.at)
    return reader.tokens_of(row, snapshot.version)[0]


def text(reader: "StoreReader", question: RowQuery) -> bytes:
    """The text of a row's tokens; empty if their tokenizer is not known, which the answer with the tokens says."""
    decoded, _ = reader.decoded(reader.row_of(question.id, question.at)[0])
    return decoded.text if decoded else b""


def token_table(
    row: dict[str, pa.Scalar], decoded: Decoded | None, trained_on: LearnedTokens | None, version: int, reason: str
) -> pa.Table:
    """The answer. ``row`` has tokenizer and token columns of a trajectory; ``reason`` says why there is no text."""
    ids = numbers(row["input_ids"], np.int32)
    count = len(ids)
    columns = [
        *_places(decoded, count),
        pa.array(ids),
        pa.array(numbers(row["action_mask"], bool)),
        _or_null(numbers(row["logprobs"], np.float32), count),
        _versions(row["spans"], count),
    ]
    lenses, absent = _lenses(count, trained_on)
    sources = dict.fromkeys(lenses, trained_on.label) if trained_on else {}
    metadata = {
        "text": "no" if decoded is None else "yes",
        "reason": reason,
        "tokenizer": row["tokenizer"].as_py(),
        "version": str(version),
        "absent": json.dumps(absent),
        "sources": json.dumps(sources),
    }
    fields = [*TOKEN_SCHEMA, *(pa.field(name, LENSES[name]) for name in lenses)]
    return pa.Table.from_arrays([*columns, *lenses.values()], schema=pa.schema(fields, metadata))


def side_table(ids: pa.Scalar, mask: pa.Scalar, decoded: Decoded | None, reason: str) -> pa.Table:
    """The tokens of a side of a pair: places in the text, ids, and which ones the loss covers."""
    columns = [*_places(decoded, len(ids)), pa.array(numbers(ids, np.int32)), pa.array(numbers(mask, bool))]
    metadata = {"text": "no" if decoded is None else "yes", "reason": reason}
    return pa.Table.from_arrays(columns, schema=pa.schema(list(TOKEN_SCHEMA)[: len(columns)], metadata))


def _places(decoded: Decoded | None, count: int) -> list[pa.Array]:
    """``start``, ``length`` and ``joined``."""
    if decoded is None:
        return [pa.nulls(count, pa.int32()), pa.nulls(count, pa.int32()), pa.nulls(count, pa.bool_())]
    return [
        pa.array(decoded.start.astype(np.int32)),
        pa.array(decoded.length.astype(np.int32)),
        pa.array(decoded.joined),
    ]


def _or_null(values: np.ndarray, count: int) -> pa.Array:
    """Floats, null where they are NaN or missing."""
    if len(values) != count:
        return pa.nulls(count, pa.float32())
    return pa.array(values.astype(np.float32), mask=np.isnan(values))


def _versions(spans: pa.Scalar, count: int) -> pa.Array:
    """The version of the weights that sampled each token; null outside of all spans."""
    versions, known = np.zeros(count, np.int32), np.zeros(count, dtype=bool)
    for span in spans.as_py():
        versions[span["start"] : span["end"]] = span["version"]
        known[span["start"] : span["end"]] = True
    return pa.array(versions, mask=~known)


def _lenses(count: int, trained_on: LearnedTokens | None) -> tuple[dict[str, pa.Array], dict[str, str]]:
    """Optional columns, and why the others are not there."""
    if trained_on is None:
        return {}, dict.fromkeys(LENSES, "no training stage of this store learned from this row")
    label, trained = trained_on.label, trained_on.mask
    if trained is None:
        return {}, dict.fromkeys(LENSES, f"{label} learned from other tokens than this row's")

    def lens(column: str) -> pa.Array | None:
        values = trained_on.values(column)
        return None if values is None else _or_null(values, count)

    lenses = {"weight": lens("weights"), "trained": pa.array(trained), "step": None}
    if steps := trained_on.learned.steps:
        lenses["step"] = pa.array(np.full(count, steps[-1], np.int32), mask=~trained)
    lenses |= {name: lens(column) for name, column in RECORDED.items()}
    reason = f"{label} did not record it; `agentrl replay` computes one of its steps again"
    return (
        {name: values for name, values in lenses.items() if values is not None},
        {name: reason for name, values in lenses.items() if values is None},
    )
