"""The tokens of one row as Arrow: their text, and what each lens shows of them."""

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from agentrl.datastore.artifacts.tokenizers import UNKNOWN, TokenBytes
from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.query.artifacts import LearnedTokens, numbers
from agentrl.flows.viewer.reader import TOKENS, StoreReader
from agentrl.flows.viewer.wire import RowQuery
from agentrl.pipelines.tokenizers import token_bytes

TOKEN_SCHEMA = pa.schema(
    [
        pa.field("text", pa.binary()),
        pa.field("joined", pa.bool_()),
        pa.field("id", pa.int32()),
        pa.field("mask", pa.bool_()),
        pa.field("logprob", pa.float32()),
        pa.field("version", pa.int32()),
    ]
)
"""The columns of every answer: the ``text`` of each token (UTF-8; null if nobody knows the tokenizer), ``joined`` (the
token starts inside a character: show it with the one before), and of the policy ``logprob`` (null where it sampled
nothing) and the ``version`` of its weights (null where not known)."""

TEXT_BYTES = 240
"""How much of the text of some tokens a line shows."""

LENSES = {
    "weight": pa.float32(),
    "trained": pa.bool_(),
    "step": pa.int32(),
    "ref_logprob": pa.float32(),
    "train_logprob": pa.float32(),
    "entropy": pa.float32(),
}
"""Optional columns, which are there if something wrote them, and null on tokens that are not trained on: ``weight`` in
the loss (for policy gradients the advantage), ``trained`` (the training row's mask), the ``step`` that learned from it.
The metadata of the schema say why others are absent, and which artifact wrote each."""

RECORDED = {"ref_logprob": "ref_logprobs", "train_logprob": "train_logprobs", "entropy": "entropy"}
"""Lens -> column of the training rows, with a number for each token or none at all."""


@dataclass(frozen=True)
class Decoded:
    """``text`` is UTF-8, in which a byte that belongs to no character is the replacement character. ``bounds``,
    [tokens + 1] in its bytes, are where each token begins, and the end; ``joined`` [tokens]: the token starts inside a
    character."""

    text: bytes
    bounds: np.ndarray
    joined: np.ndarray


def decoded(tokenizer: TokenBytes, ids: np.ndarray) -> Decoded:
    text, bounds = tokenizer.text(ids)
    stray = _stray(text)
    if len(stray):
        text, moved = _replaced(text, stray)
        bounds = bounds + moved[bounds]
    first = np.append(np.frombuffer(text, np.uint8), np.uint8(0))[bounds[:-1]]
    return Decoded(text, bounds, (first & 0xC0 == 0x80) & (np.diff(bounds) > 0))


def _stray(raw: bytes) -> np.ndarray:
    """Places of the bytes that belong to no character."""
    try:
        raw.decode()
        return np.zeros(0, dtype=np.int64)
    except UnicodeDecodeError:
        codes = np.frombuffer(raw.decode("utf-8", "surrogateescape").encode("utf-32-le", "surrogatepass"), np.uint32)
    stray = (codes >= 0xDC80) & (codes <= 0xDCFF)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    sizes[stray] = 1
    return (np.cumsum(sizes) - sizes)[stray]


def _replaced(raw: bytes, stray: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The bytes with the replacement character at ``stray``, and by how much each place, and the end, moved."""
    wide = np.ones(len(raw), dtype=np.int64)
    wide[stray] = len(UNKNOWN)
    places = np.concatenate([[0], np.cumsum(wide)])
    made = np.repeat(np.frombuffer(raw, np.uint8), wide)
    for offset, byte in enumerate(UNKNOWN):
        made[places[stray] + offset] = byte
    return made.tobytes(), places - np.arange(len(places))


def tokens(reader: StoreReader, question: RowQuery) -> pa.Table:
    """The tokens of a row."""
    row, snapshot = reader.row_of(question.id, question.at)
    return tokens_of(reader, row, snapshot.version)


def tokens_of(reader: StoreReader, row: pa.Table, version: int) -> pa.Table:
    """The tokens of one row with their columns."""
    text, reason = decoded_of(reader, row)
    scalars = {name: row[name][0] for name in (*TOKENS, "tokenizer")}
    learned = reader.artifacts.trained_on(row["trajectory_id"][0].as_py(), numbers(scalars["input_ids"], np.int32))
    matching = next((trained for trained in learned if trained.rows), learned[0] if learned else None)
    return token_table(scalars, text, matching, version, reason)


def decoded_of(reader: StoreReader, row: pa.Table) -> tuple[Decoded | None, str]:
    """The tokens of a row with their text, or why there is none."""
    ids = numbers(row["input_ids"][0], np.int32)
    if not len(ids):
        return None, "this row has no tokens: it can be read, but not trained on as sampled"
    return text_of(reader, ids, row["tokenizer"][0].as_py(), row["policy"][0].as_py())


def text_of(reader: StoreReader, ids: np.ndarray, tokenizer: str, policy: str) -> tuple[Decoded | None, str]:
    try:
        known = reader.tokenizers.get_or((tokenizer, policy), lambda: token_bytes(reader.catalog, tokenizer, policy))
    except (LookupError, StoreError) as error:
        return None, str(error.args[0])
    return decoded(known, ids), ""


def beginning(reader: StoreReader, ids: np.ndarray, tokenizer: str, policy: str) -> str:
    """The text of some tokens, as far as it is shown; empty if their tokenizer is not known."""
    text, _ = text_of(reader, ids, tokenizer, policy)
    return text.text[:TEXT_BYTES].decode(errors="ignore") if text else ""


def token_table(
    row: dict[str, pa.Scalar], decoded: Decoded | None, trained_on: LearnedTokens | None, version: int, reason: str
) -> pa.Table:
    """The answer. ``row`` has tokenizer and token columns of a trajectory; ``reason`` says why there is no text."""
    ids = numbers(row["input_ids"], np.int32)
    count = len(ids)
    columns = [
        *_pieces(decoded, count),
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
    """The tokens of a side of a pair: text, ids, and which ones the loss covers."""
    columns = [*_pieces(decoded, len(ids)), pa.array(numbers(ids, np.int32)), pa.array(numbers(mask, bool))]
    metadata = {"text": "no" if decoded is None else "yes", "reason": reason}
    return pa.Table.from_arrays(columns, schema=pa.schema(list(TOKEN_SCHEMA)[: len(columns)], metadata))


def _pieces(decoded: Decoded | None, count: int) -> list[pa.Array]:
    """``text`` and ``joined``."""
    if decoded is None:
        return [pa.nulls(count, pa.binary()), pa.nulls(count, pa.bool_())]
    buffers = [None, pa.py_buffer(decoded.bounds.astype(np.int32)), pa.py_buffer(decoded.text)]
    return [pa.Array.from_buffers(pa.binary(), count, buffers), pa.array(decoded.joined)]


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
