"""Full text: how long a search takes, and how large its index is.

    python benchmarks/fulltext.py                 100,000 rows of about 500 tokens
    SCALE=small python benchmarks/fulltext.py     5,000 rows
    ROWS=1000000 python benchmarks/fulltext.py    as many as the target names: half an hour, 4 GB of disk (or
                                                  ROWS=1000000 make bench-cut, with all other figures)

Words of the messages are drawn by Zipf's law from 200,000, and each row holds an order number of its own. Times are
medians in one process with the index open, as in a server or a notebook; data are the table's files.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from buffer_data import make

from agentrl.datastore import TrajectoryBuffer

SMALL = os.environ.get("SCALE") == "small"  # words that few rows hold make an index of few rows large
ROWS = int(os.environ.get("ROWS", 5_000 if SMALL else 100_000))
CHUNK = 5_000
VOCABULARY, EXPONENT = 200_000, 1.05
WORDS_PER_TOKEN = 0.75
LIMIT_MS, LIMIT_SHARE = 100, 0.40
missed: list[str] = []


def words(random: np.random.Generator) -> np.ndarray:
    """Words of 2 to 11 letters, each once."""
    letters = random.choice(list("etaoinshrdlucmfwypvbgk"), size=(VOCABULARY, 8), p=_frequencies(22))
    texts = ["".join(row[: 2 + number % 7]) for number, row in enumerate(letters)]
    return np.array([f"{text}{_base(number)}" for number, text in enumerate(texts)], dtype=object)


def _frequencies(count: int) -> np.ndarray:
    weights = 1 / np.arange(1, count + 1) ** 0.7
    return weights / weights.sum()


def _base(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 26)
        digits += chr(97 + digit)
    return digits


def rows(first: int, vocabulary: np.ndarray) -> pa.Table:
    """Rows of :func:`make` with these words in place of its own."""
    table, random = make(CHUNK, first), np.random.default_rng(first)
    weights = 1 / np.arange(1, VOCABULARY + 1) ** EXPONENT
    share = weights / weights.sum()
    messages = table["messages"].combine_chunks()
    flat = messages.flatten()
    spans = flat.field("token_end").to_numpy() - flat.field("token_start").to_numpy()
    lengths = np.maximum(1, (spans * WORDS_PER_TOKEN).astype(int))
    drawn = vocabulary[random.choice(VOCABULARY, int(lengths.sum()), p=share)]
    ends = lengths.cumsum()
    contents = [" ".join(drawn[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    per_row = len(contents) // CHUNK
    for row in range(CHUNK):
        contents[row * per_row] += f" order {first + row:07d}."
    fields = {field.name: flat.field(field.name) for field in flat.type} | {"content": pa.array(contents)}
    said_by = pa.StructArray.from_arrays(list(fields.values()), fields=list(flat.type))
    told = pa.ListArray.from_arrays(messages.offsets, said_by).cast(messages.type)
    return table.set_column(table.schema.get_field_index("messages"), table.schema.field("messages"), told)


def measured(figure: str, action: Callable[[], Any], runs: int = 7) -> None:
    """Print the medians of wall time and of processor time, which a busy machine does not lengthen."""
    walls, processors = [], []
    for _ in range(runs):
        started, worked = time.perf_counter(), time.process_time()
        action()
        walls.append(time.perf_counter() - started)
        processors.append(time.process_time() - worked)
    line(figure, sorted(walls)[runs // 2] * 1000, "ms", LIMIT_MS)
    line(f"  {figure.strip()}, processor time", sorted(processors)[runs // 2] * 1000, "ms")


def line(figure: str, value: float, unit: str, target: float | None = None) -> None:
    verdict = "" if target is None else f" (target below {target:g} {unit}): {'met' if value < target else 'MISSED'}"
    if target is not None and value >= target:
        missed.append(figure.strip())
    print(f"{figure}: {value:,.1f} {unit}{verdict}", flush=True)


def main() -> None:
    vocabulary = words(np.random.default_rng(0))
    with tempfile.TemporaryDirectory() as folder:
        buffer = TrajectoryBuffer(folder)
        for first in range(0, ROWS, CHUNK):
            buffer.append(rows(first, vocabulary), stage="rollout", fingerprint="a" * 32, shard=first)
        data = buffer.stats()["bytes"]
        started, cpu = time.perf_counter(), time.process_time()
        state = buffer.text.refresh()
        line(f"{ROWS:,} rows are indexed: wall time", time.perf_counter() - started, "s")
        line("the same, processor time", time.process_time() - cpu, "s")
        line("memory of the process then", psutil.Process().memory_info().rss / 2**20, "MiB")
        line("data", data / 2**20, "MiB")
        line("index, of the data", 100 * state.bytes / data, "%", None if ROWS < 100_000 else 100 * LIMIT_SHARE)
        ask(buffer, vocabulary)


def ask(buffer: TrajectoryBuffer, vocabulary: np.ndarray) -> None:
    """Ask for words and phrases, rare and common."""
    middle = [str(vocabulary[number]) for number in (300, 2_000, 20_000)]
    questions = {
        "an order number": f"{ROWS // 2:07d}",
        "a rare word": middle[2],
        "three words": " ".join(middle),
        "a word of half of the rows": str(vocabulary[40]),
        "a phrase": f'"order {ROWS // 3:07d}"',
        "a phrase of a common and a rare word": f'"{vocabulary[0]} {middle[1]}"',
        "a phrase of common words": f'"{vocabulary[5]} {vocabulary[9]}"',
        "a phrase of the most common words": f'"{vocabulary[0]} {vocabulary[1]}"',
        "the most common word": str(vocabulary[0]),
    }
    for name, text in questions.items():
        count = len(buffer.text.ids(text))
        measured(f"best 5 for {name} ({count:,} rows)", lambda t=text: buffer.text.search(t))
        measured("  ids of all of them", lambda t=text: buffer.text.ids(t))


if __name__ == "__main__":
    main()
