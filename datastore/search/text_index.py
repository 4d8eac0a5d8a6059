"""The full-text index on the disk of this machine: one index of tantivy, kept up by data file.

Files never change, so an extension reads those that are new and takes out those that compaction or forgetting removed.
A document is a row; it holds no text, only its number in its file. A commit has whole files, and the index itself says
which: a process that is killed loses what it had not committed, and the next extension goes on from there.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from agentrl.datastore.errors import CorruptError, StoreError
from agentrl.datastore.optional import optional
from agentrl.datastore.search import words
from agentrl.datastore.search.common import Bits, Common
from agentrl.datastore.search.excerpts import row_texts
from agentrl.datastore.storage.lease import hold
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table.ids import open_file
from agentrl.datastore.table.maintenance import live_files

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

FORM = 2
"""Of the index: its fields and how text becomes words. Another form has another folder, and is built anew."""
TEXT, PAIRS, FILE, ROW = "text", "pairs", "file", "row"
"""Fields of a document: the text, its pairs of common words, the number and name of the data file, and :data:`ROW_BITS`
bits of the row's number in it below the bits of the file's."""
ROW_BITS = 32
ANALYZER = "words"
COMMIT_ROWS = 50_000
"""Rows of whole files that are committed together; a process that is killed loses so much work at most, or one file."""
COMMON_FROM = 20_000
"""Rows from which on an index knows its common words. One of fewer is built anew when it becomes so large."""
SAMPLED_FILES, SAMPLED_ROWS = 8, 250
"""Files that common words are chosen from, and rows of each."""
WRITER_BYTES = 2**27
"""Memory of each thread that writes."""
THREADS = min(4, os.cpu_count() or 1)
THREADS_FROM = 100_000
"""Rows from which on several threads write. Each writes parts of its own, with a dictionary of all words in each."""

Progress = Callable[[int, int], None]
"""Is told how many rows are read, and of how many."""


class Held(NamedTuple):
    """An opened index, a searcher over it, the numbers of the data files that it has, and the bits of their rows."""

    index: Any
    searcher: Any
    files: dict[str, int]
    bits: Bits


class UnusableError(Exception):
    """The files of the index cannot be read."""


class TextIndex:
    """The index of one buffer in its working folder."""

    def __init__(self, buffer: "TrajectoryBuffer") -> None:
        self.buffer = buffer
        self.folder = buffer.storage.working_folder() / f"text-{FORM}"
        self._held: Held | None = None

    def over(self, rows: dict[str, int], progress: Progress | None = None) -> Held:
        """The index over all these files, each with its rows, after it read those that it lacked. Raises UnusableError
        if it is damaged, and StoreError if it cannot be written."""
        held = self._newest(rows)
        if held is None or _missing(held, rows):
            try:
                with self._alone():
                    held = self._extended(rows, progress or (lambda done, total: None))
            except OSError as error:
                raise StoreError(f"the full-text index cannot be written to {self.folder}: {error.strerror}") from None
        self._held = held
        return held

    def lacking(self, rows: dict[str, int]) -> dict[str, int]:
        """Those of these files, each with its rows, that would be read before a question about all is answered."""
        held = self._newest(rows)
        if held is None or ((missing := _missing(held, rows)) and _outgrown(held, rows)):
            return rows
        return missing

    def _newest(self, rows: dict[str, int]) -> Held | None:
        """The index that is held if it has these files, or as it was committed last; None if there is none."""
        held = self._held
        return held if held is not None and not _missing(held, rows) else self.on_disk()

    def on_disk(self) -> Held | None:
        """The index as it was committed last; None if there is none, or if it is damaged."""
        tantivy = optional("tantivy", words.EXTRA)
        try:
            with answering():
                common = Common.read(self.folder)
                index = tantivy.Index.open(str(self.folder))
                index.register_tokenizer(ANALYZER, words.of_plain())
                searcher = index.searcher()
                files = searcher.terms_with_prefix(FILE, "", filter_query=tantivy.Query.all_query())
                if Common.read(self.folder) != common:
                    raise UnusableError("it was built anew meanwhile")
        except UnusableError:
            return None
        parts = (term.partition(" ") for term, _ in files)
        return Held(index, searcher, {name: int(number) for number, _, name in parts}, Bits(self.folder, common))

    def remove(self) -> None:
        with self._alone():
            self._held = None
            shutil.rmtree(self.folder, ignore_errors=True)

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*"))

    def _extended(self, rows: dict[str, int], progress: Progress) -> Held:
        """The index after it read the files that it lacked, and without those that neither these nor the newest version
        have. The caller is alone."""
        held = self.on_disk()
        if held is None or (_missing(held, rows) and _outgrown(held, rows)):
            held = self._made(rows)
        missing = _missing(held, rows)
        gone = held.files.keys() - rows.keys() - live_files(self.buffer.table()).keys()
        if missing:  # another process may have been faster
            with answering(), _writing(held.index, THREADS if sum(missing.values()) >= THREADS_FROM else 1) as writer:
                for name in gone:
                    writer.delete_documents_by_term(FILE, _term(held.files[name], name))
                done = uncommitted = 0
                for number, name in enumerate(missing, max(held.files.values(), default=-1) + 1):
                    for read in self._add(writer, held.bits, number, name):
                        done, uncommitted = done + read, uncommitted + read
                        progress(done, sum(missing.values()))
                    if uncommitted >= COMMIT_ROWS:
                        writer.commit()
                        uncommitted = 0
            for name in gone:
                held.bits.remove(name)
        held_now = self.on_disk()
        if held_now is None:
            raise UnusableError("it cannot be read after it was written")
        return held_now

    def _made(self, rows: dict[str, int]) -> Held:
        """A new, empty index, for these files at first. The caller is alone."""
        tantivy = optional("tantivy", words.EXTRA)
        common = Common.of(self._sample(list(rows))) if sum(rows.values()) >= COMMON_FROM else Common()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)  # a reader that polls it may have left tantivy's lock there
        common.write(self.folder)
        fields = tantivy.SchemaBuilder().add_text_field(TEXT, tokenizer_name=ANALYZER, index_option="position")
        fields = fields.add_text_field(PAIRS, tokenizer_name="whitespace", index_option="freq")
        fields = fields.add_text_field(FILE, tokenizer_name="raw", index_option="basic")
        with answering():
            index = tantivy.Index(fields.add_unsigned_field(ROW, fast=True).build(), path=str(self.folder))
            index.register_tokenizer(ANALYZER, words.of_plain())
            return Held(index, index.searcher(), {}, Bits(self.folder, common))

    def _sample(self, names: list[str]) -> list[list[str]]:
        """Texts of rows of some of these files."""
        chosen = np.unique(np.linspace(0, len(names) - 1, SAMPLED_FILES).astype(int)).tolist()
        return [texts for number in chosen for texts in islice(self._texts(names[number]), SAMPLED_ROWS)]

    def _texts(self, name: str) -> Iterator[list[str]]:
        """The texts of each row of a data file as the index has them."""
        for group in self._groups(name):
            yield from group

    def _groups(self, name: str) -> Iterator[list[list[str]]]:
        """The same by row group."""
        with data_file(name), open_file(self.buffer.storage, name) as file:
            for group in range(file.num_row_groups):
                messages = file.read_row_group(group, columns=["messages"])["messages"]
                yield [list(map(words.plain, texts)) for texts in row_texts(messages)]

    def _add(self, writer: Any, bits: Bits, number: int, name: str) -> Iterator[int]:
        """Add the rows of a data file, a row group at a time; yields how many they were."""
        document, term, row = optional("tantivy", words.EXTRA).Document, _term(number, name), number << ROW_BITS
        marked = []
        for rows in self._groups(name):
            marks, pairs = bits.common.marks(rows) if bits.common.words else (None, [""] * len(rows))
            marked += [] if marks is None else [marks]
            for texts, near in zip(rows, pairs, strict=True):
                made = document()
                for text in texts:
                    made.add_text(TEXT, text)
                if near:
                    made.add_text(PAIRS, near)
                made.add_text(FILE, term)
                made.add_unsigned(ROW, row)
                writer.add_document(made)
                row += 1
            yield len(rows)
        if marked:
            bits.write(name, marked)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time writes the index. Indexes of other forms are removed."""
        beside = self.folder.parent
        with hold(LocalStorage(beside), f"{self.folder.name}.lock"):
            for other in beside.glob("text-*/"):
                if other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)
            yield


def _missing(held: Held, rows: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in rows.items() if name not in held.files}


def _outgrown(held: Held, rows: dict[str, int]) -> bool:
    """Whether an index that was made for few rows would have many."""
    return not held.bits.common.chosen and sum(rows.values()) >= COMMON_FROM


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
def answering() -> Iterator[None]:
    """Failures of tantivy, among them panics, and of the files beside its own, as UnusableError."""
    try:
        yield
    except StoreError:
        raise
    except ValueError as error:
        raise UnusableError(str(error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UnusableError(str(error)) from None


@contextmanager
def data_file(name: str) -> Iterator[None]:
    """A data file that cannot be read, as CorruptError that names it."""
    try:
        yield
    except pa.ArrowException as error:
        raise CorruptError(f"data file {name}", str(error)) from error
