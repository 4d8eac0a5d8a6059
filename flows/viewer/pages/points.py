"""The map: prompts of the search index as points, and the rows that a lasso takes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from agentrl.datastore.search.index import SearchIndex, State
from agentrl.datastore.search.projection import PrincipalPlane
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.refused import RefusedError
from agentrl.flows.viewer.wire.search import MapPrompt
from agentrl.statistics.intervals import wilson

CORNERS = 200
PROMPTS, PROMPT = 50, 300


@dataclass(frozen=True)
class Points:
    """``places`` [texts, 2] are those of ``texts``. ``frame`` names the plane that they lie in: it holds for as long as
    the index is not made anew, since prompts are only added to it. ``behind`` counts commits of the buffer that the
    index has not seen."""

    frame: str
    texts: list[str]
    places: np.ndarray
    behind: int

    def inside(self, corners: np.ndarray) -> np.ndarray:
        """Which points lie in a polygon [corners, 2], by the parity of the edges that a ray crosses; [texts]."""
        x, y = self.places[:, 0], self.places[:, 1]
        is_inside = np.zeros(len(x), dtype=bool)
        for (x1, y1), (x2, y2) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
            if y1 != y2:
                crosses = (y1 > y) != (y2 > y)
                is_inside ^= crosses & (x < (x2 - x1) * (y - y1) / (y2 - y1) + x1)
        return is_inside

    def rows_inside(self, corners: np.ndarray, snapshot: Snapshot) -> np.ndarray:
        """Which rows have a point in a polygon, [rows]."""
        inside: np.ndarray = np.append(self.inside(corners), False)[self.of_rows(snapshot)]  # -1 is the last one
        return inside

    def of_rows(self, snapshot: Snapshot) -> np.ndarray:
        """The number of each row's point, -1 if its prompt has none, [rows]."""
        key = f"points {self.frame} {len(self.texts)}"
        row_numbers = snapshot.kept.get_or(key, lambda: self._of_rows(snapshot))
        assert isinstance(row_numbers, np.ndarray)
        return row_numbers

    def _of_rows(self, snapshot: Snapshot) -> np.ndarray:
        kinds = {"prompt": pl.String, "point": pl.Int32}
        known = pl.DataFrame({"prompt": self.texts, "point": range(len(self.texts))}, kinds)
        rows = snapshot.columns(["prompt"]).join(known, on="prompt", how="left", maintain_order="left")
        return rows["point"].fill_null(-1).to_numpy()


def frame_of(state: State, frame: str | None) -> str:
    """The name of the plane that is asked for (default: that of all prompts of the index). Raises RefusedError if the
    index was made anew since it was named."""
    identity = hashlib.blake2b(state.embedder.encode(), digest_size=4).hexdigest()
    made, _, number = (frame or f"{identity}-{state.texts}").partition("-")
    fitted = int(number) if number.isascii() and number.isdigit() and len(number) < 12 else 0
    if made != identity or not 0 < fitted <= state.texts:
        reason = "the search index was made anew since this link was copied, so its map is another one"
        raise RefusedError(reason, field="lasso", following="open the map without a lasso", status=409)
    return f"{identity}-{fitted}"


def points(index: SearchIndex, state: State, frame: str) -> Points:
    """The points of an index, in the plane of a frame."""
    fitted = int(frame.partition("-")[2])
    plane = PrincipalPlane.fit((vectors for _, vectors in index.batches(state)), fitted)
    texts: list[str] = []
    places = []
    for some, vectors in index.batches(state):  # read twice, so that few of the vectors are in memory at once
        texts += some
        places.append(plane.places(vectors))
    return Points(frame, texts, np.concatenate(places), state.stale)


def lasso(text: str) -> tuple[str, np.ndarray]:
    """The frame and the corners [corners, 2] of ``FRAME:x,y;x,y;...``. Raises RefusedError if it is something else."""
    frame, _, rest = text.partition(":")
    try:
        corners = np.array([[float(coordinate) for coordinate in corner.split(",")] for corner in rest.split(";")])
    except ValueError:
        corners = np.zeros(0)
    if corners.ndim != 2 or corners.shape[1] != 2 or not 3 <= len(corners) <= CORNERS or not np.isfinite(corners).all():
        reason = f"{text[:80]!r} is no lasso of 3 to {CORNERS} corners"
        raise RefusedError(reason, field="lasso", allowed=["FRAME:x,y;x,y;x,y"])
    return frame, corners


def point_table(points_drawn: Points, snapshot: Snapshot, mask: np.ndarray | None) -> pa.Table:
    """A record for each point that has rows: its place, its rows in a mask, and how many of those with an outcome
    succeeded. ``unplaced`` of the metadata counts rows of the mask without a point."""
    numbers = points_drawn.of_rows(snapshot)
    counts = _counted(numbers, snapshot, mask, len(points_drawn.texts))
    there = np.bincount(numbers[numbers >= 0], minlength=len(points_drawn.texts)) > 0
    columns = {"x": points_drawn.places[:, 0], "y": points_drawn.places[:, 1], **counts}
    unplaced = int((numbers < 0).sum() if mask is None else (numbers[mask] < 0).sum())
    metadata = {
        "frame": points_drawn.frame,
        "version": snapshot.version,
        "behind": points_drawn.behind,
        "unplaced": unplaced,
    }
    table = pa.table({name: pa.array(values[there]) for name, values in columns.items()})
    return table.replace_schema_metadata({name: str(value) for name, value in metadata.items()})


def _counted(numbers: np.ndarray, snapshot: Snapshot, mask: np.ndarray | None, size: int) -> dict[str, np.ndarray]:
    """By point: rows of a mask; episodes with an outcome, and with a success, each by its first row."""
    columns = snapshot.columns(["success", "segment"])
    outcomes = columns["success"]
    chosen = numbers >= 0 if mask is None else mask & (numbers >= 0)
    episodes = chosen & (columns["segment"] == 0).to_numpy()
    kinds = {
        "rows": chosen,
        "scored": episodes & outcomes.is_not_null().to_numpy(),
        "solved": episodes & outcomes.fill_null(False).to_numpy(),
    }
    return {name: np.bincount(numbers[is_kind], minlength=size).astype(np.int32) for name, is_kind in kinds.items()}


def prompts(points_drawn: Points, snapshot: Snapshot, mask: np.ndarray | None) -> tuple[list[MapPrompt], int]:
    """The prompts with the most rows in a mask, and how many have any."""
    counts = _counted(points_drawn.of_rows(snapshot), snapshot, mask, len(points_drawn.texts))
    order = np.argsort(-counts["rows"], kind="stable")
    some = int((counts["rows"] > 0).sum())
    return [_prompt(points_drawn.texts[number], counts, int(number)) for number in order[: min(some, PROMPTS)]], some


def _prompt(text: str, counts: dict[str, np.ndarray], number: int) -> MapPrompt:
    rows, n, solved = (int(counts[name][number]) for name in ("rows", "scored", "solved"))
    low, high = wilson(solved, n) if n else (None, None)
    return MapPrompt(prompt=text[:PROMPT], rows=rows, solved=solved, n=n, low=low, high=high)


def placed(index: SearchIndex, state: State, names: Sequence[str]) -> tuple[pl.DataFrame, int]:
    """Scalar columns of the rows whose prompts the index holds, with ``projection_x`` and ``projection_y``, and how
    many rows it does not hold."""
    points_drawn = points(index, state, frame_of(state, None))
    kinds = {"projection_x": points_drawn.places[:, 0], "projection_y": points_drawn.places[:, 1]}
    known = pl.DataFrame({"prompt": points_drawn.texts, **kinds}, schema_overrides={"prompt": pl.String})
    rows = index.buffer.scan().select(names).collect()
    both = rows.join(known, on="prompt").sort("trajectory_id")
    return both, rows.height - both.height
