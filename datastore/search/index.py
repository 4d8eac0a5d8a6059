"""The search index of a buffer: a vector for each distinct prompt, made by one embedder, up to one table version.

``index/<embedder>/`` in the store holds ``index.json`` (embedder identity, table version, parts), the parts (Parquet
of text and vector) and, for the embedded default, its model. A refresh embeds prompts that are new and writes one more
part; ``index.json`` comes last. Rows are found by their prompt, so rows that leave the table leave the search.
"""

import json
import re
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import sql
from agentrl.datastore.read.ranking import RANK
from agentrl.datastore.search.embedding import EMBEDDED, Embedder, LatentEmbedder, default_embedder, pretrained
from agentrl.datastore.search.exact import mmr, nearest, top
from agentrl.datastore.search.fusion import LATENT, NEURAL, fused, nearness
from agentrl.datastore.search.lexical import Lexical
from agentrl.datastore.search.minilm import MINILM
from agentrl.datastore.search.vectors import TEXTS, each_embedded
from agentrl.datastore.shards.divide import Divide, Dividing
from agentrl.datastore.shards.shard import digest_of
from agentrl.datastore.storage.lease import hold
from agentrl.datastore.storage.ownership import mark

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

Method = Literal["dense", "lexical", "hybrid"]
Where = pl.Expr | str | None

Progress = Callable[[int, int], None]
"""Is told how many prompts are embedded, and of how many."""

POOL = 10
"""Candidates per result that MMR chooses from."""
PART, BATCH = 50_000, 8192
"""Prompts of a part when it is written, and prompts that are read from one at a time."""
COLUMNS = ("trajectory_id", "task_id", "env", "split", "success", "reward", "n_steps", "n_tokens", "prompt")


@dataclass(frozen=True)
class State:
    """What an index was built for, and the parts that hold its texts. ``stale``: commits of the table that it has not
    seen; ``cut``: texts of which the embedder looks at the beginning only."""

    embedder: str
    table_version: int
    texts: int
    stale: int
    cut: int = 0
    parts: tuple[str, ...] = ()


class SearchIndex:
    """Search over one buffer with one embedder: ``minilm``, ``embedded``, or a sentence-transformers name or path;
    None is :func:`default_embedder`."""

    def __init__(self, buffer: "TrajectoryBuffer", embedder: str | None = None) -> None:
        self.buffer = buffer
        self.name = embedder or default_embedder()
        self.folder = f"index/{re.sub(r'[^A-Za-z0-9_.-]+', '_', self.name).strip('._') or 'model'}"
        self._texts: list[str] = []
        self._keep(np.zeros((0, 0), dtype=np.float32))
        self._loaded: tuple[str, ...] | None = None
        self._rows: tuple[int, pl.DataFrame] | None = None
        self._lexical: tuple[int, Lexical] | None = None

    @classmethod
    def of_store(cls, buffer: "TrajectoryBuffer") -> "SearchIndex | None":
        """The index of the embedder that is used if none is named, or else of one that is on another machine; None if
        none was made."""
        indexes = (cls(buffer, name) for name in dict.fromkeys([default_embedder(), MINILM, EMBEDDED]))
        return next((index for index in indexes if index.state()), None)

    # state

    def _meta(self) -> dict[str, object] | None:
        data = self.buffer.storage.read(f"{self.folder}/index.json")
        return json.loads(data) if data else None

    def state(self) -> State | None:
        """What there is; None before the first refresh."""
        meta = self._meta()
        if meta is None:
            return None
        seen = int(str(meta["table_version"]))
        newest = self.buffer.version or 0
        return State(
            str(meta["embedder"]),
            seen,
            int(str(meta["texts"])),
            max(0, newest - seen),
            int(str(meta.get("cut", 0))),
            tuple(map(str, meta["parts"])),  # type: ignore[call-overload]
        )

    @cached_property
    def embedder(self) -> Embedder:
        if self.name != EMBEDDED:
            return pretrained(self.name)
        path = self.buffer.storage.working_folder() / f"embedder-{mark(self.buffer.storage.working_folder())}.npz"
        stored = self.buffer.storage.read(f"{self.folder}/model.npz")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if stored is not None:
                path.write_bytes(stored)
                return LatentEmbedder.load(path)
            made = LatentEmbedder.fit(self._prompts())
            made.save(path)
            self.buffer.storage.write(f"{self.folder}/model.npz", path.read_bytes())
            return made
        finally:
            path.unlink(missing_ok=True)

    def _prompts(self) -> list[str]:
        return self.buffer.scan().select(pl.col("prompt").unique().sort()).collect()["prompt"].to_list()

    def refresh(
        self, rebuild: bool = False, progress: Progress | None = None, dividing: Dividing | None = None
    ) -> State:
        """Embed the prompts that are new since the last refresh. ``rebuild`` starts over, with ``embedded`` fitted
        anew. ``dividing`` gives what runs the shards, if workers embed; their progress is told by it. Raises if the
        stored vectors are another model's, or if workers have another one, which cannot be compared."""
        with hold(self.buffer.storage, f"locks/{self.folder.replace('/', '-')}.lock"):
            if rebuild:
                self.buffer.storage.delete(self.folder)
                self.__dict__.pop("embedder", None)
                self._loaded = None
            version = self.buffer.table().version()
            meta = self._meta()
            if meta is None or meta["table_version"] != version:
                self._extend(meta, version, progress or (lambda done, total: None), dividing)
        state = self.state()
        assert state is not None
        return state

    def _extend(
        self, meta: dict[str, object] | None, version: int, progress: Progress, dividing: Dividing | None
    ) -> None:
        if meta is not None and meta["embedder"] != self.embedder.identity:
            raise StoreError(
                f"the index {self.folder} was made by {meta['embedder']}, this embedder is {self.embedder.identity}; "
                "`agentrl buffer index --rebuild` makes it anew"
            )
        parts = [str(part) for part in meta["parts"]] if meta else []  # type: ignore[attr-defined]
        self._load()
        known = set(self._texts)
        new = [text for text in self._prompts() if text not in known]
        cut = int(str(meta.get("cut", 0))) if meta else 0
        name, own = f"index-{digest_of(self.buffer.store, self.folder)[:12]}", self.buffer.storage.working_folder()
        with dividing(name, own / name) if dividing else nullcontext() as divide:
            for first, vectors, longer in self._embedded(new, progress, divide):
                cut += longer
                some = new[first : first + PART]
                parts.append(f"part-{len(parts):05d}-{uuid.uuid4().hex[:8]}.parquet")
                flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel(), pa.float32()), vectors.shape[1])
                sink = pa.BufferOutputStream()
                table = pa.table({"text": pa.array(some, pa.string()), "vector": flat})
                pq.write_table(table, sink, compression="zstd")
                self.buffer.storage.write(f"{self.folder}/{parts[-1]}", sink.getvalue().to_pybytes())
            body = {
                "embedder": self.embedder.identity,
                "table_version": version,
                "texts": len(known) + len(new),
                "cut": cut,
                "parts": parts,
            }
            self.buffer.storage.write(f"{self.folder}/index.json", json.dumps(body, indent=2).encode())

    def _embedded(
        self, texts: Sequence[str], progress: Progress, divide: Divide | None
    ) -> Iterator[tuple[int, np.ndarray, int]]:
        """For each part of the texts where it begins, its vectors, and how many of its texts are cut. The same texts
        are embedded together in this process and by shards."""
        starts = [
            (first, start)
            for first in range(0, len(texts), PART)
            for start in range(first, min(first + PART, len(texts)), TEXTS)
        ]
        batches = (texts[start : min(start + TEXTS, first + PART)] for first, start in starts)
        made: Iterator[tuple[np.ndarray, int]]
        if divide is None:
            made = ((self.embedder.encode(batch), self.embedder.cut(batch)) for batch in batches)
        else:
            fitted = self.embedder if isinstance(self.embedder, LatentEmbedder) else None
            assert divide.work is not None
            made = each_embedded(batches, self.name, fitted, divide.work, divide, self.embedder.identity)
        for first, of_part in groupby(zip(starts, made, strict=True), lambda item: item[0][0]):
            vectors, cut = list[np.ndarray](), 0
            for (_, start), (some, longer) in of_part:
                vectors.append(some)
                cut += longer
                if divide is None:
                    progress(start + len(some), len(texts))
            yield first, np.concatenate(vectors), cut

    def _load(self) -> None:
        """Read what the newest ``index.json`` names into memory, once."""
        state = self.state()
        if state is None or self._loaded == state.parts:
            return
        self._texts, filled = [], 0
        every = np.zeros((0, 0), np.float32)
        for texts, vectors in self.batches(state):
            if not filled:
                every = np.empty((state.texts, vectors.shape[1]), np.float32)
            every[filled : filled + len(texts)] = vectors
            self._texts += texts
            filled += len(texts)
        self._keep(every)
        self._loaded = state.parts
        self._rows = self._lexical = None

    def _keep(self, vectors: np.ndarray) -> None:
        """Vectors [texts, dimensions] and their mean, whose product with a query is the mean of its cosines."""
        self._vectors = vectors
        self._mean = vectors.mean(0) if len(vectors) else np.zeros(vectors.shape[1], np.float32)

    def batches(self, state: State) -> Iterator[tuple[list[str], np.ndarray]]:
        """The prompts that the index held in this state, in the order in which they came to it, and their vectors,
        float32 [texts, dimensions], some thousand at a time. Raises StoreError if it was made anew since."""
        for part in state.parts:
            data = self.buffer.storage.read(f"{self.folder}/{part}")
            if data is None:
                raise StoreError(f"{self.folder}/{part} is gone: the search index was made anew meanwhile; ask again")
            for batch in pq.ParquetFile(pa.BufferReader(data)).iter_batches(BATCH):
                vectors = batch["vector"]
                yield batch["text"].to_pylist(), vectors.flatten().to_numpy().reshape(len(vectors), -1)

    # search

    def search(
        self,
        text: str,
        k: int = 5,
        *,
        where: Where = None,
        method: Method = "hybrid",
        diverse: float | None = None,
        per_task: int | None = None,
        refresh: bool = True,
        progress: Progress | None = None,
    ) -> pl.DataFrame:
        """The ``k`` rows whose prompts are nearest, with ``score``, best first; among equal prompts, best runs first.

        ``where`` (an expression, or SQL) filters before anything is ranked. ``diverse`` between 0 and 1 re-ranks by
        MMR, 1 being relevance alone. ``per_task`` limits rows of one task. ``method``: ``dense`` is the cosine,
        ``lexical`` BM25, and ``hybrid`` one score of cosine and shared words, at most 1, which trusts a neural embedder
        more than one that is fitted on the buffer (:mod:`fusion`). If a fitted one knows no word of the text, no row is
        returned. Without ``refresh`` a stale index answers as it is, with a warning.
        """
        if k < 1:
            raise StoreError(f"k {k} is less than 1")
        if diverse is not None and not 0 <= diverse <= 1:
            raise StoreError(f"diverse {diverse} is not between 0 (only unlike results) and 1 (only relevance)")
        if refresh or self._meta() is None:
            self.refresh(progress=progress)
        elif (state := self.state()) and state.stale:
            warnings.warn(
                f"the index has not seen the last {state.stale} commits of the buffer; `agentrl buffer index` brings "
                "it up to date",
                stacklevel=2,
            )
        self._load()
        rows = self._filtered(where)
        texts = np.unique(rows["__text"].to_numpy())
        # every text has a row, so k texts are enough, unless one task holds many of them: then look at all
        for limit in (max(k * POOL, 100), len(texts)):
            ranked = self._ranked(rows, texts, text, limit, method, diverse)
            if per_task is not None:
                ranked = ranked.group_by("task_id", maintain_order=True).head(per_task).sort("__place", *RANK)
            if ranked.height >= k or limit >= len(texts):
                break
        return ranked.head(k).select("trajectory_id", "score", *COLUMNS[1:])

    def _ranked(
        self, rows: pl.DataFrame, texts: np.ndarray, text: str, limit: int, method: Method, diverse: float | None
    ) -> pl.DataFrame:
        """The rows of the ``limit`` best texts, best first."""
        positions, scores = self._rank(text, texts, limit, method)
        if diverse is not None:
            relevance = scores / max(float(np.abs(scores).max(initial=0)), 1e-12)
            order = mmr(self._vectors[positions], relevance.astype(np.float32), len(positions), diverse)
            positions, scores = positions[order], scores[order]
        ranked = pl.DataFrame({"__text": positions, "score": scores, "__place": np.arange(len(positions))})
        return rows.join(ranked, on="__text").sort("__place", *RANK)

    def _filtered(self, where: Where) -> pl.DataFrame:
        """Rows that the index knows and the filter leaves, with the number of their text."""
        version = self.buffer.table().version()
        if where is None and self._rows is not None and self._rows[0] == version:
            return self._rows[1]
        rows = self.buffer.scan(version)
        try:
            if isinstance(where, str):
                rows = sql.matching(rows, where, f"filter {where}", self.buffer.text.ids)
            elif where is not None:
                rows = rows.filter(where)
            chosen = rows.select(COLUMNS).collect()
        except pl.exceptions.PolarsError as error:
            raise StoreError(f"filter {where!s}: {str(error).splitlines()[0]}") from None
        numbers = pl.DataFrame({"prompt": self._texts, "__text": np.arange(len(self._texts))}, schema_overrides=_TYPES)
        numbered = chosen.join(numbers, on="prompt", how="inner")
        if where is None:
            self._rows = (version, numbered)
        return numbered

    def _rank(self, text: str, allowed: np.ndarray, k: int, method: Method) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of texts, best first, and their scores."""
        if method == "lexical":
            scores = self._bm25().scores(text)
            best = top(scores, k, allowed)
            best = best[scores[best] > 0]  # texts that share no word are not results
            return best, scores[best]
        if not len(self._vectors):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        query = self.embedder.encode([text])[0]
        known = bool(query.any())  # if the embedder knows none of the words, nothing is nearer than anything else
        if method == "dense":
            everything = len(allowed) == len(self._texts)
            return nearest(self._vectors, query, k if known else 0, None if everything else allowed)
        near = nearness(self._vectors @ query, float(self._mean @ query))
        share = self._bm25().shares(text)
        scores = fused(near, share, NEURAL if self.embedder.neural else LATENT)
        best = top(scores, k, allowed if known else allowed[share[allowed] > 0])
        return best, scores[best]

    def _bm25(self) -> Lexical:
        if self._lexical is None or self._lexical[0] != len(self._texts):
            self._lexical = (len(self._texts), Lexical(self._texts))
        return self._lexical[1]


_TYPES = {"prompt": pl.String, "__text": pl.Int64}
