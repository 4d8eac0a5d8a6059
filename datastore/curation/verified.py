"""Similarities of pairs of rows that were computed before. Rows never change, so neither does what is kept here. It is
kept in segments, which are merged as they grow; all of them can be deleted at any time."""

import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np

from agentrl.datastore.shards.shard import save_array

SEGMENTS = 8
"""Segments from which on they are merged into one."""
_KIND = np.dtype([("row", np.uint64), ("better", np.uint64), ("similar", np.float64)])


class Verified:
    """The similarities that are kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, rows: np.ndarray, better: np.ndarray) -> np.ndarray:
        """The similarity of each pair, by the keys of its rows, uint64 [pairs]; NaN if it is not known."""
        similar = np.full(len(rows), np.nan)
        for path in sorted(self._folder.glob("*.npy")):
            with suppress(OSError, ValueError):  # another curation merged it meanwhile, or it is not whole
                known = np.load(path, mmap_mode="r")
                first, end = np.searchsorted(known["row"], rows), np.searchsorted(known["row"], rows, "right")
                while (open_pairs := np.flatnonzero(first < end)).size:
                    match = known["better"][first[open_pairs]] == better[open_pairs]
                    similar[open_pairs[match]] = known["similar"][first[open_pairs[match]]]
                    first[open_pairs] += 1
        return similar

    def add(self, rows: np.ndarray, better: np.ndarray, similar: np.ndarray) -> None:
        """Keep similarities. A disk that takes no more is no error: what is kept only saves time."""
        new = np.empty(len(rows), _KIND)
        new["row"], new["better"], new["similar"] = rows, better, similar
        segments = sorted(self._folder.glob("*.npy"))
        merged = segments if len(segments) >= SEGMENTS else []
        parts = [new]
        with suppress(OSError, ValueError):
            parts += [np.load(path) for path in merged]
            together = np.concatenate(parts)
            by_row = together[np.argsort(together["row"], kind="stable")]
            save_array(self._folder / f"{uuid.uuid4().hex}.npy", by_row)
            for path in merged:
                path.unlink(missing_ok=True)
