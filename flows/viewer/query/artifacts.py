"""Artifacts of a store by what a row says of them: what made it, what sampled it, and what learned from it."""

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.query.tables import Recent
from agentrl.pipelines.results.learned import TrainedOn, learned_by
from agentrl.schemas.manifest import Manifest

FRESH_S = 5.0
"""Seconds for which the list of artifacts is believed."""
CANDIDATES = 16
"""Training rows of one artifact that are compared with a row's tokens: pairs train on many sides that begin alike."""

TrainingScalars = dict[str, pa.Scalar]
"""A training row by column."""


@dataclass(frozen=True)
class LearnedTokens:
    """An artifact that learned from a row: its training rows of the row's tokens, the last first, each with the tokens
    that it trains on, [tokens]. There are none if its training rows have other tokens than the row."""

    learned: TrainedOn
    rows: list[tuple[TrainingScalars, np.ndarray]]

    @property
    def mask(self) -> np.ndarray | None:
        """Tokens that any of them trains on."""
        return np.logical_or.reduce([mask for _, mask in self.rows]) if self.rows else None

    def values(self, column: str) -> np.ndarray | None:
        """A column of the training rows by the row's tokens, each from the last one that trains on it; NaN where none
        does. None if none of them has the column."""
        lens = None
        for row, mask in self.rows:
            own = numbers(row[column], np.float32) if column in row else np.zeros(0, np.float32)
            if not len(own):
                continue
            lens = np.full(len(mask), np.nan, np.float32) if lens is None else lens
            places = np.flatnonzero(mask[: len(own)] & np.isnan(lens[: len(own)]))
            lens[places] = own[places]
        return lens

    @property
    def label(self) -> str:
        return f"{self.learned.stage}/{self.learned.fingerprint[:8]}"


class Artifacts:
    """The manifests of a catalog, read again every few seconds."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._lock = threading.Lock()
        self._known: list[Manifest] = []
        self._until = 0.0
        self._learned: Recent[tuple[str, float], list[TrainedOn]] = Recent(64)
        self.narrowing: Recent[str, bool] = Recent(1024)
        """Whether artifacts choose among what they were given, by fingerprint."""

    def all(self) -> list[Manifest]:
        """Newest first."""
        with self._lock:
            if time.monotonic() > self._until:
                self._known = sorted(self.catalog.all(), key=lambda manifest: manifest.created_at, reverse=True)
                self._until = time.monotonic() + FRESH_S
            return self._known

    def forget(self) -> None:
        """Read them again at the next question: one was just made."""
        with self._lock:
            self._until = 0.0

    def find(self, stage: str, fingerprint: str) -> Manifest | None:
        """By the beginning of a fingerprint, eight characters or more. A point and a number at its end, which rows have
        that ``--force`` made again, do not count. Nothing is looked up as a path."""
        wanted = fingerprint.partition(".")[0]
        matches = (manifest for manifest in self.all() if manifest.ingredients.stage == stage and len(wanted) >= 8)
        return next((manifest for manifest in matches if manifest.fingerprint.startswith(wanted)), None)

    def named(self, text: str) -> Manifest | None:
        """By STAGE/FINGERPRINT, as rows name their policies."""
        stage, _, fingerprint = text.rpartition("/")
        return self.find(stage, fingerprint) if stage else None

    def learned(self, trajectory_id: str) -> list[TrainedOn]:
        """What learned from a row, newest first."""
        self.all()
        return self._learned.get_or((trajectory_id, self._until), lambda: learned_by(self.catalog, trajectory_id))

    def trained_on(self, trajectory_id: str, ids: np.ndarray) -> list[LearnedTokens]:
        """What learned from a row with these token ids, newest first."""
        learned_tokens = []
        for learned in self.learned(trajectory_id):
            manifest = self.find(learned.stage, learned.fingerprint)
            try:
                rows = self._training_rows(manifest, [trajectory_id, *learned.pairs]) if manifest else []
            except (OSError, StoreError, pa.ArrowException):  # freed since the list was read
                continue
            same = [(row, _mask(row, ids)) for row in rows]
            learned_tokens.append(LearnedTokens(learned, [(row, mask) for row, mask in same if mask is not None]))
        return learned_tokens

    def _training_rows(self, manifest: Manifest, row_ids: list[str]) -> list[TrainingScalars]:
        """The last of the training rows of these ids, each read from its row group alone."""
        output = manifest.outputs.get("batches") or manifest.outputs["rows"]
        with pq.ParquetFile(self.catalog.open(manifest, output.path)) as file:
            names = file.read(["row_id"])["row_id"]
            places = np.flatnonzero(pc.is_in(names, value_set=pa.array(row_ids)).to_numpy())[-CANDIDATES:]
            return [row_at(file, int(index)) for index in reversed(places)]


def label(manifest: Manifest) -> str:
    """As people name an artifact."""
    return f"{manifest.ingredients.stage}/{manifest.fingerprint[:8]}"


def row_at(file: pq.ParquetFile, index: int) -> TrainingScalars:
    """One row of a file, from its row group alone."""
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    starts = np.cumsum([0, *sizes])
    group = int(np.searchsorted(starts, index, side="right")) - 1
    table = file.read_row_group(group).slice(index - int(starts[group]), 1)
    return {name: table[name][0] for name in table.column_names}


def _mask(row: TrainingScalars, ids: np.ndarray) -> np.ndarray | None:
    """Which of these tokens a training row trains on; None if its tokens are not those, or their beginning."""
    trained_ids = numbers(row["input_ids"], np.int32)
    if len(trained_ids) > len(ids) or not np.array_equal(trained_ids, ids[: len(trained_ids)]):
        return None
    trained_mask = np.zeros(len(ids), dtype=bool)
    trained_mask[: len(trained_ids)] = numbers(row["mask"], bool)
    return trained_mask


def numbers(values: pa.Scalar, kind: Any) -> np.ndarray:
    """The values of a list; none if it is null."""
    if values.values is None:
        return np.zeros(0, kind)
    array: np.ndarray = values.values.to_numpy(zero_copy_only=False).astype(kind)
    return array
