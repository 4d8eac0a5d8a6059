"""The full-text index of a buffer: which rows hold a word, in messages, reasoning, tool calls and tool answers.

One index of tantivy in the working folder of this machine, ``text-<version of its form>``, kept up by data file: files
never change, so a refresh reads those that are new and takes out those that compaction or forgetting removed. A
document is a row; it holds no text, only its number in its file. A commit has whole files, and the index itself says
which: a process that is killed loses what it had not committed, and the next refresh goes on from there.
"""

import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from agentrl.datastore.errors import CorruptError, StoreError
from agentrl.datastore.optional import optional
from agentrl.datastore.read import sql
from agentrl.datastore.search import words
from agentrl.datastore.search.excerpts import excerpt, row_texts
from agentrl.datastore.storage.lease import hold
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table.ids import open_file
from agentrl.datastore.table.maintenance import live_files

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

FORM = 1
"""Of the index: its fields and how text becomes words. Another form has another folder, and is built anew."""
TEXT, FILE, ROW = "text", "file", "row"
"""Fields of a document: the text, the number and name of the data file, and :data:`ROW_BITS` bits of the row's number
in it below the bits of the file's."""
ROW_BITS = 32
ANALYZER = "words"
COMMIT_ROWS = 20_000
"""Rows of whole files that are committed together; a process that is killed loses so much work at most, or one file."""
WRITER_BYTES = 2**26
"""Memory of each thread that writes."""
THREADS = min(4, os.cpu_count() or 1)
KEPT_IDS = 2**22
"""Ids of rows that stay in memory, by file."""
COLUMNS = ("task_id", "env", "split", "success", "reward", "n_steps", "n_tokens", "prompt")

Progress = Callable[[int, int], None]
"""Is told how many rows are read, and of how many."""


@dataclass(frozen=True)
class TextState:
    """What a refresh left: rows and data files of the newest version, how many rows it read, and the index's bytes."""

    rows: int
    files: int
    read: int
    bytes: int


class _Held(NamedTuple):
    """An opened index, a searcher over it, and the numbers of the data files that it has."""

    index: Any
    searcher: Any
    files: dict[str, int]


class _UnusableError(Exception):
    """tantivy cannot read its own files."""


class FullText:
    """The full-text index of one buffer. Every question brings it up to date first. Threads may share it."""

    def __init__(self, buffer: "TrajectoryBuffer") -> None:
        self.buffer = buffer
        self.folder = buffer.storage.working_folder() / f"text-{FORM}"
        self._held: _Held | None = None
        self._newest: tuple[tuple[Any, int], dict[str, int]] | None = None
        """The newest version that was asked for, and the rows of its data files."""
        self._ids: OrderedDict[str, pa.Array] = OrderedDict()
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
            self._remove()
        files = live_files(self.buffer.table())
        lacking = self.lacking()
        self._asked(None, lambda held, names: self._hits(held, "a", names, 1), progress)
        size = sum(path.stat().st_size for path in self.folder.glob("*"))
        return TextState(sum(rows for rows, _ in files.values()), len(files), lacking, size)

    def lacking(self, version: int | datetime | None = None) -> int:
        """How many rows of a version a question would read before it is answered."""
        files = live_files(self.buffer.table(version))
        held = self._held
        if held is None or not files.keys() <= held.files.keys():
            held = self._on_disk()
        return sum(rows for name, (rows, _) in files.items() if held is None or name not in held.files)

    # answers

    def _asked(
        self,
        version: int | datetime | None,
        ask: Callable[[_Held, list[str]], pl.DataFrame],
        progress: Progress | None = None,
    ) -> pl.DataFrame:
        """What ``ask`` finds in the files of a version. If the index turns out to be damaged, it is built anew."""

        def current() -> pl.DataFrame:
            rows = self._rows_of_files(version)
            try:
                return ask(self._over(rows, progress), list(rows))
            except _UnusableError:
                self._remove()
            try:
                return ask(self._over(rows, progress), list(rows))
            except _UnusableError as error:
                raise StoreError(f"the full-text index in {self.folder} cannot be used: {error}") from None

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

    def _hits(self, held: _Held, text: str, files: Sequence[str], k: int | None) -> pl.DataFrame:
        """Ids and scores of the ``k`` best rows in these files, or of all (None), best first."""
        query = words.query(held.index.schema, TEXT, words.parsed(text))
        names = {held.files[name]: name for name in files}
        with _tantivy():
            hits = held.searcher.search(query, limit=k or max(1, held.searcher.num_docs), count=False).hits
            numbers = np.array(held.searcher.fast_field_values(ROW, [address for _, address in hits]), dtype=np.int64)
        in_file, rows = numbers >> ROW_BITS, numbers & (2**ROW_BITS - 1)
        here = np.isin(in_file, np.array(list(names), dtype=np.int64))
        if k is not None and not here.all():  # the index holds files of other versions
            return self._hits(held, text, files, None).head(k)
        ids = np.full(len(hits), "", dtype=object)
        for number in np.unique(in_file[here]).tolist():
            mine = np.flatnonzero(in_file == number)
            ids[mine] = self._ids_of(names[number]).take(pa.array(rows[mine])).to_pylist()
        scores = np.array([score for score, _ in hits], dtype=np.float64)
        return pl.DataFrame(
            {"trajectory_id": pl.Series(ids[here].tolist(), dtype=pl.String), "score": pl.Series(scores[here])}
        )

    def _matching(self, held: _Held, text: str, files: Sequence[str]) -> pl.DataFrame:
        """Ids of all rows of these files, without scores. If most rows match words, the others are asked for: each row
        that tantivy names becomes objects of Python, which takes longer than to find it. Phrases take longer still, and
        are looked for once."""
        tantivy = optional("tantivy", words.EXTRA)
        asked, every = words.parsed(text), held.searcher.num_docs
        kinds, query = tantivy.Occur, words.query(held.index.schema, TEXT, asked)
        with _tantivy():
            count, inverted = every, False
            if not words.has_phrase(asked):
                count = held.searcher.search(tantivy.Query.const_score_query(query, 1.0), limit=1, count=True).count
                inverted = 2 * count > every
            if inverted:
                everything = (kinds.Must, tantivy.Query.all_query())
                query = tantivy.Query.boolean_query([everything, (kinds.MustNot, query)])
                count = every - count
            hits = held.searcher.search(query, limit=max(1, count), count=False, order_by_field=ROW).hits
        numbers, parts = np.sort(np.fromiter(map(itemgetter(0), hits), np.int64, len(hits))), list[pa.Array]()
        for name in files:
            first, end = np.searchsorted(numbers, np.arange(2) + held.files[name] << ROW_BITS)
            if first == end and not inverted:
                continue
            rows, ids = numbers[first:end] & (2**ROW_BITS - 1), self._ids_of(name)
            parts.append(
                ids.filter(pa.array(~np.isin(np.arange(len(ids)), rows))) if inverted else ids.take(pa.array(rows))
            )
        return pl.DataFrame({"trajectory_id": pl.Series(pa.chunked_array(parts, pa.string()))})

    def _ids_of(self, name: str) -> pa.Array:
        """The ids in a data file, in its order."""
        with self._lock:
            if name in self._ids:
                self._ids.move_to_end(name)
                return self._ids[name]
        with _data(name), open_file(self.buffer.storage, name) as file:
            ids = file.read(["trajectory_id"])["trajectory_id"].combine_chunks()
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

    # upkeep

    def _over(self, rows: dict[str, int], progress: Progress | None) -> _Held:
        """The index over all these files, each with its rows, after it read those that it lacked."""
        held = self._held
        if held is None or not rows.keys() <= held.files.keys():
            held = self._on_disk()
        if held is None or not rows.keys() <= held.files.keys():
            try:
                with self._alone():
                    held = self._extended(rows, progress or (lambda done, total: None))
            except OSError as error:
                raise StoreError(f"the full-text index cannot be written to {self.folder}: {error.strerror}") from None
        self._held = held
        return held

    def _on_disk(self) -> _Held | None:
        """The index as it was committed last; None if there is none, or if it is damaged."""
        tantivy = optional("tantivy", words.EXTRA)
        try:
            with _tantivy():
                index = tantivy.Index.open(str(self.folder))
                index.register_tokenizer(ANALYZER, words.analyzer())
                searcher = index.searcher()
                files = searcher.terms_with_prefix(FILE, "", filter_query=tantivy.Query.all_query())
        except _UnusableError:
            return None
        parts = (term.partition(" ") for term, _ in files)
        return _Held(index, searcher, {name: int(number) for number, _, name in parts})

    def _extended(self, rows: dict[str, int], progress: Progress) -> _Held:
        """The index after it read the files that it lacked, and without those that neither these nor the newest version
        have. The caller is alone."""
        held = self._on_disk() or self._made()
        missing = {name: count for name, count in rows.items() if name not in held.files}
        gone = held.files.keys() - rows.keys() - live_files(self.buffer.table()).keys()
        if missing:  # another process may have been faster
            with _tantivy(), _writing(held.index, _threads(sum(missing.values()))) as writer:
                for name in gone:
                    writer.delete_documents_by_term(FILE, _term(held.files[name], name))
                done = uncommitted = 0
                for number, name in enumerate(missing, max(held.files.values(), default=-1) + 1):
                    for read in self._add(writer, number, name):
                        done, uncommitted = done + read, uncommitted + read
                        progress(done, sum(missing.values()))
                    if uncommitted >= COMMIT_ROWS:
                        writer.commit()
                        uncommitted = 0
        held_now = self._on_disk()
        if held_now is None:
            raise _UnusableError("it cannot be read after it was written")
        return held_now

    def _made(self) -> _Held:
        """A new, empty index. The caller is alone."""
        tantivy = optional("tantivy", words.EXTRA)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)  # a reader that polls it may have left tantivy's lock there
        fields = tantivy.SchemaBuilder().add_text_field(TEXT, tokenizer_name=ANALYZER, index_option="position")
        fields = fields.add_text_field(FILE, tokenizer_name="raw", index_option="basic")
        with _tantivy():
            index = tantivy.Index(fields.add_unsigned_field(ROW, fast=True).build(), path=str(self.folder))
            index.register_tokenizer(ANALYZER, words.analyzer())
            return _Held(index, index.searcher(), {})

    def _add(self, writer: Any, number: int, name: str) -> Iterator[int]:
        """Add the rows of a data file, a row group at a time; yields how many they were."""
        document, term, row = optional("tantivy", words.EXTRA).Document, _term(number, name), number << ROW_BITS
        with _data(name), open_file(self.buffer.storage, name) as file:
            for group in range(file.num_row_groups):
                messages = file.read_row_group(group, columns=["messages"])["messages"]
                for texts in row_texts(messages):
                    made = document()
                    for text in texts:
                        made.add_text(TEXT, text)
                    made.add_text(FILE, term)
                    made.add_unsigned(ROW, row)
                    writer.add_document(made)
                    row += 1
                yield len(messages)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time writes the index. Indexes of other forms are removed."""
        beside = self.folder.parent
        with hold(LocalStorage(beside), f"{self.folder.name}.lock"):
            for other in beside.glob("text-*/"):
                if other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)
            yield

    def _remove(self) -> None:
        with self._alone():
            self._held = None
            shutil.rmtree(self.folder, ignore_errors=True)


def _threads(rows: int) -> int:
    """Threads that write so many rows. Each writes a part of its own, with a dictionary of all words in it."""
    return THREADS if rows > COMMIT_ROWS else 1


def _term(number: int, name: str) -> str:
    return f"{number} {name}"


@contextmanager
def _writing(index: Any, threads: int) -> Iterator[Any]:
    """A writer. At the end it commits; if anything is raised, as in the middle of a file, what it had not committed is
    gone. (The writer's own context commits in both cases.)"""
    writer = index.writer(WRITER_BYTES * threads, threads)
    try:
        yield writer
        writer.commit()
    except BaseException:
        writer.rollback()
        raise
    finally:
        writer.wait_merging_threads()  # that also gives its lock back


@contextmanager
def _tantivy() -> Iterator[None]:
    """Failures of tantivy, among them panics, as one kind of error."""
    try:
        yield
    except StoreError:
        raise
    except ValueError as error:
        raise _UnusableError(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _UnusableError(str(error)) from None


@contextmanager
def _data(name: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise CorruptError(f"data file {name}", str(error)) from error
