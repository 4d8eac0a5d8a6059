"""Which rows the rules of duplicates drop, against similarities that are computed here from sets of words."""

import re
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from store_rows import build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation import candidates, duplicates
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.odd_sketches import most_similar, odd_sketches
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.curation.shingles import ngrams
from agentrl.datastore.curation.sketches import VALUES, bands, jaccard, sketches
from agentrl.datastore.errors import StoreError
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

THRESHOLD = 0.8


def grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + 3]) for start in range(max(1, len(words) - 2))} if words else set()


def similarity(first_text: str, second_text: str) -> float:
    first, second = grams(first_text), grams(second_text)
    return len(first & second) / len(first | second) if first | second else 1.0


def changed(words: list[str], edits: int, random: np.random.Generator) -> list[str]:
    copy = list(words)
    for start in random.choice(len(copy), edits, replace=False).tolist():
        copy[start] = f"new{random.integers(10**9)}"
    return copy


def planted(seed: int) -> list[list[str]]:
    """Families of texts of 200 words: originals with copies on both sides of the threshold, and texts from one template
    whose pairs lie just below it."""
    random = np.random.default_rng(seed)
    families = []
    for _ in range(60):
        original = [f"w{number}" for number in random.integers(0, 5000, 200)]
        families.append([original, *(changed(original, edits, random) for edits in (1, 3, 5, 6, 7, 8, 9, 10, 12))])
    template = [f"t{number}" for number in range(200)]
    families.append([changed(template, 5, random) for _ in range(80)])
    return [[" ".join(words) for words in family] for family in families]


def spoken(number: int, text: str, task: str = "t", **fields: Any) -> Trajectory:
    messages = [Message(role=Role.USER, content="q"), Message(role=Role.ASSISTANT, content=text)]
    values = {"task_id": task, "prompt": "q", "reward": 1.0, "messages": messages} | fields
    return build(number, input_ids=[], action_mask=[], logprobs=[], n_tokens=number, **values)


def dropped(folder: Path, rows: list[Trajectory], threshold: float = THRESHOLD, scope: str = "all") -> np.ndarray:
    """Whether each row is dropped; rows come from best to worst."""
    buffer = TrajectoryBuffer(folder)
    buffer.append(rows, stage="rollout", fingerprint="f")
    rule = {"rule": "near_duplicates", "scope": scope, "threshold": threshold}
    kept = curate(buffer, Rules.model_validate({"rules": [rule]}).rules).ids.to_pylist()
    return ~np.isin([row.trajectory_id for row in rows], kept)


@pytest.mark.parametrize("seed", range(2))
def test_no_row_is_dropped_that_resembles_none_that_is_left(tmp_path: Path, seed: int) -> None:
    families = planted(seed)
    texts = [text for family in families for text in family]
    order = np.random.default_rng(seed).permutation(len(texts))
    doubled = np.zeros(len(texts), bool)
    doubled[order] = dropped(tmp_path, [spoken(rank, texts[number]) for rank, number in enumerate(order)])
    first, wrong, missed = 0, [], 0
    for family in families:
        sets, gone = [grams(text) for text in family], doubled[first : first + len(family)]
        for row, own in enumerate(sets):
            kept = [other for number, other in enumerate(sets) if not gone[number] and number != row]
            alike = any(len(own & other) >= THRESHOLD * len(own | other) for other in kept)
            wrong += [first + row] if gone[row] and not alike else []
            missed += alike and not gone[row]
        first += len(family)
    assert wrong == []
    assert doubled.sum() > 200
    assert missed <= 0.03 * len(texts), "pairs above the threshold are found nearly always"


def test_of_a_crowd_of_like_rows_the_best_is_left(tmp_path: Path) -> None:
    """Copies of one text that differ little, and copies of another one whose pairs lie about the threshold."""
    random = np.random.default_rng(0)
    like, unlike = ([f"{name}{number}" for number in range(200)] for name in "ab")
    texts = [changed(like, 2, random) for _ in range(500)] + [changed(unlike, 9, random) for _ in range(300)]
    rows = [spoken(number, " ".join(words)) for number, words in enumerate(texts)]
    doubled = dropped(tmp_path, rows)
    assert not doubled[0]
    assert doubled[1:500].mean() > 0.99
    sets = [grams(row.messages[1].content) for row in rows[500:]]
    left = [own for own, gone in zip(sets, doubled[500:], strict=True) if not gone]
    for own in (own for own, gone in zip(sets, doubled[500:], strict=True) if gone):
        assert any(len(own & other) >= THRESHOLD * len(own | other) for other in left)


def test_the_bands_find_pairs_at_the_threshold() -> None:
    for threshold in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0):
        number, width = bands(threshold)
        assert number * width <= VALUES
        assert 1 - (1 - threshold**width) ** number >= 0.95


def test_what_is_worth_a_comparison_is_the_same_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random, better_rows = np.random.default_rng(0), defaultdict(set)
    row, better = random.integers(0, 200, 8000) * 2**20, random.integers(0, 2**candidates.BITS, 8000)
    equal = random.integers(90, 112, 8000)
    pairs = candidates.packed(*(values.astype(np.uint64) for values in (row, better, equal)))
    pairs = np.concatenate([pairs, pairs[::2]])
    for own, other, alike in zip(row.tolist(), better.tolist(), equal.tolist(), strict=True):
        better_rows[own].add((VALUES - alike, other))
    expected = set()
    for own, others in better_rows.items():
        likely = [other for other in others if VALUES - other[0] >= VALUES * THRESHOLD]
        wanted = {*sorted(others)[: candidates.COMPARED], min(likely, key=lambda other: other[1])}
        expected |= {(own, other) for _, other in wanted}
    whole = candidates.worth_it(pairs, THRESHOLD)
    records = candidates.unpacked(whole)
    assert set(records.tolist()) == expected
    assert len(whole) == len(expected)
    assert (np.diff(records["row"].astype(np.int64)) >= 0).all()
    half = candidates.worth_it(pairs[:5000], THRESHOLD)
    assert (candidates.worth_it(np.concatenate([pairs[5000:], half]), THRESHOLD) == whole).all()
    parts = [np.sort(pairs[start::3]) for start in range(3)] + [pairs[:0]]
    for number, part in enumerate(parts):
        np.save(tmp_path / f"{number}.npy", part)
    paths = [tmp_path / f"{number}.npy" for number in range(len(parts))]
    for at_once in (500, 2**20):
        monkeypatch.setattr(duplicates, "PAIRS_AT_ONCE", at_once)
        assert (duplicates._of_parts(paths, 200 * 2**20, THRESHOLD) == records).all()


def test_numbers_are_sorted_alike_with_and_without_polars(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(0).integers(0, 2**64, 5000, np.uint64)
    numbers[::7] = numbers[0]
    by_polars = candidates.ascending(numbers)
    monkeypatch.delitem(sys.modules, "polars")
    assert (candidates.ascending(numbers) == by_polars).all()
    assert (by_polars == np.sort(numbers)).all()


def test_more_rows_than_pairs_can_number_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "BITS", 1)
    with pytest.raises(StoreError, match="near_duplicates compares 2 rows at most at once, and 3 are left"):
        dropped(tmp_path, [spoken(number, "a b c d") for number in range(3)])


def words_of(text: list[str]) -> str:
    return " ".join(text)


texts_of_few_words = st.lists(st.sampled_from("abcd"), max_size=12).map(words_of)


@settings(max_examples=200, deadline=None)
@given(texts_of_few_words, texts_of_few_words)
def test_hashes_give_the_similarity_of_the_words(text: str, other: str) -> None:
    assert jaccard(ngrams(text, 3), ngrams(other, 3)) == pytest.approx(similarity(text, other))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(texts_of_few_words, st.sampled_from("xy")), max_size=12), st.sampled_from([0.3, 0.6, 1.0]))
def test_few_texts_of_any_kind(rows: list[tuple[str, str]], threshold: float) -> None:
    texts, scopes = [text for text, _ in rows], [scope for _, scope in rows]
    with TemporaryDirectory() as folder:
        given_rows = [spoken(number, *row) for number, row in enumerate(rows)]
        doubled = dropped(Path(folder), given_rows, threshold, "task") if rows else np.zeros(0, bool)
    for row in np.flatnonzero(doubled).tolist():
        before = [other for other in range(row) if not doubled[other] and scopes[other] == scopes[row]]
        assert any(similarity(texts[row], texts[other]) >= threshold for other in before)
    if threshold == 1:
        assert len(set(zip(map(frozenset, map(grams, texts)), scopes, strict=True))) == (~doubled).sum()


@pytest.mark.parametrize(("size", "alike"), [(3, 1 / 3), (40, 0.8), (700, 0.8), (700, 0.5)])
def test_sketches_estimate_the_similarity(size: int, alike: float) -> None:
    random, pairs, exact = np.random.default_rng(size), [], []
    for _ in range(300):
        members, shared = random.integers(0, 2**64, size, np.uint64), round(size * alike)
        cut = shared + (size - shared) // 2
        pairs += [[members[:cut]], [np.concatenate([members[:shared], members[cut:]])]]
        exact.append(shared / size)
    values = sketches(pairs)
    assert (values[:2] == sketches(pairs[:2])).all(), "a sketch does not depend on other rows"
    errors = (values[::2] == values[1::2]).mean(1) - exact
    spread = (alike * (1 - alike) / VALUES) ** 0.5
    assert abs(np.mean(errors)) < 4 * spread / 300**0.5
    assert np.std(errors) < 1.15 * spread


LONG = "look at the list of orders then open the one with the wrong price and send it back to the store at once"


def asked(number: int, question: str, answer: str, **fields: Any) -> Trajectory:
    call = ToolCall(id="1", name="send", arguments='{"b": 1, "a": 2}')
    messages = [
        Message(role=Role.USER, content=question),
        Message(role=Role.ASSISTANT, content=answer, reasoning=f"thought {number}", tool_calls=[call]),
        Message(role=Role.TOOL, content=f"sent {number}", tool_call_id="1"),
    ]
    values = {"task_id": f"t{number}", "prompt": question, "messages": messages, "reward": 1.0} | fields
    return build(number, input_ids=[], action_mask=[], logprobs=[], **values)


def left(folder: Path, rows: list[Trajectory], rule: dict[str, Any]) -> list[int]:
    buffer = TrajectoryBuffer(folder)
    buffer.append(rows, stage="rollout", fingerprint="f")
    rules = Rules.model_validate({"rules": [{"scope": "all"} | rule]}).rules
    return [int(name[-6:]) for name in curate(buffer, rules).ids.to_pylist()]


@pytest.mark.parametrize("rule", ["exact_duplicates", "near_duplicates"])
def test_equal_actions_for_other_questions_are_no_duplicates(tmp_path: Path, rule: str) -> None:
    rows = [
        asked(0, "send order 17 back", LONG),
        asked(1, "send order 18 back", LONG),
        asked(2, "send order 17 back", LONG),
        asked(3, "send order 17 back", "no"),
    ]
    assert left(tmp_path / "1", rows, {"rule": rule}) == [0, 1, 3]
    assert left(tmp_path / "2", rows, {"rule": rule, "compare": ["actions"]}) == [0, 3]
    assert left(tmp_path / "3", rows, {"rule": rule, "compare": ["question"]}) == [0, 1]
    assert left(tmp_path / "4", rows, {"rule": rule, "compare": ["question", "actions", "reasoning"]}) == [0, 1, 2, 3]
    assert left(tmp_path / "5", rows, {"rule": rule, "compare": ["actions", "observations"]}) == [0, 1, 2, 3]


@pytest.mark.parametrize("rule", ["exact_duplicates", "near_duplicates"])
def test_what_users_say_later_and_first_messages_without_a_prompt_are_questions(tmp_path: Path, rule: str) -> None:
    later = [Message(role=Role.USER, content="and order 19 too"), Message(role=Role.ASSISTANT, content="done")]
    rows = [
        asked(0, "send order 17 back", LONG, prompt=""),
        asked(1, "send order 18 back", LONG, prompt=""),
        asked(2, "send order 17 back", LONG),
    ]
    rows += [row.model_copy(update={"messages": [*row.messages, *later]}) for row in [asked(3, "hello", LONG)]]
    other = [later[0].model_copy(update={"content": "and order 20 too"}), later[1]]
    rows += [row.model_copy(update={"messages": [*row.messages, *other]}) for row in [asked(4, "hello", LONG)]]
    assert left(tmp_path, rows, {"rule": rule}) == [0, 1, 3, 4]


@pytest.mark.parametrize("compare", [[], ["question", "question"], ["prompt"]])
def test_parts_are_named_once(compare: list[str]) -> None:
    with pytest.raises(ValidationError, match="compare"):
        Rules.model_validate({"rules": [{"rule": "near_duplicates", "compare": compare}]})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.sets(st.integers(0, 2**64 - 1), max_size=200)] * 2), min_size=2, max_size=6), st.data())
def test_no_pair_is_more_similar_than_its_odd_sketches_say(
    rows: list[tuple[set[int], ...]], data: st.DataObject
) -> None:
    for row, parts in enumerate(rows[1:]):  # rows that have something in common
        shared = data.draw(st.integers(0, 200))
        rows[row + 1] = tuple({*sorted(rows[0][part])[:shared], *list(own)[:9]} for part, own in enumerate(parts))
    sets = [np.array(sorted(part), np.uint64) for parts in rows for part in parts]
    odd, sizes = odd_sketches(sets, 2), np.array([list(map(len, parts)) for parts in rows])
    first, other = np.tril_indices(len(rows), -1)
    starts = odd.offsets.to_numpy()
    most = most_similar(odd.values.to_numpy(), starts[first], starts[other], sizes[first], sizes[other])
    for bound, own, its in zip(most.tolist(), first.tolist(), other.tolist(), strict=True):
        assert min(jaccard(sets[2 * own + part], sets[2 * its + part]) for part in (0, 1)) <= bound <= 1


def test_pairs_of_a_template_are_ruled_out_without_text() -> None:
    """Of 500 to 5,000 members, at a similarity of .755."""
    random = np.random.default_rng(0)
    for size in (500, 5000):
        common, own = round(size * 0.86), size - round(size * 0.86)
        drawn = random.integers(0, 2**64, (50, own), np.uint64)
        template = random.integers(0, 2**64, common, np.uint64)
        odd = odd_sketches([np.concatenate([template, values]) for values in drawn], 1)
        first, other = np.tril_indices(50, -1)
        starts, sizes = odd.offsets.to_numpy(), np.full((50, 1), size)
        most = most_similar(odd.values.to_numpy(), starts[first], starts[other], sizes[first], sizes[other])
        assert (most >= common / (size + own)).all()
        assert (most < 0.8).mean() > 0.95
