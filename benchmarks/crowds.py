"""How many rows of crowded buckets stay though a better row that stays is as similar as the threshold, by how many
others of a bucket each row is estimated against.

    python benchmarks/crowds.py          about two minutes

Rows are sets of 500 members, of templates of which some members are replaced. Truth is their Jaccard similarity.
"""

from collections.abc import Iterable

import numpy as np
import scipy.sparse

from agentrl.datastore.curation import candidates
from agentrl.datastore.curation.sketches import band_keys, bands, sketches

THRESHOLD, MEMBERS = 0.8, 500
RULES = ((16, 4, 24), (4, 2, 16), (2, 1, 16))
"""Best rows, neighbours on either side, and values by which rows are ordered."""


class Crowds:
    """Draws of rows, as arrays of members."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def new(self) -> np.ndarray:
        return self.random.integers(0, 2**63, MEMBERS)

    def changed(self, row: np.ndarray, least: int, most: int) -> np.ndarray:
        copy, count = row.copy(), int(self.random.integers(least, most))
        copy[self.random.choice(MEMBERS, count, replace=False)] = self.random.integers(0, 2**63, count)
        return copy

    def copies(self, rows: int, share: float, apart: int, least: int, most: int) -> list[np.ndarray]:
        """Rows of one template, of which a share are changed copies of others."""
        template, drawn = self.new(), list[np.ndarray]()
        for _ in range(rows):
            if drawn and self.random.random() < share:
                drawn.append(self.changed(drawn[self.random.integers(len(drawn))], least, most))
            else:
                drawn.append(self.changed(template, apart, apart + 1))
        return drawn

    def clusters(self, number: int, rows: int, apart: int, least: int, most: int) -> list[np.ndarray]:
        """Clusters of one template."""
        template = self.new()
        centers = [self.changed(template, apart, apart + 1) for _ in range(number)]
        return [self.changed(center, least, most) for center in centers for _ in range(rows)]

    def all(self) -> dict[str, list[np.ndarray]]:
        return {
            "copies of rows of three templates": [row for _ in range(3) for row in self.copies(1500, 0.2, 35, 5, 50)],
            "border copies of rows of one template": self.copies(4500, 0.25, 30, 20, 50),
            "loose clusters of two templates": [row for _ in range(2) for row in self.clusters(40, 50, 60, 15, 28)],
            "tight clusters of one template": self.clusters(60, 60, 32, 2, 12),
            "copies of eight texts": [row for _ in range(8) for row in self.copies(500, 0, 18, 0, 1)],
        }


def similar(rows: list[np.ndarray]) -> set[tuple[int, int]]:
    """The pairs of a row and a better one that are as similar as the threshold."""
    members = np.unique(np.concatenate(rows), return_inverse=True)[1]
    of_row = np.repeat(np.arange(len(rows)), MEMBERS)
    matrix = scipy.sparse.csr_matrix((np.ones(len(members), np.float32), (of_row, members)))
    shared = (matrix @ matrix.T).tocoo()
    alike = (shared.data / (2 * MEMBERS - shared.data) >= THRESHOLD) & (shared.row > shared.col)
    return set(zip(shared.row[alike].tolist(), shared.col[alike].tolist(), strict=True))


def chosen(values: np.ndarray) -> tuple[set[tuple[int, int]], int]:
    """The pairs that would be verified, and how many were estimated to be near, in all buckets."""
    keys = band_keys(values, np.zeros(len(values), np.uint64), *bands(THRESHOLD))
    entries = candidates.filed(keys, np.arange(len(values), dtype=np.uint64)).ravel()
    bucket, rows = candidates.shared(entries)
    marks, sizes = values.astype(np.uint8)[rows.astype(np.int64)], np.full((len(rows), 1), MEMBERS, np.uint32)
    near = np.concatenate(list(candidates.bucket_pairs(candidates.Entries(bucket, rows, marks, sizes), THRESHOLD)))
    pairs = candidates.unpacked(candidates.worth_it(near, THRESHOLD))
    return set(zip(pairs["row"].tolist(), pairs["better"].tolist(), strict=True)), len(near)


def dropped(pairs: Iterable[tuple[int, int]]) -> set[int]:
    gone = set[int]()
    for row, better in sorted(pairs):
        if better not in gone:
            gone.add(row)
    return gone


def main() -> None:
    crowds = Crowds(0)
    for name, rows in crowds.all().items():
        rows = [rows[number] for number in crowds.random.permutation(len(rows))]
        values, pairs = sketches([[row.astype(np.uint64)] for row in rows]), similar(rows)
        print(f"{name}: {len(rows):,} rows, {len(dropped(pairs)):,} to drop")
        for rule in RULES:
            candidates.LEADERS, candidates.NEIGHBOURS, candidates.ORDERED = rule
            compared, near = chosen(values)
            gone = dropped(compared & pairs)
            missed = {row for row, better in pairs if row not in gone and better not in gone}
            estimated = f"{near / len(rows):.0f} pairs a row near by estimate"
            print(f"  best {rule[0]:>2}, neighbours {rule[1]}: {len(missed):>5,} missed; {estimated}", flush=True)


if __name__ == "__main__":
    main()
