"""Imports: files of any format become rows of the buffer, each file once, and everything that is dropped is counted."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from datastore.errors import InvalidRowsError, NoBufferError, StoreError
from datastore.formats import detect, named
from datastore.formats.labels import AS_SOURCE, CHECKED_ROWS, Labels, labelled
from datastore.formats.notes import Notes
from datastore.formats.rows import NAMELESS, batched
from datastore.formats.source import Source
from schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from datastore.buffer import TrajectoryBuffer
    from datastore.ingest import OnError

SUFFIXES = frozenset({".json", ".jsonl", ".ndjson", ".traj", ".parquet", ".eval", ".gz"})
"""Files of a folder that are looked at."""
LOCK = "locks/import.lock"

CheckTokens = Callable[[Trajectory], str | None]
"""What is wrong with a row's tokens, None if nothing is."""


@dataclass
class Imported:
    """What an import did, or with ``dry_run`` would do.

    ``fingerprint`` is that of the import, which ``agentrl buffer forget`` takes. ``files`` has the rows of each file.
    ``known`` are files whose rows are in the buffer already, ``repeats`` files whose content is there under other
    labels, and ``skipped`` files of a folder that no format fits.
    """

    fingerprint: str = ""
    dry_run: bool = False
    version: int | None = None
    rows: int = 0
    messages: int = 0
    calls: int = 0
    tokens: int = 0
    successes: int = 0
    unscored: int = 0
    quarantined: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    ignored: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, int] = field(default_factory=dict)
    unreadable: list[dict[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def count(self, row: Trajectory) -> None:
        self.rows += 1
        self.messages += len(row.messages)
        self.calls += row.n_tool_calls
        self.tokens += row.n_tokens
        self.successes += bool(row.success)
        self.unscored += row.success is None and row.reward is None


@dataclass(frozen=True)
class _File:
    source: Source
    format: str
    fingerprint: str
    """Its last half is of the content; its first half is of the format, the labels and the stage."""


def import_paths(
    buffer: "TrajectoryBuffer",
    paths: Sequence[str | Path],
    format: str | None = None,
    *,
    stage: str = "import",
    labels: Labels = AS_SOURCE,
    on_error: "OnError" = "raise",
    dry_run: bool = False,
    check_tokens: CheckTokens | None = None,
) -> Imported:
    """Append the rows of files and folders in one commit; ``-`` is standard input.

    Without ``format`` each file's own is found. A file whose rows are in the buffer already is left out, so that
    another import of a folder takes only its new files. Rows get ids of this import, and keep the source's in
    ``episode_id`` and ``task_id``. Raises StoreError if a path is missing, fits no format or not the one named, or
    if no row comes out; with ``on_error="quarantine"`` records that cannot be read are set aside instead. On any
    error the table stays as it was.
    """
    from datastore.lease import hold
    from datastore.upkeep.forgetting import IMPORT_RUN

    with reading(paths, format, stage=stage, labels=labels, on_error=on_error, check_tokens=check_tokens) as found:
        found.result.dry_run = dry_run
        if dry_run:
            found.leave_out(_fingerprints(buffer, stage))
            found.check()
            return found.finish()
        with hold(buffer.place, LOCK):
            found.leave_out(_fingerprints(buffer, stage))
            if found.files:
                fingerprint = found.result.fingerprint = found.fingerprint(buffer.version)
                run_id = f"{IMPORT_RUN}{fingerprint[:16]}"
                rows = found.rows(fingerprint[:16])
                done = buffer.append(rows, stage=stage, fingerprint=fingerprint, run_id=run_id, on_error=on_error)
                found.result.version, found.result.quarantined = done.version, done.quarantined
                found.result.rows = done.rows
                found.set_aside(buffer, f"{stage}-{fingerprint[:8]}")
        return found.finish()


@contextmanager
def reading(
    paths: Sequence[str | Path],
    format: str | None = None,
    *,
    stage: str = "import",
    labels: Labels = AS_SOURCE,
    on_error: "OnError" = "raise",
    check_tokens: CheckTokens | None = None,
) -> "Iterator[Reading]":
    """Files that were recognised, to take rows from within the block: what a stage that appends itself uses."""
    notes = Notes(quarantine=on_error == "quarantine")
    with TemporaryDirectory(prefix="agentrl-import-") as folder:
        yield Reading(_expand(paths, Path(folder)), format, stage, labels, notes, check_tokens)


class Reading:
    """Recognised files, their rows and what was noticed on the way."""

    def __init__(
        self,
        paths: Iterable[tuple[Path, str, bool]],
        format: str | None,
        stage: str,
        labels: Labels,
        notes: Notes,
        check_tokens: CheckTokens | None,
    ) -> None:
        self.stage, self.labels, self.notes, self.check_tokens = stage, labels, notes, check_tokens
        self.result = Imported()
        self.files: list[_File] = []
        for path, name, alone in paths:
            source = Source(path, notes, name)
            chosen = _format_of(source, format, alone)
            if chosen is None:
                self.result.skipped.append(name)
            else:
                self.files.append(_File(source, chosen, self._fingerprint(source, chosen)))
        if not self.files:
            named_ones = ", ".join(self.result.skipped[:5]) or "no file at all"
            raise StoreError(f"nothing to import: no format fits {named_ones}; docs/formats.md lists the formats")

    def _fingerprint(self, source: Source, format: str) -> str:
        how = json.dumps([format, self.stage, asdict(self.labels)], sort_keys=True)
        content = source.digest()[:16]
        return hashlib.blake2b(f"{how}{content}".encode(), digest_size=8).hexdigest() + content

    def fingerprint(self, version: int | None) -> str:
        """Fingerprint of these files, imported at this version of the table."""
        text = f"{version}".join(sorted(one.fingerprint for one in self.files))
        return hashlib.blake2b(f"{version}/{text}".encode(), digest_size=16).hexdigest()

    def leave_out(self, present: set[str]) -> None:
        """Drop files whose fingerprints are ``present``, and doubled ones of this import."""
        contents = {one[16:] for one in present}
        new: list[_File] = []
        for one in self.files:
            if one.fingerprint in present:
                self.result.known.append(one.source.name)
                continue
            if one.fingerprint[16:] in contents:
                self.result.repeats.append(one.source.name)
            present.add(one.fingerprint)
            contents.add(one.fingerprint[16:])
            new.append(one)
        self.files = new

    def rows(self, name: str) -> Iterator[Trajectory]:
        """Rows of all files; ``name`` tells the episodes and groups of this import from those of others. Raises
        StoreError if there are none."""
        for file in self.files:
            before = self.result.rows
            for row in labelled(self._own(file, name), self.labels):
                self.result.count(row)
                yield row
            rows = self.result.rows - before
            self.result.files.append(
                {"path": file.source.name, "format": file.format, "fingerprint": file.fingerprint, "rows": rows}
            )
            if not rows:
                self.notes.remark("files without a row")
        if self.files and not self.result.rows:
            bad = [f"; {one.place} cannot be read: {one.reason}" for one in self.notes.unreadable[:1]]
            raise StoreError(f"{self.files[0].source.name} gives no row{''.join(bad)}; nothing was imported")

    def _own(self, file: _File, name: str) -> Iterator[tuple[Trajectory, Any]]:
        """Rows under ids of this import, each with the record that it came from."""
        ids: dict[str, str] = {}
        source, labels = file.source, self.labels
        for place, row in enumerate(named(file.format).read(source)):
            own = f"{self.stage}-{file.fingerprint[:12]}-{place:06d}"
            ids[row.trajectory_id] = own
            task = f"{labels.task_prefix}{row.task_id}" if labels.task_prefix else row.task_id
            change: dict[str, Any] = {
                "trajectory_id": own,
                "episode_id": f"{own if row.episode_id == NAMELESS else row.episode_id}@{name[:8]}",
                "task_id": task,
                "group_id": f"{row.group_id or task}@{name[:8]}",
                "parent_id": ids.get(row.parent_id) if row.parent_id else None,
                "pipeline": None,
                "stage": "",
                "run_id": "",
                "fingerprint": file.fingerprint,
            }
            if row.parent_id and not change["parent_id"]:
                self.notes.ignored["parent_id"] += 1
                change["fork_at"] = 0
            for key in ("env", "split", "policy"):
                if (value := getattr(labels, key)) is not None:
                    change[key] = value
            if row.input_ids:
                change |= self._tokens(row)
            yield row.model_copy(update=change), source.record

    def _tokens(self, row: Trajectory) -> dict[str, Any]:
        """The tokenizer of a row with tokens, if the import names one, checked on the row."""
        named_one = self.labels.tokenizer
        if named_one is None:
            if not row.tokenizer:
                self.notes.remark("rows with tokens of an unknown tokenizer: name it with --tokenizer to train on them")
            return {}
        if row.tokenizer and row.tokenizer != named_one:
            raise StoreError(f"{row.trajectory_id} was tokenised by {row.tokenizer}, not by {named_one}")
        if self.check_tokens and (problem := self.check_tokens(row)):
            raise StoreError(f"the tokens of {row.trajectory_id} are not of the tokenizer that is named: {problem}")
        return {"tokenizer": named_one}

    def check(self) -> None:
        """Read and check every row as an append would, and keep none."""
        from datastore.ingest import as_table
        from datastore.validation import validate

        seen: set[str] = set()
        for part in batched(self.rows("dry-run"), CHECKED_ROWS):
            problems = validate(as_table(part), seen, 0)
            if problems and not self.notes.quarantine:
                raise InvalidRowsError([(p.row, p.trajectory_id, p.field, p.reason) for p in problems])
            self.result.quarantined += len({problem.row for problem in problems})

    def set_aside(self, buffer: "TrajectoryBuffer", name: str) -> None:
        """Keep records that could not be read, as JSON Lines beside the rows that appends set aside."""
        if self.notes.unreadable:
            lines = "".join(json.dumps(one.as_dict(), ensure_ascii=False) + "\n" for one in self.notes.unreadable)
            buffer.place.write(f"quarantine/{name}-records.jsonl", lines.encode("utf-8", "replace"))

    def finish(self) -> Imported:
        result = self.result
        result.ignored = dict(self.notes.ignored.most_common())
        result.remarks = dict(self.notes.remarks.most_common())
        result.unreadable = [one.as_dict() for one in self.notes.unreadable]
        return result


def _expand(paths: Sequence[str | Path], folder: Path) -> Iterator[tuple[Path, str, bool]]:
    """Files and folders that are a unit, their names, and whether each was named itself."""
    if not paths:
        raise StoreError("give at least one file or folder to import, or - for standard input")
    for given in map(str, paths):
        if given == "-":
            copy = folder / "stdin"
            with copy.open("wb") as target:
                shutil.copyfileobj(sys.stdin.buffer, target)
            yield copy, "standard input", True
            continue
        path = Path(given)
        if not path.exists():
            raise StoreError(f"there is nothing to import at {path}")
        if path.is_file() or detect(Source(path)):
            yield path, given, True
            continue
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path).parts
            if file.is_file() and not any(part.startswith((".", "_")) for part in inside):
                yield file, str(file), False


def _format_of(source: Source, format: str | None, alone: bool) -> str | None:
    """The format to read a file by. None if it fits none and came from a folder; raises if it was named itself."""
    if not alone and source.path.suffix not in SUFFIXES:
        return None
    try:
        if format is not None:
            if named(format).fits(source):
                return format
        elif found := detect(source):
            return found
        if not alone:
            return None
    except StoreError:
        if not alone and source.notes.quarantine:
            return None
        raise
    looks = detect(source)
    if format is not None and looks:
        raise StoreError(f"{source.name} does not look like {format}, it looks like {looks}; leave -f out")
    wanted = f"does not look like {format}" if format else "fits no format"
    raise StoreError(f"{source.name} {wanted}: it is {_description(source)}; docs/formats.md says what each looks like")


def _description(source: Source) -> str:
    kinds = {"lines": "JSON Lines", "array": "a JSON array", "document": "a JSON document", "parquet": "Parquet"}
    kind = kinds.get(source.kind, {"empty": "empty", "folder": "a folder", "zip": "a ZIP archive"}.get(source.kind, ""))
    head = source.head
    if isinstance(head, dict):
        return f"{kind} with the keys {', '.join(map(str, list(head)[:12]))}"
    if isinstance(head, list):
        return f"{kind} of lists"
    return kind if source.kind in ("empty", "folder", "zip") else f"text that is not {kind}" if head is None else kind


def _fingerprints(buffer: "TrajectoryBuffer", stage: str) -> set[str]:
    """Fingerprints of all files that this stage imported."""
    import polars as pl

    try:
        rows = buffer.scan().filter(pl.col("stage") == stage).select(pl.col("fingerprint").unique()).collect()
    except NoBufferError:
        return set()
    return set(rows["fingerprint"])
