"""The full-text index of a buffer: which rows hold a word, in messages, reasoning, tool calls and tool answers.

Each question brings :mod:`text_index` up to date, asks it by :mod:`queries`, and turns numbers of rows into ids.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import sql
from agentrl.datastore.search import queries, words
from agentrl.datastore.search.excerpts import excerpt
from agentrl.datastore.search.text_index import (
    ROW,
    ROW_BITS,
    Held,
    Progress,
    TextIndex,
    UnusableError,
    answering,
    data_file,
)
from agentrl.datastore.table.ids import open_file
from agentrl.datastore.table.maintenance import live_files

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

KEPT_IDS = 2**22
"""Ids of rows that stay in memory, by file."""
COLUMNS = ("task_id", "env", "split", "success", "reward", "n_steps", "n_tokens", "prompt")


@dataclass(frozen=True)
class TextState:
    """What a refresh left: rows and data files of the newest version, how many rows it read, and the index's bytes."""

    rows: int
    files: int
    read: int
    bytes: int


class FullText:
    """The full-text index of one buffer. Every question brings it up to date first. Threads may share it."""

    def __init__(self, buffer: "TrajectoryBuffer") -> None:
        self.buffer = buffer
        self.index = TextIndex(buffer)
        self._newest: tuple[tuple[Any, int], dict[str, int]] | None = None
        """The newest version that was asked for, and the rows of its data files."""
        self._ids: OrderedDict[str, pl.Series] = OrderedDict()
        self._lock = threading.Lock()

    # questions

    def ids(self, text: str, version: int | datetime | None = None) -> pl.Series:
        """The ids of the rows of a version that :mod:`words` asks for, in no promised order."""
        words.parsed(text)
        return self._asked(version, lambda held, files: self._matching(held, text, files))["trajectory_id"]

    def search(
        self,
        text: str,
        k: int = 5,
        *,
        where: pl.Expr | str | None = None,
        per_task: int | None = None,
        progress: Progress | None = None,
    ) -> pl.DataFrame:
        """The ``k`` best rows by BM25, with ``score``, and an ``excerpt`` of the ``message`` (its number, of a
        ``role``) that the words stand in, marked there by ``**``. ``where`` and ``per_task`` are those of
        :meth:`SearchIndex.search`."""
        if k < 1:
            raise StoreError(f"k {k} is less than 1")
        asked = words.parsed(text)
        narrow = where is not None or per_task is not None
        limit = None if narrow else k
        hits = self._asked(None, lambda held, files: self._hits(held, text, files, limit), progress)
        if narrow:
            hits = hits.join(self._where(where), on="trajectory_id")
        hits = hits.sort("score", "trajectory_id", descending=[True, False])
        if per_task is not None:
            hits = hits.filter(pl.int_range(pl.len()).over("task_id") < per_task)
        hits = hits.head(k).select("trajectory_id", "score")
        rows = self.buffer.read(hits["trajectory_id"].to_list(), [*COLUMNS, "messages"])
        excerpts = [excerpt(messages, asked) for messages in rows["messages"].to_pylist()]
        where_found = pl.DataFrame(excerpts, schema={"message": pl.Int64, "role": pl.String, "excerpt": pl.String})
        return pl.concat([hits, where_found, pl.DataFrame(rows.select(COLUMNS))], how="horizontal")

    def refresh(self, rebuild: bool = False, progress: Progress | None = None) -> TextState:
        """Read what is new in the newest version. ``rebuild`` starts over."""
        if rebuild:
            self.index.remove()
        files = live_files(self.buffer.table())
        lacking = self.lacking()
        self._asked(None, lambda held, names: self._hits(held, "a", names, 1), progress)
        return TextState(sum(rows for rows, _ in files.values()), len(files), lacking, self.index.bytes())

    def lacking(self, version: int | datetime | None = None) -> int:
        """How many rows of a version a question would read before it is answered."""
        files = {name: rows for name, (rows, _) in live_files(self.buffer.table(version)).items()}
        return sum(self.index.lacking(files).values())

    # answers

    def _asked(
        self,
        version: int | datetime | None,
        ask: Callable[[Held, dict[str, int]], pl.DataFrame],
        progress: Progress | None = None,
    ) -> pl.DataFrame:
        """What ``ask`` finds in the files of a version. If the index turns out to be damaged, it is built anew."""

        def current() -> pl.DataFrame:
            rows = self._rows_of_files(version)
            try:
                return ask(self.index.over(rows, progress), rows)
            except UnusableError:
                self.index.remove()
            try:
                return ask(self.index.over(rows, progress), rows)
            except UnusableError as error:
                raise StoreError(f"the full-text index in {self.index.folder} cannot be used: {error}") from None

        return self.buffer.current(version, current)

    def _rows_of_files(self, version: int | datetime | None) -> dict[str, int]:
        """The data files of a version with their rows. Those of the newest are read again only if it is another one: to
        open a table takes far longer than to look words up."""
        if version is not None:
            return {name: rows for name, (rows, _) in live_files(self.buffer.table(version)).items()}
        with self.buffer.committed.following() as table:
            state = table.metadata().id, table.version()
            newest = self._newest
            if newest is None or newest[0] != state:
                newest = self._newest = state, {name: rows for name, (rows, _) in live_files(table).items()}
            return newest[1]

    def _hits(self, held: Held, text: str, files: Mapping[str, int], k: int | None) -> pl.DataFrame:
        """Ids and scores of the ``k`` best rows in these files, or of all (None), best first."""
        query = queries.query(held, words.parsed(text))
        names = {held.files[name]: name for name in files}
        with answering():
            hits = held.searcher.search(query, limit=k or max(1, held.searcher.num_docs), count=False).hits
            numbers = np.array(held.searcher.fast_field_values(ROW, [address for _, address in hits]), dtype=np.int64)
        in_file, rows = numbers >> ROW_BITS, numbers & (2**ROW_BITS - 1)
        here = np.isin(in_file, np.array(list(names), dtype=np.int64))
        if k is not None and not here.all():  # the index holds files of other versions
            return self._hits(held, text, files, None).head(k)
        ids = np.full(len(hits), "", dtype=object)
        for number in np.unique(in_file[here]).tolist():
            mine = np.flatnonzero(in_file == number)
            ids[mine] = self._ids_of(names[number]).gather(rows[mine]).to_list()
        scores = np.array([score for score, _ in hits], dtype=np.float64)
        return pl.DataFrame(
            {"trajectory_id": pl.Series(ids[here].tolist(), dtype=pl.String), "score": pl.Series(scores[here])}
        )

    def _matching(self, held: Held, text: str, files: Mapping[str, int]) -> pl.DataFrame:
        """Ids of all rows of these files, without scores."""
        with answering():
            mask = queries.rows(held, words.parsed(text), files)
        parts, first = [pl.Series(dtype=pl.String)], 0
        for name, rows in files.items():
            of_file = mask[first : first + rows]
            if of_file.any():
                ids = self._ids_of(name)
                parts.append(ids if of_file.all() else ids.filter(pl.Series(of_file)))
            first += rows
        return pl.DataFrame({"trajectory_id": pl.concat(parts)})

    def _ids_of(self, name: str) -> pl.Series:
        """The ids in a data file, in its order."""
        with self._lock:
            if name in self._ids:
                self._ids.move_to_end(name)
                return self._ids[name]
        with data_file(name), open_file(self.buffer.storage, name) as file:
            ids = pl.Series(file.read(["trajectory_id"])["trajectory_id"].combine_chunks())
        with self._lock:
            while self._ids and sum(map(len, self._ids.values())) + len(ids) > KEPT_IDS:
                self._ids.popitem(last=False)
            self._ids[name] = ids
        return ids

    def _where(self, where: pl.Expr | str | None) -> pl.DataFrame:
        """Ids and tasks of the rows that a filter leaves."""
        rows = self.buffer.scan()
        try:
            if isinstance(where, str):
                rows = sql.matching(rows, where, f"filter {where}", self.ids)
            elif where is not None:
                rows = rows.filter(where)
            return rows.select("trajectory_id", "task_id").collect()
        except pl.exceptions.PolarsError as error:
            raise StoreError(f"filter {where!s}: {str(error).splitlines()[0]}") from None
