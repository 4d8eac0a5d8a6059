from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_rows import build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.search import embedding
from agentrl.datastore.search.embedding import LatentEmbedder
from agentrl.datastore.search.exact import mmr, nearest
from agentrl.datastore.search.index import SearchIndex
from agentrl.schemas.trajectory import Trajectory

TOPICS = {
    "refund": "refund a duplicate order that the customer paid twice",
    "flight": "book a flight to paris with one bag",
    "bug": "fix the failing unit test in the parser module",
    "price": "refund the price difference of an order",
}


def row(number: int, topic: str, **fields: object) -> Trajectory:
    return build(number, prompt=TOPICS[topic], task_id=topic, **fields)


@pytest.fixture(autouse=True)
def without_minilm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is that of a machine without the extra; see ``test_minilm.py``."""
    monkeypatch.setattr(embedding, "is_installed", lambda: False)


@pytest.fixture
def buffer(store: str) -> TrajectoryBuffer:
    made = TrajectoryBuffer(store)
    rows = [row(i, topic) for i, topic in enumerate(sorted(TOPICS) * 4)]
    made.append(rows, stage="rollout", fingerprint="f")
    return made


@pytest.mark.parametrize("method", ["dense", "lexical", "hybrid"])
def test_the_nearest_task_comes_first(buffer: TrajectoryBuffer, method: str) -> None:
    hits = buffer.search("customer wants a refund of a duplicate order", 6, method=method)
    assert hits["task_id"].to_list() == ["refund"] * 4 + ["price"] * 2
    assert hits["score"].is_sorted(descending=True)
    assert hits.height == 6


def test_filters_apply_before_ranking(buffer: TrajectoryBuffer) -> None:
    for where in (pl.col("task_id") == "bug", "task_id = 'bug'"):
        hits = buffer.search("refund a duplicate order", 3, where=where, method="dense")
        assert hits["task_id"].to_list() == ["bug"] * 3
    assert buffer.search("refund", 3, where=pl.lit(False)).height == 0
    with pytest.raises(StoreError, match="filter nope = 1"):
        buffer.search("refund", 3, where="nope = 1")


def test_among_equal_prompts_the_best_run_comes_first(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    rows = [row(0, "bug", reward=0.0), row(1, "bug", reward=1.0), row(2, "bug", reward=1.0, n_steps=1)]
    buffer.append([*rows, row(3, "flight")], stage="s", fingerprint="f")
    hits = buffer.search(TOPICS["bug"], 3)
    assert [name[-1] for name in hits["trajectory_id"]] == ["2", "1", "0"]
    assert buffer.search(TOPICS["bug"], 3, per_task=1)["task_id"].to_list() == ["bug", "flight"]


def test_only_new_prompts_are_embedded(buffer: TrajectoryBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    index = SearchIndex(buffer)
    assert index.state() is None
    first = index.refresh()
    assert (first.texts, first.stale) == (4, 0)
    encoded: list[str] = []
    plain = LatentEmbedder.encode

    def encode(self: LatentEmbedder, texts: list[str]) -> np.ndarray:
        encoded.extend(texts)
        return plain(self, texts)

    monkeypatch.setattr(LatentEmbedder, "encode", encode)
    more = build(99, prompt="refund a broken lamp", task_id="lamp")
    buffer.append([more, row(98, "bug")], stage="s", fingerprint="g")
    assert index.state().stale == 1  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="has not seen the last 1 commits"):
        stale = index.search("lamp", 9, refresh=False)
    assert "lamp" not in stale["task_id"].to_list()
    encoded.clear()
    assert index.refresh().texts == 5
    assert encoded == ["refund a broken lamp"]
    again = SearchIndex(TrajectoryBuffer(buffer.store))  # another process sees the same
    assert again.search("a broken lamp", 1)["task_id"].to_list() == ["lamp"]
    assert again.refresh(rebuild=True).texts == 5


def test_prompts_are_written_and_read_some_at_a_time(buffer: TrajectoryBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SearchIndex(buffer)
    state = whole.refresh()
    [(texts, vectors)] = whole.batches(state)
    monkeypatch.setattr("agentrl.datastore.search.index.PART", 3)
    monkeypatch.setattr("agentrl.datastore.search.index.BATCH", 2)
    parted = SearchIndex(TrajectoryBuffer(buffer.store))
    rebuilt = parted.refresh(rebuild=True)
    assert (len(state.parts), len(rebuilt.parts)) == (1, 2)
    result = list(parted.batches(rebuilt))
    assert [len(some) for some, _ in result] == [2, 1, 1]
    assert [text for some, _ in result for text in some] == texts
    assert np.allclose(np.concatenate([some for _, some in result]), vectors, atol=1e-6)
    assert parted.search(TOPICS["bug"], 2).equals(whole.search(TOPICS["bug"], 2))
    with pytest.raises(StoreError, match="made anew meanwhile; ask again"):
        list(whole.batches(state))


def test_vectors_of_another_model_are_refused(buffer: TrajectoryBuffer) -> None:
    index = SearchIndex(buffer)
    index.refresh()
    buffer.append([build(99, prompt="new text here")], stage="s", fingerprint="g")
    index.embedder = LatentEmbedder.fit(["some other words", "of another model"])  # type: ignore[misc]
    with pytest.raises(StoreError, match=r"was made by embedded-.*--rebuild"):
        index.refresh()


def test_mmr_prefers_unlike_results(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    prompts = [f"refund a duplicate order number {i}" for i in range(6)] + ["refund a broken lamp from the shop"]
    rows = [build(i, prompt=prompt, task_id=f"t{i}") for i, prompt in enumerate(prompts)]
    buffer.append(rows, stage="s", fingerprint="f")
    plain = buffer.search("refund a duplicate order", 2, method="dense")["task_id"].to_list()
    diverse = buffer.search("refund a duplicate order", 2, method="dense", diverse=0.3)["task_id"].to_list()
    assert "t6" not in plain
    assert "t6" in diverse
    for wrong in ({"k": 0}, {"diverse": 2.0}):
        with pytest.raises(StoreError):
            buffer.search("x", **wrong)


def test_experience_never_leaks(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    rows = [
        row(1, "refund", split="heldout"),
        row(3, "price"),
        row(5, "price"),
        row(4, "price"),
        row(7, "flight"),
        row(9, "bug", split="dev"),
    ]
    buffer.append(rows, stage="s", fingerprint="f")
    result = buffer.experience(TOPICS["refund"], k=5, task_id="refund")
    assert [int(row.trajectory_id[-1]) for row in result] in ([3, 7], [5, 7])
    assert "Call: find" in result[0].text
    assert sum(item.tokens for item in buffer.experience(TOPICS["refund"], k=5, max_tokens=40)) <= 40
    assert buffer.experience(TOPICS["refund"], max_tokens=1) == []
    assert all(row.trajectory_id[-1] != "7" for row in buffer.experience(TOPICS["flight"], k=5))  # not itself
    with pytest.raises(ValueError, match="held out"):
        buffer.experience("x", splits=["heldout"])


@given(n=st.integers(1, 60), d=st.integers(1, 8), k=st.integers(1, 70), seed=st.integers(0, 99), share=st.floats(0, 1))
def test_exact_search_agrees_with_sorting(n: int, d: int, k: int, seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    vectors, query = random.normal(size=(n, d)).astype(np.float32), random.normal(size=d).astype(np.float32)
    allowed = np.flatnonzero(random.random(n) < share)
    expected = sorted(allowed, key=lambda i: (-(vectors[i] @ query), i))[:k]
    result, scores = nearest(vectors, query, k, allowed)
    assert np.allclose(scores, [vectors[i] @ query for i in expected], atol=1e-5)
    assert len(result) == len(expected)
    assert set(result) <= set(allowed)


def test_mmr_takes_each_once() -> None:
    vectors = np.eye(4, dtype=np.float32)
    assert mmr(vectors, np.array([0.1, 0.9, 0.5, 0.2], np.float32), 4, 1.0) == [1, 2, 3, 0]


@pytest.mark.slow
def test_a_sentence_transformers_model_by_path(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TOPICS.values(), trainers.WordLevelTrainer(special_tokens=["[UNK]"]))
    weights = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), 16)).astype(np.float32)
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)])
    model.save(str(tmp_path / "model"))
    buffer = TrajectoryBuffer(tmp_path / "store")
    buffer.append([row(i, topic) for i, topic in enumerate(TOPICS)], stage="s", fingerprint="f")
    hits = buffer.search("fix the failing test", 1, embedder=str(tmp_path / "model"), method="dense")
    assert hits["task_id"].to_list() == ["bug"]
    with pytest.raises(StoreError, match="no sentence-transformers model"):
        buffer.search("x", embedder=str(tmp_path / "none"))
