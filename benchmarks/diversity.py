"""What dividing ``diverse`` loses: ``core_sets`` against ``k_center``, and rows at random, on one set of vectors.

    python benchmarks/diversity.py [ROWS] [N]

Vectors are of prompts, by the embedder that curation fits (``embedded``), and of sequences of tools. Prompts are of
1,000 topics, of which a few have most rows and many have few. Distances are Euclidean, of unit vectors.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from agentrl.datastore.curation.diversity import core_sets, k_center, parts_of
from agentrl.datastore.curation.division import Division
from agentrl.datastore.curation.text import tool_vectors
from agentrl.datastore.search.embedding import LatentEmbedder
from agentrl.datastore.shards.divide import in_this_process
from agentrl.datastore.storage.object_store import LocalStorage

ROWS, N = 100_000, 1_000
TOPICS, TOOLS = 1_000, 30


def prompts(rows: int) -> list[str]:
    random = np.random.default_rng(0)
    topics = random.zipf(1.3, rows) % TOPICS
    words = random.integers(0, 20_000, (TOPICS, 60))
    common = random.zipf(1.3, (rows, 20)) % 20_000
    chosen = np.concatenate([words[topics[:, None], random.integers(0, 60, (rows, 12))], common], 1)
    lengths = random.integers(6, chosen.shape[1], rows)
    return [" ".join(f"w{word}" for word in line[:length]) for line, length in zip(chosen, lengths, strict=True)]


def sequences(rows: int) -> list[tuple[str, ...]]:
    """Distinct sequences of 1 to 20 calls; after each tool two others follow most often."""
    random = np.random.default_rng(0)
    after = random.integers(0, TOOLS, (TOOLS, 2))
    drawn = set[tuple[str, ...]]()
    while len(drawn) < rows:
        called = [int(random.integers(TOOLS))]
        for _ in range(int(random.integers(20))):
            called.append(int(random.choice(after[called[-1]]) if random.random() < 0.8 else random.integers(TOOLS)))
        drawn.add(tuple(f"tool{number}" for number in called))
    return sorted(drawn)


def apart(vectors: np.ndarray, taken: list[int]) -> np.ndarray:
    """The distance of each row from the nearest of those taken [rows]."""
    nearest = np.full(len(vectors), np.inf)
    for start in range(0, len(taken), 64):
        some = vectors[taken[start : start + 64]]
        squared = (vectors**2).sum(1)[:, None] + (some**2).sum(1) - 2 * vectors @ some.T
        nearest = np.minimum(nearest, squared.min(1))
    return np.sqrt(np.maximum(nearest, 0))


def compare(name: str, vectors: np.ndarray, n: int) -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, len(vectors), np.uint64)
    print(f"{name}: {len(vectors):,} vectors of {vectors.shape[1]} numbers, {n:,} are taken; "
          f"{parts_of(len(vectors), n)} parts")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        division = Division(LocalStorage(Path(folder)), [], Path(folder), Path(folder), in_this_process)
        ways = {
            "k_center": lambda: k_center(vectors, n),
            "core_sets": lambda: core_sets(vectors, keys, n, division),
            "at random": lambda: np.random.default_rng(0).choice(len(vectors), n, replace=False).tolist(),
        }
        radius = mean = 0.0
        for way, choose in ways.items():
            began = time.process_time()
            taken = choose()
            took, distances = time.process_time() - began, apart(vectors, taken)
            farthest, between = distances.max(), distances.mean()
            radius, mean = radius or farthest, mean or between
            print(f"  {way:<10} covering radius {farthest:.3f} ({farthest / radius - 1:+.1%}), mean distance "
                  f"{between:.3f} ({between / mean - 1:+.1%}), {took:.1f} CPU s", flush=True)  # fmt: skip


def main() -> None:
    rows, n = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (ROWS, N)
    texts = list(dict.fromkeys(prompts(rows)))
    compare("prompts", LatentEmbedder.fit(texts).encode(texts), n)
    compare("tools", tool_vectors(sequences(rows)), n)


if __name__ == "__main__":
    main()
