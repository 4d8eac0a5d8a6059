"""Reading files: the kind of a file, its records one at a time, and the place of each record.

A file is JSON Lines, a JSON array, one JSON document, CSV, Parquet, a ZIP archive, or an SQLite database; text may be
compressed by gzip or Zstandard and begin with a byte order mark. Memory holds one record, and of a JSON array or a long
list inside a document one element.
"""

import codecs
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

from pydantic_core import from_json

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.notes import EXCERPT, Notes, excerpt
from agentrl.datastore.formats.raw import (
    BROKEN_BYTES,
    BUFFER,
    MAX_RECORD,
    Stretched,
    TooLongError,
    bounded_lines,
    compression,
    open_bytes,
)
from agentrl.datastore.formats.sqlite import MAGIC, content_of
from agentrl.datastore.formats.stream import (
    CHUNK,
    Chars,
    Utf8Text,
    between_commas,
    elements,
    find_list,
    later_members,
    members,
    not_json,
    outline,
    utf8_fault,
)
from agentrl.datastore.formats.tabular import csv_records, parquet_content, parquet_records

Row: TypeAlias = dict[str, Any]
"""Fields of a trajectory, as a reader finds them; messages, calls and components are dicts too."""

Line: TypeAlias = tuple[int, bytes, int]
"""Number of a line from 1, its content, and its length; the content of one that is too long is cut."""

Kind = Literal["lines", "array", "document", "csv", "parquet", "zip", "sqlite", "folder", "empty"]

SAMPLE_RECORDS = 64

BROKEN = (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError, OverflowError)
"""What a reader raises if a record does not have the shape that its format promises."""


class Stretch(NamedTuple):
    """A part of a file, from ``start`` to ``stop``: bytes of JSON Lines or of a JSON list, row groups of Parquet,
    samples of an archive, rows of a folder. ``before`` counts the records before it (lines of JSON Lines)."""

    start: int
    stop: int
    before: int


class Source:
    """One file or folder to import. ``record`` is the record that was given last, and ``place`` says where it is."""

    def __init__(self, path: Path, notes: Notes | None = None, name: str | None = None) -> None:
        self.path = path
        self.notes = notes or Notes()
        self.name = name or str(path)
        self.record: Any = None
        self.number = 0
        self.read_to = self._took = 0
        self.headless, self.ended = "", True
        self.before: dict[str, Any] = {}
        """The members beside the list, if :meth:`elements` reads a document."""
        self.span: Stretch | None = None
        self.given: Iterator[Any] | None = None
        self.limit = MAX_RECORD
        """Bytes, or characters, that one record may take."""

    def __repr__(self) -> str:
        return f"Source({self.name!r}, {self.kind})"

    def part(self, span: Stretch | None, notes: Notes) -> "Source":
        """The same file, of which only a part is read if ``span`` is given."""
        _ = self.kind  # found once, not once a part
        part = copy(self)
        part.notes, part.span = notes, span
        return part

    @property
    def place(self) -> str:
        return self.place_of(self.number)

    def place_of(self, number: int) -> str:
        """The place of a record by its number."""
        return f"{self.name}:{number}" if self.kind == "lines" else f"{self.name}[{number - 1}]"

    def took(self) -> int:
        """How much was read since the last call: bytes of lines and tables, characters of other text."""
        before, self._took = self._took, self.read_to
        return self.read_to - before

    @cached_property
    def kind(self) -> Kind:
        if self.path.is_dir():
            return "folder"
        try:
            with self.path.open("rb", buffering=0) as file:
                start = file.read(BUFFER)
        except OSError as error:
            raise StoreError(f"{self.name} cannot be read: {error}") from None
        if start[:4] in (b"PAR1", b"PK\x03\x04"):
            return "parquet" if start[:4] == b"PAR1" else "zip"
        if start.startswith(MAGIC):
            return "sqlite"
        text = start.decode("utf-8-sig", "replace").lstrip()  # bytes that are no UTF-8 are refused where they stand
        whole = len(start) < BUFFER
        if self.compressed or not (text or whole):
            with self.text("replace") as file:
                text, whole = file.read(CHUNK).lstrip(), False
        if not text:
            return "empty"
        if {".csv", ".tsv"} & set(self.path.suffixes):
            return "csv"
        if text[0] == "[":
            return "array"
        if {".jsonl", ".ndjson"} & set(self.path.suffixes):
            return "lines"
        line = text.partition("\n")[0] if whole else self._first_line()
        with suppress(ValueError):
            from_json(line)
            return "lines"
        return "document"

    def _first_line(self) -> str:
        with self.text("replace") as text:
            return next((line for line in iter(lambda: text.readline(self.limit), "") if line.strip()), "")

    @property
    def head(self) -> Any:
        """The first of :attr:`sample`. None if there is none that can be read; ``headless`` says why."""
        return self.sample[0] if self.sample else None

    @cached_property
    def sample(self) -> list[Any]:
        """The first records, at most :data:`SAMPLE_RECORDS` or little more than a megabyte of them; of a document that
        is longer its top-level keys, with one element of each list."""
        notes = Notes(quarantine=True)
        probe, records = Source(self.path, notes, self.name), []
        probe.limit = self.limit
        try:
            if self.kind == "document" and (self.compressed or self.path.stat().st_size > min(CHUNK, self.limit)):
                return [outline(Chars(self.text(), self.limit))]
            for record in probe.records():
                records.append(record)
                if len(records) == SAMPLE_RECORDS or probe.read_to > CHUNK:
                    break
        except (StoreError, *BROKEN) as error:
            self.headless = str(error)
        if notes.unreadable:
            self.headless = notes.unreadable[0].reason
        return records

    def text(self, errors: str = "strict") -> IO[str]:
        """The file as text. Reading raises StoreError if it is not UTF-8, or its compression is broken."""
        return Utf8Text(open_bytes(self.path), self.name, errors)

    @property
    def compressed(self) -> bool:
        return compression(self.path) is not None

    def digest(self) -> str:
        """Digest of the content: of text whatever its compression, of tables their rows, of a folder its files."""
        from agentrl.datastore.storage.digest import digest

        if self.kind == "parquet":
            return parquet_content(self)
        if self.kind == "sqlite":
            return content_of(self.path, self.name, self.limit)
        if self.kind in ("folder", "zip"):
            return digest(self.path)
        total = hashlib.blake2b(digest_size=16)
        try:
            with open_bytes(self.path) as file:
                total.update(file.read(CHUNK).removeprefix(codecs.BOM_UTF8))
                for chunk in iter(lambda: file.read(CHUNK), b""):
                    total.update(chunk)
        except BROKEN_BYTES as error:
            raise StoreError(f"{self.name} cannot be read: {error}") from None
        return total.hexdigest()

    def records(self) -> Iterator[Any]:
        """Every record: a line, an element of the array, a row of the table (CSV: its cells with text, by the names in
        the first line), or the whole document; or those that are ``given``."""
        if self.given is not None:
            given, self.given = self.given, None
            yield from given
            return
        self.number = self.span.before if self.span else 0
        match self.kind:
            case "lines":
                yield from self.parsed(self.lines())
            case "array":
                chars = self._chars()
                records = self._part_of_list(self.span, chars) if self.span else elements(chars)
                yield from self._counted(records, chars)
            case "document":
                yield from self._counted(self._whole())
            case "csv":
                yield from self._counted(csv_records(self))
            case "parquet":
                yield from self._counted(parquet_records(self))
            case _:
                raise StoreError(f"{self.name} holds no records ({self.kind})")

    def _counted(self, records: Iterator[Any], chars: Chars | None = None) -> Iterator[Any]:
        while True:
            self.number += 1
            try:
                self.record = next(records)
            except StopIteration:
                return
            except (ValueError, RecursionError) as error:  # nobody knows where the next record begins
                if isinstance(error, StoreError):
                    raise
                self.notes.refuse(self.place, not_json(error))
                return
            if chars:
                self.read_to = chars.position
            if isinstance(self.record, TooLongError):
                self.notes.refuse(self.place, self.record)
            else:
                yield self.record

    def _whole(self) -> Iterator[Any]:
        """The document, or why it is not read."""
        try:
            yield self.document()
        except TooLongError as error:
            yield error

    def lines(self) -> Iterator[Line]:
        """The lines of a file of JSON Lines, or of the part that is read, without a byte order mark."""
        before = self.span.before if self.span else 0
        try:
            with open_bytes(self.path) as file:
                if self.span:
                    file.seek(self.span.start)
                lines = bounded_lines(file, self.limit, self.span and self.span.stop)
                for number, (line, size) in enumerate(lines, before + 1):
                    yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, size
        except BROKEN_BYTES as error:
            raise StoreError(f"{self.name} cannot be read: {error}") from None

    def parsed(self, lines: Iterable[Line]) -> Iterator[Any]:
        """The records of lines. A line that cannot be read is refused."""
        for number, line, size in lines:
            self.read_to += len(line)
            if size > self.limit:
                self.number = number
                self.notes.refuse(self.place, TooLongError(self.limit), line[:EXCERPT].decode(errors="replace"))
                continue
            try:
                record = from_json(line, cache_strings="keys")
            except ValueError as error:
                if line.isspace() or not line:
                    continue
                self.number = number
                reason = utf8_fault(line) or not_json(error)
                self.notes.refuse(self.place, reason, line.decode(errors="replace"))
                continue
            self.number, self.record = number, record
            yield record

    def pylist(self, table: Any) -> Iterator[Any]:
        """Rows of an Arrow table or batch as dicts, few at a time if they are large."""
        size = table.nbytes // max(1, table.num_rows) + 1
        step = max(1, min(256, CHUNK // size))
        for start in range(0, table.num_rows, step):
            for row in table.slice(start, step).to_pylist():
                self.read_to += size
                yield row

    def document(self) -> Any:
        """The whole file as one value; of JSON Lines all lines, as a list."""
        if self.kind in ("lines", "array"):
            records = list(self.records())
            return records[0] if self.kind == "lines" and len(records) == 1 else records
        with self.text() as file:
            text = file.read(self.limit + 1)
        if len(text) > self.limit:
            raise TooLongError(self.limit)
        self.read_to += len(text)
        try:
            return from_json(text, cache_strings="keys")
        except ValueError as error:
            raise StoreError(f"{self.name} {not_json(error)}") from None

    def elements(self, key: str, needed: Sequence[str] = ()) -> Iterator[Any]:
        """Elements of the list ``key`` of a document, one at a time; ``before`` collects the other members: those that
        are ``needed`` before the first element, wherever they stand. ``ended`` says if all are in it at the end."""
        self.number, self.ended = 0, True
        if self.kind != "document":
            for document in list(self.records()):
                if not isinstance(document, dict):
                    self.notes.refuse(self.place, f"is a {type(document).__name__}, an object is needed")
                    continue
                if not isinstance(listed := document.get(key) or [], list):
                    self.notes.refuse(self.place, f"{key} is a {type(listed).__name__}, a list is needed")
                    continue
                self.before.clear()
                self.before.update((name, value) for name, value in document.items() if name != key)
                self.number = 0
                yield from self._counted(iter(listed))
            return
        self.before.clear()
        if self.span:
            yield from self._elements_of(self.span, key)
            return
        chars = self._chars()
        for element in self._counted(members(chars, key, self.before), chars):
            if self.number == 1 and set(needed) - self.before.keys():
                with suppress(ValueError, RecursionError):  # reported when the reading comes there
                    for _ in members(self._chars(), key, self.before):
                        pass
            yield element

    def _elements_of(self, span: Stretch, key: str) -> Iterator[Any]:
        """Elements of a part of the list, with the members before it, and at its end with those after it."""
        self.before.update(_members_before(self.path, self.path.stat().st_mtime_ns, key))
        self.number, self.ended = span.before, False
        yield from self._counted(self._part_of_list(span, chars := self._chars()), chars)
        if self.ended:
            with self.path.open("rb") as file:
                file.seek(span.stop + 1)
                yield from self._counted(later_members(Chars(Utf8Text(file, self.name, "strict")), key, self.before))

    def _part_of_list(self, span: Stretch, chars: Chars) -> Iterator[Any]:
        yield from between_commas(chars)
        with self.path.open("rb") as file:
            file.seek(span.stop)
            after = file.read(1)
        self.ended = after == b"]"
        if not after:
            raise ValueError("is not JSON: the list has no end")

    def list_start(self, key: str, needed: Sequence[str] = ()) -> int | None:
        """The byte at which the first element begins: of the list ``key``, or of the array that the file is. None if
        there is none, or if members that are ``needed`` are not before it."""
        chars = Chars(self.text(), self.limit)
        before: dict[str, Any] = {}
        with suppress(ValueError, RecursionError):  # reported when it is read
            if self.kind == "document" and not find_list(chars, key, before):
                return None
            chars.expect("[")
            if chars.peek() not in "]" and before.keys() >= set(needed):
                with self.text() as text, self.path.open("rb") as file:
                    mark = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
                    return mark + len(text.read(chars.position).encode())
        return None

    def _chars(self) -> Chars:
        if not self.span:
            return Chars(self.text(), self.limit)
        raw = io.BufferedReader(Stretched(self.path, self.span.start, self.span.stop), BUFFER)
        return Chars(Utf8Text(raw, self.name, "strict"), self.limit)


@lru_cache(maxsize=1)
def _members_before(path: Path, changed_ns: int, key: str) -> dict[str, Any]:
    """Members of a document before its list ``key``, parsed once for all parts of the list."""
    before: dict[str, Any] = {}
    find_list(Chars(Source(path).text()), key, before)
    return before


def each(source: Source, records: Iterable[Any], convert: Callable[[Any], Iterable[Row]]) -> Iterator[Row]:
    """Rows of all records. A record that ``convert`` cannot read is refused with its place and the key at fault."""
    for record in records:
        try:
            rows = list(convert(record))
        except BROKEN as error:
            if isinstance(error, StoreError):
                raise
            source.notes.refuse(source.place, error, excerpt(record))
            continue
        yield from rows
