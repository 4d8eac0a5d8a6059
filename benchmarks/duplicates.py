"""What ``near_duplicates`` costs, which pairs it finds, and which rows it drops wrongly, against the similarity itself.

    python benchmarks/duplicates.py [ROWS] [THRESHOLD]

Of the rows, 10 % are near duplicates of others (2 to 12 words differ), 3 % are at the border (16 to 28 words differ),
and 15 % are calls from 40 templates, of which no two are as similar as the threshold. Actions have about 500 words.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory, trajectory_id

WORDS = 500
TEMPLATES = 40


class Planted:
    """The text of each row, and the row of which it is a changed copy (-1: of none), or its template (-1: of none)."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        vocabulary = np.array([f"w{number}" for number in range(20_000)])

        def drawn(size: int) -> str:
            return " ".join(vocabulary[random.zipf(1.3, size) % len(vocabulary)])

        self.texts: list[str] = []
        self.copy_of, self.template = np.full((2, rows), -1)
        templates = [drawn(WORDS) for _ in range(TEMPLATES)]
        originals: list[int] = []
        for row, kind in enumerate(random.choice(4, rows, p=[0.72, 0.10, 0.03, 0.15]).tolist()):
            if kind == 3:
                self.template[row] = random.integers(TEMPLATES)
                self.texts.append(changed(templates[self.template[row]], 12, row, random))
            elif kind == 0 or not originals:
                originals.append(row)
                self.texts.append(drawn(int(random.integers(WORDS // 2, WORDS * 3 // 2))))
            else:
                self.copy_of[row] = originals[random.integers(len(originals))]
                edits = int(random.integers(2, 13) if kind == 1 else random.integers(16, 29))
                self.texts.append(changed(self.texts[self.copy_of[row]], edits, row, random))

    def trajectories(self) -> Iterator[Trajectory]:
        for row, text in enumerate(self.texts):
            call = ToolCall(id="c", name="write", arguments=json.dumps({"text": text}))
            message = Message(role=Role.ASSISTANT, content=text)
            if self.template[row] >= 0:
                message = Message(role=Role.ASSISTANT, tool_calls=[call])
            yield Trajectory(
                trajectory_id=trajectory_id("bench", "0" * 8, row), episode_id=str(row), task_id=f"t{row}",
                source="model", env="bench", split="train", prompt="?", reward=float(row % 2), success=bool(row % 2),
                termination="answered", messages=[Message(role=Role.USER, content="?"), message],
            )  # fmt: skip

    def similarity(self, row: int, other: int) -> float:
        """The Jaccard similarity of the word 3-grams of two rows."""
        first, two = self._grams(row), self._grams(other)
        return len(first & two) / len(first | two)

    def _grams(self, row: int) -> set[tuple[str, ...]]:
        words = [*(["write", "text"] if self.template[row] >= 0 else []), *self.texts[row].split()]
        return set(zip(words, words[1:], words[2:], strict=False))

    def family(self, row: int) -> np.ndarray:
        """The rows that could be like this one: copies of the same row and that one, or rows of the same template."""
        if self.template[row] >= 0:
            return np.flatnonzero(self.template == self.template[row])
        original = self.copy_of[row] if self.copy_of[row] >= 0 else row
        return np.append(np.flatnonzero(self.copy_of == original), original)


def changed(text: str, edits: int, row: int, random: np.random.Generator) -> str:
    """A text of which some words are replaced by words that no other row has."""
    words = text.split()
    for position in random.choice(len(words), edits, replace=False).tolist():
        words[position] = f"r{row}p{position}"
    return " ".join(words)


def judge(planted: Planted, kept: np.ndarray, threshold: float) -> None:
    """Print which pairs were found, and how many rows were dropped though no row that is left is as similar."""
    pairs = [(row, int(other)) for row, other in enumerate(planted.copy_of) if other >= 0]
    exact = np.array([planted.similarity(*pair) for pair in pairs])
    result = np.array([not (kept[row] and kept[other]) for row, other in pairs])
    for low, high in pairwise([threshold, threshold + 0.05, threshold + 0.1, 1.01]):
        inside = (exact >= low) & (exact < high)
        share = result[inside].mean() if inside.any() else np.nan
        print(f"pairs at {low:.2f} to {min(high, 1):.2f}: {result[inside].sum()} of {inside.sum()} found, {share:.3f}")
    dropped = np.flatnonzero(~kept)
    right = [
        any(planted.similarity(row, other) >= threshold for other in planted.family(row) if kept[other])
        for row in dropped.tolist()
    ]
    wrong = dropped[~np.array(right, dtype=bool)]
    print(f"{len(dropped)} rows dropped, {len(wrong)} wrongly, {(planted.template[wrong] >= 0).sum()} from templates")


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    threshold = float(sys.argv[2]) if len(sys.argv) > 2 else 0.8
    planted = Planted(rows)
    with tempfile.TemporaryDirectory() as folder:
        buffer = TrajectoryBuffer(folder)
        buffer.append(planted.trajectories(), stage="bench", fingerprint="bench")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rules = Rules.model_validate({"rules": [{"rule": "near_duplicates", "threshold": threshold, "scope": "all"}]})
        start, wall = time.process_time(), time.perf_counter()
        ids = curate(buffer, rules.rules).ids.to_pylist()
        took, wall = time.process_time() - start, time.perf_counter() - wall
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kept = np.zeros(rows, dtype=bool)
    kept[[int(name[-6:]) for name in ids]] = True
    print(f"{rows} rows: {took:.1f} CPU s, {wall:.1f} s, {rows / took:.0f} rows per CPU s; "
          f"peak memory {before:.0f} MB before, {after:.0f} MB after")  # fmt: skip
    judge(planted, kept, threshold)


if __name__ == "__main__":
    main()
