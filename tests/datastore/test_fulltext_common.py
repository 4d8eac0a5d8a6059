"""Words that very many rows hold: bits of rows and pairs of words answer as the words themselves do."""

import itertools
import random
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from store_rows import FP, build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.search import common, text_index, words
from agentrl.datastore.search.common import Common
from agentrl.datastore.upkeep import compact
from agentrl.schemas.trajectory import Trajectory

pytest.importorskip("tantivy")
WORDS = ["the", "of", "Café", "user_id", "東京", "rare"]


def said(number: int, chance: random.Random) -> Trajectory:
    """A row whose last answer is of words, the first of which are in most rows."""
    weights = [30, 20, 10, 8, 4, 0.5]
    content = " ".join(chance.choices(WORDS, weights, k=8)) + ("." if number % 2 else "…")
    plain = build(number)
    return build(number, messages=[*plain.messages[:-1], plain.messages[-1].model_copy(update={"content": content})])


def filled(folder: Path, shards: range, seed: int = 0) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(folder)
    for shard in shards:
        chance = random.Random(f"{seed} {shard}")
        rows = [said(shard * 12 + row, chance) for row in range(12)]
        buffer.append(rows, stage="rollout", fingerprint=FP, shard=shard)
    return buffer


def asked() -> list[str]:
    """Words, phrases of two and three, and what must not be there."""
    pairs = [f'"{first} {second}"' for first, second in itertools.product(WORDS, WORDS[:3])]
    mixed = [f'{word} -"{other} the"' for word, other in itertools.product(WORDS, WORDS[:2])]
    return [*WORDS, *pairs, *mixed, '"the of the"', "the of -rare -東京", "rare the -of", "nowhere -the", "the -the"]


def answers(buffer: TrajectoryBuffer) -> dict[str, list[str]]:
    return {text: sorted(buffer.text.ids(text)) for text in asked()}


@pytest.mark.parametrize("paired", [3, 96])
def test_common_words_are_found_as_by_the_words_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paired: int
) -> None:
    buffer = filled(tmp_path / "store", range(5))
    plain = answers(buffer), sorted(buffer.text.ids("the -of", 2))
    phrase = set(buffer.search('"of the"', 99, method="text")["trajectory_id"])
    assert not buffer.text.index.over({}).bits.common.chosen
    monkeypatch.setattr(text_index, "COMMON_FROM", 50)
    monkeypatch.setattr(common, "PAIRED", paired)
    buffer.text.refresh(rebuild=True)
    chosen = buffer.text.index.over({}).bits.common
    assert {"the", "of"} <= set(chosen.words)
    assert ("the", "the") in chosen.pairs
    assert "rare" not in chosen.words
    assert (answers(buffer), sorted(buffer.text.ids("the -of", 2))) == plain
    assert set(buffer.search('"of the"', 99, method="text")["trajectory_id"]) == phrase
    assert len({len(ids) for ids in plain[0].values()}) > 10


def test_bits_answer_what_common_words_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tantivy is not asked at all, so that no row becomes an object of Python."""
    monkeypatch.setattr(text_index, "COMMON_FROM", 10)
    buffer = filled(tmp_path, range(2))
    before = [sorted(buffer.text.ids(text)) for text in ("the", '"the the"', "the -of")]
    held = buffer.text.index.over({})
    buffer.text.index._held = held._replace(searcher=None)
    assert [sorted(buffer.text.ids(text)) for text in ("the", '"the the"', "the -of")] == before
    assert 0 < len(before[1]) < len(before[0]) <= 24


def test_an_index_that_grows_is_built_anew_once_to_know_its_common_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_index, "COMMON_FROM", 30)
    buffer = filled(tmp_path, range(2))
    few = sorted(buffer.text.ids("the"))
    assert not buffer.text.index.over({}).bits.common.chosen
    filled(tmp_path, range(2, 3))
    assert buffer.text.lacking() == 36, "all rows are read again"
    assert set(few) < set(buffer.text.ids("the"))
    assert buffer.text.index.over({}).bits.common.words
    filled(tmp_path, range(3, 4))
    assert buffer.text.lacking() == 12, "and then only new ones"


@pytest.mark.parametrize("damage", ["torn", "of other rows", "choice gone", "choice torn"])
def test_damaged_bits_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr(text_index, "COMMON_FROM", 10)
    buffer = filled(tmp_path, range(2))
    plain = sorted(buffer.text.ids("the"))
    folder = buffer.text.index.folder
    [*_, bits] = folder.glob("*.npy")
    if damage == "torn":
        bits.write_bytes(bits.read_bytes()[:40])
    elif damage == "of other rows":
        np.save(bits, np.zeros((2, 1), np.uint8))
    elif damage == "choice torn":
        (folder / common.FILE).write_text('{"words": ["the"]}')
    else:
        (folder / common.FILE).unlink()
    assert sorted(TrajectoryBuffer(tmp_path).text.ids("the")) == plain
    assert len(list(folder.glob("*.npy"))) == 2


def test_bits_of_files_that_left_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "COMMON_FROM", 10)
    buffer = filled(tmp_path, range(3))
    plain = sorted(buffer.text.ids("the"))
    compact(buffer)
    assert sorted(buffer.text.ids("the")) == plain
    assert len(list(buffer.text.index.folder.glob("*.npy"))) == 1


def test_marks_keep_texts_and_rows_apart() -> None:
    rows = [["a b", "c a"], [], ["b b b"], ["c", "x"]]
    chosen = Common(("a", "b", "c"), (("a", "b"), ("b", "b")), chosen=True)
    bits, pairs = chosen.marks(rows)
    assert bits.astype(int).tolist() == [[1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0]]
    both = chosen.pair("b", "b")
    assert pairs == [f"{chosen.pair('a', 'b')} {chosen.pair('c', 'a')}", "", f"{both} {both}", ""]
    assert chosen.pair("a", "x") is None


def test_texts_of_ascii_are_cut_into_the_words_of_all_others() -> None:
    every = "".join(map(chr, range(128))) + " User_ID 3.14 don't"
    assert words.plain(every).split() == words.analyzer(2**20).analyze(every)
    assert words.plain("Café (東京)").split() == ["cafe", "東", "京"]
    assert pl.Series(words.terms("Café")).to_list() == words.of_plain().analyze(words.plain("Café"))
