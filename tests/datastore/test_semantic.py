"""Rows that mean nearly the same, by vectors that are known here."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from test_duplicates import asked

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation import semantic
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.curation.semantic import semantic_duplicates
from agentrl.datastore.search.vectors import embedded


class Given:
    """An embedder that gives each text, a number, its vector."""

    identity, neural = "given", True

    def __init__(self, vectors: np.ndarray, looks_at: int = 10) -> None:
        self.vectors, self.looks_at = vectors, looks_at

    def encode(self, texts: list[str]) -> np.ndarray:
        return self.vectors[[int(text) for text in texts]]

    def cut(self, texts: list[str]) -> int:
        return sum(len(text) > self.looks_at for text in texts)


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def planted(count: int, dimensions: int = 32) -> np.ndarray:
    """Vectors of which every other one is near the one before it, at a cosine of .99 or so."""
    random = np.random.default_rng(0)
    vectors = random.normal(size=(count, dimensions))
    vectors[1::2] = vectors[::2] + 0.1 * random.normal(size=(count // 2, dimensions))
    return unit(vectors)


def test_a_row_is_dropped_if_and_only_if_a_better_one_that_is_left_is_close() -> None:
    vectors = planted(600)
    order = np.random.default_rng(1).permutation(600)
    doubled = semantic_duplicates(
        ([str(row)] for row in order), [""] * 600, 0.95, partial(embedded, embedder=Given(vectors)), 0
    )
    close = (vectors[order] @ vectors[order].T) >= 0.95
    for row in range(600):
        assert doubled[row] == (close[row, :row] & ~doubled[:row]).any()
    assert doubled.sum() == 300
    scopes = [str(row % 7) for row in range(600)]
    doubled = semantic_duplicates(
        ([str(row)] for row in range(600)), scopes, 0.95, partial(embedded, embedder=Given(vectors)), 0
    )
    assert doubled.sum() == 0, "near ones are in other scopes"


def test_clusters_lose_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semantic, "CLUSTER", 512)
    vectors = planted(4000)
    doubled = semantic_duplicates(
        ([str(row)] for row in range(4000)), [""] * 4000, 0.95, partial(embedded, embedder=Given(vectors)), 0
    )
    close = (vectors @ vectors.T) >= 0.95
    for row in np.flatnonzero(doubled):
        assert (close[row, :row] & ~doubled[:row]).any(), "none is dropped wrongly"
    assert 0.85 * 2000 < doubled.sum() <= 2000, "the loss of 16 clusters among vectors without clusters"


def test_all_parts_count_and_long_texts_are_said() -> None:
    vectors = unit(np.array([[1, 0], [1, 0.01], [0, 1], [0, 1]]))
    texts = [["0", "2"], ["1", "3"], ["1", "0"], ["0", "2"]]
    with pytest.warns(UserWarning, match="4 of 4 texts are longer"):
        doubled = semantic_duplicates(texts, [""] * 4, 0.95, partial(embedded, embedder=Given(vectors, 0)), 0)
    assert doubled.tolist() == [False, True, False, True]


def test_the_rule_keeps_the_best_row(tmp_path: Path) -> None:
    rows = [
        asked(0, "cancel the order of Ann", "yes", reward=0.5),
        asked(1, "cancel the order of Ann", "yes", reward=1.0),
        asked(2, "book a flight to the city", "yes"),
    ]
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append(rows, stage="rollout", fingerprint="f")
    rule = {"rule": "semantic_duplicates", "scope": "all", "compare": ["question"]}
    kept = curate(buffer, Rules.model_validate({"rules": [rule]}).rules).ids.to_pylist()
    assert kept == [rows[1].trajectory_id, rows[2].trajectory_id]
