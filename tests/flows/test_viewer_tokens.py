"""The tokens of a trajectory: their text, their lenses, and tokenizers of all kinds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_store import (
    FIRST,
    GRPO,
    IM_END,
    ONCE,
    STEPS,
    TOKENIZER,
    Browser,
    make_store,
    publish,
    row,
    training_row,
)

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.tokenizers import UNKNOWN, TokenBytes, keep
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.pages.tokens import TOKEN_SCHEMA, decoded
from agentrl.schemas.manifest import Kind
from agentrl.schemas.training import TRAINING_SCHEMA


def test_tokens_and_their_text_agree_with_the_messages(browser: Browser) -> None:
    tokens = browser.arrow(f"/api/tokens/{FIRST}")
    assert tokens.schema.metadata[b"text"] == b"yes"
    pieces = tokens["text"].to_pylist()
    row_ = browser.json(f"/api/rows/{FIRST}")
    for message in row_["messages"]:
        part = b"".join(pieces[message["token_start"] : message["token_end"]]).decode()
        assert part == (message["content"] or "<call>0</call>") + "<|im_end|>"
    joined = tokens["joined"].to_numpy(zero_copy_only=False)
    assert joined.sum() == 3, "an emoji of four tokens"
    mask = np.array(tokens["mask"].to_pylist())
    assert tokens["logprob"].to_pylist() == [-0.25 if acts else None for acts in mask]
    versions = tokens["version"].to_pylist()
    assert versions[0] is None
    assert versions[-1] == 0


def test_lenses_come_from_the_training_that_learned_from_the_row(browser: Browser) -> None:
    tokens = browser.arrow("/api/tokens/grpo-aaaaaaaa-000010")
    assert tokens.schema.names == [*TOKEN_SCHEMA.names, "weight", "trained", "step"]
    mask = tokens["mask"].to_pylist()
    assert tokens["weight"].to_pylist() == [0.5 if acts else None for acts in mask]
    assert tokens["trained"].to_pylist() == mask
    assert set(tokens["step"].to_pylist()) == {None, 1}
    metadata = {key.decode(): value.decode() for key, value in tokens.schema.metadata.items()}
    assert json.loads(metadata["sources"])["weight"] == f"grpo/{GRPO[:8]}"
    assert "agentrl replay" in json.loads(metadata["absent"])["ref_logprob"]
    untrained = browser.arrow("/api/tokens/grpo-aaaaaaaa-000001")
    assert untrained.schema.names == TOKEN_SCHEMA.names
    assert "learned from this row" in json.loads(untrained.schema.metadata[b"absent"])["weight"]


def test_log_probs_of_training_are_lenses_if_they_were_recorded(tmp_path: Path) -> None:
    name = make_store(tmp_path, rows=4)
    entry = row(0, name)
    count = len(entry.input_ids)
    numbers = {"ref_logprobs": [-1.0] * count, "train_logprobs": [-0.5] * count, "entropy": [2.0] * count}
    more = [pa.field(lens, pa.list_(pa.float16())) for lens in ("train_logprobs", "entropy")]
    schema = pa.schema([pa.field("iteration", pa.int64()), *TRAINING_SCHEMA, *more])
    table = pa.Table.from_pylist([training_row(entry) | {"iteration": 7} | numbers], schema=schema)
    publish(
        Catalog(tmp_path),
        "online",
        "9" * 32,
        "train.online",
        {"batches": (Kind.TABLE, table), "steps": (Kind.TABLE, STEPS)},
        minutes=9,
    )
    tokens = Browser(tmp_path).arrow(f"/api/tokens/{FIRST}")
    spoken = tokens["mask"].to_pylist()
    for lens, value in {"ref_logprob": -1.0, "train_logprob": -0.5, "entropy": 2.0, "step": 7}.items():
        assert tokens[lens].to_pylist() == [value if item else None for item in spoken], lens


def test_all_training_rows_of_a_row_count_in_its_lenses_and_its_proof(tmp_path: Path) -> None:
    """A context that is cut in two: the loss of the earlier row ends where that of the later one begins."""
    name = make_store(tmp_path, rows=4)
    entry = row(0, name)
    tool = entry.messages[2]
    assert tool.token_start is not None
    mask = np.array(entry.action_mask)
    begins = np.flatnonzero(mask)[mask.sum() // 2]
    early = [bool(value) and position < begins for position, value in enumerate(mask)]
    early[tool.token_start] = True  # which only the earlier row's proof can find
    late = [bool(value) and position >= begins for position, value in enumerate(mask)]
    first = training_row(entry, mask=early, weights=[0.25] * len(mask))
    rows = [first, training_row(entry, mask=late, weights=[0.75] * len(mask))]
    table = pa.Table.from_pylist(rows, schema=TRAINING_SCHEMA)
    publish(Catalog(tmp_path), "sft", "8" * 32, "train.sft", {"rows": (Kind.TABLE, table)}, minutes=9, config=ONCE)
    browser = Browser(tmp_path)
    tokens = browser.arrow(f"/api/tokens/{FIRST}")
    either = [a or b for a, b in zip(early, late, strict=True)]
    assert tokens["trained"].to_pylist() == either
    weights = [0.25 if a else 0.75 if b else None for a, b in zip(early, late, strict=True)]
    assert tokens["weight"].to_pylist() == weights
    assert [item["token"] for item in browser.json(f"/api/rows/{FIRST}")["proof"]] == [tool.token_start]


def test_rows_without_tokens_say_so(browser: Browser) -> None:
    tokens = browser.arrow("/api/tokens/eval-cccccccc-000000")
    assert tokens.num_rows == 0
    assert tokens.schema.metadata[b"text"] == b"no"
    assert b"has no tokens" in tokens.schema.metadata[b"reason"]
    answer = browser.json("/api/rows/eval-cccccccc-000000")
    assert answer["messages"][0]["token_start"] is None
    assert answer["proof"] == []
    assert answer["lineage"]["learned_by"] == []


def test_a_tokenizer_that_no_model_here_has_leaves_ids(tmp_path: Path) -> None:
    TrajectoryBuffer(tmp_path).append([row(0, "fedcba9876543210")], stage="grpo", fingerprint=GRPO)
    browser = Browser(tmp_path)
    tokens = browser.arrow(f"/api/tokens/{FIRST}")
    assert tokens["id"].to_pylist() == row(0).input_ids
    assert tokens["text"].null_count == tokens.num_rows
    assert b"fedcba9876543210" in tokens.schema.metadata[b"reason"]
    assert b"agentrl buffer tokenizer FOLDER" in tokens.schema.metadata[b"reason"]


def test_a_training_row_of_other_tokens_is_said(tmp_path: Path) -> None:
    name = make_store(tmp_path, rows=4)
    entry = row(1, name)
    changed = training_row(entry, input_ids=[IM_END, *entry.input_ids[1:]])
    table = pa.Table.from_pylist([changed], schema=TRAINING_SCHEMA)
    publish(Catalog(tmp_path), "sft", "8" * 32, "train.sft", {"rows": (Kind.TABLE, table)}, minutes=9, config=ONCE)
    tokens = Browser(tmp_path).arrow(f"/api/tokens/{entry.trajectory_id}")
    assert tokens.schema.names == TOKEN_SCHEMA.names
    assert "other tokens" in json.loads(tokens.schema.metadata[b"absent"])["weight"]


@given(st.lists(st.binary(min_size=0, max_size=4), min_size=1, max_size=12), st.lists(st.integers(0, 14), max_size=30))
def test_any_bytes_become_text_with_exact_places(tokens: list[bytes], ids: list[int]) -> None:
    pieces = [*tokens, UNKNOWN]
    known = TokenBytes(np.frombuffer(b"".join(pieces), np.uint8), np.cumsum([0, *map(len, pieces)]), strips=False)
    result = decoded(known, np.array(ids, dtype=np.int32))
    text = result.text.decode()  # it is UTF-8
    raw = b"".join(pieces[min(token, len(tokens))] for token in ids)
    assert text == raw.decode("utf-8", "surrogateescape").translate(dict.fromkeys(range(0xDC80, 0xDD00), 0xFFFD))
    assert (np.diff(result.bounds) >= 0).all()
    assert (result.bounds[0], result.bounds[-1], len(result.bounds)) == (0, len(result.text), len(ids) + 1)
    for position, joined in zip(result.bounds[:-1], result.joined, strict=True):
        assert not joined or result.text[position] & 0xC0 == 0x80


SENTENCEPIECE = {
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
    "model": {"type": "BPE", "vocab": {"▁a": 0, "b": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}},
    "added_tokens": [],
}


@pytest.mark.parametrize(
    ("tokenizer", "ids", "text", "lengths"),
    [
        (SENTENCEPIECE, [0, 1, 2, 3, 4], "ab€", [1, 1, 1, 1, 1]),
        (SENTENCEPIECE, [2, 3, 1, 9], "��b�", [3, 3, 1, 3]),
        ({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"ð": 0, "Ł": 1}}}, [0, 1], "��", [3, 3]),
    ],
)
def test_tokens_of_odd_tokenizers(
    tmp_path: Path, tokenizer: dict[str, Any], ids: list[int], text: str, lengths: list[int]
) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    keep(buffer.storage, TOKENIZER, lambda: json.dumps(tokenizer))
    spoken: dict[str, Any] = {"input_ids": ids, "action_mask": [True] * len(ids), "logprobs": [-1.0] * len(ids)}
    spoken |= {"n_tokens": len(ids), "n_action_tokens": len(ids), "spans": [], "tokenizer": TOKENIZER}
    bare = [message.model_copy(update={"token_start": None, "token_end": None}) for message in row(0).messages]
    buffer.append([row(0, messages=bare, **spoken)], stage="grpo", fingerprint=GRPO)
    browser = Browser(tmp_path)
    pieces = browser.arrow(f"/api/tokens/{FIRST}")["text"].to_pylist()
    assert b"".join(pieces).decode() == text
    assert list(map(len, pieces)) == lengths


def test_a_tokenizer_of_an_unknown_kind_is_said(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    keep(buffer.storage, TOKENIZER, lambda: json.dumps({"decoder": {"type": "CTC"}, "model": {"vocab": {}}}))
    buffer.append([row(0, TOKENIZER)], stage="grpo", fingerprint=GRPO)
    assert b"CTC" in Browser(tmp_path).arrow(f"/api/tokens/{FIRST}").schema.metadata[b"reason"]
