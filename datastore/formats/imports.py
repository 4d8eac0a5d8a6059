"""Imports: files of any format become rows of the buffer, each file once, and everything that is dropped is counted."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.errors import InvalidRowsError, NoBufferError, StoreError
from agentrl.datastore.formats.columns import RowBatch, with_column
from agentrl.datastore.formats.divided import Read, read_divided
from agentrl.datastore.formats.grown import EarlierSessions, plan_removal, remove_superseded
from agentrl.datastore.formats.imported import Imported
from agentrl.datastore.formats.joined import SideFile
from agentrl.datastore.formats.labels import AS_SOURCE, Labelling, Labels
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.own import OwnFormat
from agentrl.datastore.formats.paths import companions, content, expand
from agentrl.datastore.formats.raw import MAX_RECORD
from agentrl.datastore.formats.recognise import Recognised, format_of
from agentrl.datastore.formats.rows import NAMELESS
from agentrl.datastore.formats.source import Source
from agentrl.datastore.formats.taken import Kept, TakenAnnotations
from agentrl.datastore.formats.workers import File, read_files
from agentrl.datastore.shards.divide import Divide, Dividing
from agentrl.datastore.shards.shard import digest_of
from agentrl.schemas.arrow import from_table
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.table.ingest import OnError

LOCK = "locks/import.lock"

CheckTokens = Callable[[Trajectory], str | None]
"""What is wrong with a row's tokens, None if nothing is."""


@dataclass(frozen=True)
class _File:
    source: Source
    recognised: Recognised
    fingerprint: str
    """Its last half is of the content; its first half is of the format, the labels and the stage."""


class _Owner:
    """The rows of one file: how many there are, and their ids by those of the source."""

    def __init__(self, file: _File, stage: str) -> None:
        self.file, self.stage, self.rows = file, stage, 0
        self.ids: dict[str, str] = {}

    def add(self, name: str) -> str:
        own = self.ids[name] = f"{self.stage}-{self.file.fingerprint[:12]}-{self.rows:06d}"
        self.rows += 1
        return own

    def as_dict(self) -> dict[str, Any]:
        file, how = self.file, {"format": str(self.file.recognised.format), "evidence": self.file.recognised.evidence}
        return {"path": file.source.name, **how, "fingerprint": file.fingerprint, "rows": self.rows}


def import_paths(
    buffer: "TrajectoryBuffer",
    paths: Sequence[str | Path],
    format: str | OwnFormat | None = None,
    *,
    stage: str = "import",
    labels: Labels = AS_SOURCE,
    on_error: "OnError" = "raise",
    prompts: bool = False,
    dry_run: bool = False,
    check_tokens: CheckTokens | None = None,
    max_record: int = MAX_RECORD,
    progress: Callable[[int, int, int], None] | None = None,
    dividing: Dividing | None = None,
) -> Imported:
    """Append the rows of files and folders in one commit; ``-`` is standard input.

    Without ``format`` each file's own is found. A file whose rows are in the buffer already is left out, so that
    another import of a folder takes only its new files. Rows get ids of this import, and keep the source's in
    ``source_id``, ``episode_id`` and ``task_id``. Raises StoreError if a path is missing, fits no format or not the one
    named, or if no row comes out; with ``on_error="quarantine"`` records that cannot be read are set aside instead.
    With ``prompts`` a record of chat without any assistant message is a row too. No record may take more than
    ``max_record`` bytes (of text: characters). ``progress`` is told how many files were read, of how many, and how many
    rows they gave. ``dividing`` gives how reading is divided; None reads in forks of this process. On any error the
    table stays as it was.
    """
    from agentrl.datastore.storage.lease import hold
    from agentrl.datastore.upkeep.forgetting import IMPORT_RUN

    options: dict[str, Any] = {"prompts": prompts, "check_tokens": check_tokens, "max_record": max_record}
    with reading(paths, format, stage=stage, labels=labels, on_error=on_error, **options) as reading_files:
        reading_files.result.dry_run, reading_files.progress = dry_run, progress
        if dry_run:  # in forks, whatever reads them later: nothing of it is kept
            reading_files.leave_out(_fingerprints(buffer, stage))
            reading_files.earlier = EarlierSessions(buffer, stage, reading_files.is_same)
            reading_files.check()
            return reading_files.finish()
        with ExitStack() as stack:
            stack.enter_context(hold(buffer.storage, LOCK))
            if dividing:
                own = buffer.storage.working_folder() / "import"
                reading_files.divide = stack.enter_context(dividing(f"import-{digest_of(buffer.store)[:12]}", own))
            remove_superseded(buffer)  # of an import that was killed
            reading_files.leave_out(_fingerprints(buffer, stage))
            reading_files.earlier = EarlierSessions(buffer, stage, reading_files.is_same)
            if reading_files.files:
                fingerprint = reading_files.result.fingerprint = reading_files.fingerprint(buffer.version)
                run_id = f"{IMPORT_RUN}{fingerprint[:16]}"
                rows = reading_files.planning(buffer, run_id, reading_files.tables(fingerprint[:16]))
                done = buffer.append(rows, stage=stage, fingerprint=fingerprint, run_id=run_id, on_error=on_error)
                reading_files.result.version, reading_files.result.quarantined = done.version, done.quarantined
                reading_files.result.rows = done.rows
                reading_files.set_aside(buffer, f"{stage}-{fingerprint[:8]}")
                reading_files.remove_superseded(buffer)
        return reading_files.finish()


@contextmanager
def reading(
    paths: Sequence[str | Path],
    format: str | OwnFormat | None = None,
    *,
    stage: str = "import",
    labels: Labels = AS_SOURCE,
    on_error: "OnError" = "raise",
    prompts: bool = False,
    check_tokens: CheckTokens | None = None,
    max_record: int = MAX_RECORD,
) -> "Iterator[Reading]":
    """Files that were recognised, to take rows from within the block: what a stage that appends itself uses."""
    notes = Notes(on_error == "quarantine", prompts)
    with TemporaryDirectory(prefix="agentrl-import-") as folder:
        yield Reading(expand(paths, Path(folder)), format, stage, labels, notes, check_tokens, max_record)


class Reading:
    """Recognised files, their rows and what was noticed on the way."""

    def __init__(
        self,
        paths: Iterable[tuple[Path, str, bool]],
        format: str | OwnFormat | None,
        stage: str,
        labels: Labels,
        notes: Notes,
        check_tokens: CheckTokens | None,
        max_record: int,
    ) -> None:
        self.stage, self.labels, self.notes, self.check_tokens = stage, labels, notes, check_tokens
        self.result, self.how = Imported(), labels.ingredients()
        self.progress: Callable[[int, int, int], None] | None = None
        self.earlier: EarlierSessions | None = None
        self.divide: Divide | None = None
        """By what the files are read; None: by forks of this process, if they are large."""
        joined = SideFile(labels.join, labels.on or "source_id", notes) if labels.join else None
        self.labelling, self.annotations = Labelling(labels, notes, joined), TakenAnnotations()
        self.files: list[_File] = []
        for path, name, alone in paths:
            source = Source(path, notes, name)
            source.limit = max_record
            chosen = format_of(source, format, alone)
            if chosen is None:
                self.result.skipped.append(name)
            else:
                try:
                    self.files.append(_File(source, chosen, self._fingerprint(source, chosen.format)))
                except StoreError as error:  # the file is broken further on
                    if not notes.quarantine:
                        raise
                    notes.refuse(name, error)
                    continue
                if chosen.looks:
                    notes.remark(f"files that look like {chosen.looks} and are read as {chosen.format}, which is named")
        self._join_companions()
        if not self.files:
            named_ones = ", ".join(self.result.skipped[:5]) or "no file at all"
            bad = [f"; {record.place} {record.reason}" for record in notes.unreadable[:1]]
            raise StoreError(
                f"nothing to import: no format fits {named_ones}{''.join(bad)}; "
                "docs/reference/formats.md lists the formats"
            )

    def _join_companions(self) -> None:
        """Leave out files that are read with another one."""
        paths = [path for file in self.files for path in companions(file.source, file.recognised.format)]
        if joined := {path.resolve() for path in paths}:
            before, self.files = self.files, [f for f in self.files if f.source.path.resolve() not in joined]
            if count := len(before) - len(self.files):
                self.notes.remark("files that are read with another file: sub-agents with their session", count)

    def _fingerprint(self, source: Source, format: str | OwnFormat) -> str:
        return self._of_content(format, content(source, format)[:16])

    def _of_content(self, format: str | OwnFormat, half: str) -> str:
        asked = ["prompts"] if self.notes.prompts else []
        how = json.dumps([str(format), self.stage, self.how, *asked], sort_keys=True)
        return hashlib.blake2b(f"{how}{half}".encode(), digest_size=8).hexdigest() + half

    def is_same(self, fingerprint: str) -> bool:
        """Whether a file was imported as those of this import are: by a format, the stage and the labels."""
        formats = {str(file.recognised.format) for file in self.files}
        return any(self._of_content(format, fingerprint[16:]) == fingerprint for format in formats)

    def planning(self, buffer: "TrajectoryBuffer", run_id: str, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The tables. After the last one, and before they are committed, it is written down what they supersede, and
        what was said of their rows: the next import would pass over files whose rows are there."""
        yield from self.annotating(buffer, tables)
        plan_removal(buffer, run_id, self.earlier.superseded if self.earlier else [])

    def annotating(self, buffer: "TrajectoryBuffer", tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The tables. After the last one, and before they are committed, what was said of their rows is appended."""
        yield from tables
        self.annotations.append(buffer, self.notes)

    def remove_superseded(self, buffer: "TrajectoryBuffer") -> None:
        self.result.superseded, stay = remove_superseded(buffer)
        if stay:
            self.notes.remark("earlier states of sessions that stay, since a stage or an annotation names them", stay)

    def fingerprint(self, version: int | None) -> str:
        """Fingerprint of these files, imported at this version of the table."""
        text = f"{version}".join(sorted(file.fingerprint for file in self.files))
        return hashlib.blake2b(f"{version}/{text}".encode(), digest_size=16).hexdigest()

    def leave_out(self, present: set[str]) -> None:
        """Drop files whose fingerprints are ``present``, and doubled ones of this import."""
        contents = {fingerprint[16:] for fingerprint in present}
        new: list[_File] = []
        for file in self.files:
            if file.fingerprint in present:
                self.result.known.append(file.source.name)
                continue
            if file.fingerprint[16:] in contents:
                self.result.repeats.append(file.source.name)
            present.add(file.fingerprint)
            contents.add(file.fingerprint[16:])
            new.append(file)
        self.files = new

    def tables(self, name: str, renamed: Callable[[pa.Table], pa.Table] = lambda rows: rows) -> Iterator[pa.Table]:
        """Rows of all files; ``name`` tells the episodes and groups of this import from those of others, and
        ``renamed`` gives rows the ids that they are to have. Raises StoreError if there are none."""
        owners = {id(file.source): _Owner(file, self.stage) for file in self.files}
        for batch in self._saying_what_files_look_like(self._batches()):
            own = self._own(batch, [owners[id(source)] for source in batch.sources], name)
            rows = labelled = renamed(self.labelling.apply(own, batch.kept))
            if self.earlier:
                rows = self.earlier.without(rows)
                self.result.present = self.earlier.present
            self.annotations.take(labelled, batch.sources, batch.kept, rows)
            self.result.count(rows)
            if self.progress and batch.sources:
                self.progress(list(owners).index(id(batch.sources[-1])), len(owners), self.result.rows)
            yield rows
        for owner in owners.values():
            self.result.files.append(owner.as_dict())
            if not owner.rows:
                self.notes.remark("files without a row")
        if self.files and not self.result.rows and not self.result.present:
            bad = [f"; {record.place} cannot be read: {record.reason}" for record in self.notes.unreadable[:1]]
            raise StoreError(f"{self.files[0].source.name} gives no row{''.join(bad)}; nothing was imported")
        if self.result.rows:
            self.labelling.finish()

    def _batches(self) -> Iterator[RowBatch]:
        keep = Kept(self.labelling.fields)
        if self.divide is None:
            return read_files([File(file.source, file.recognised.reader) for file in self.files], keep)
        reads = [Read(file.source, file.recognised, file.fingerprint) for file in self.files]
        return read_divided(reads, keep, self.divide)

    def _saying_what_files_look_like(self, batches: Iterator[RowBatch]) -> Iterator[RowBatch]:
        """The batches. An error of a file that does not look like the format that was named says so."""
        try:
            yield from batches
        except StoreError as error:
            for file in self.files:
                if (looks := file.recognised.looks) and file.source.name in str(error):
                    format = file.recognised.format
                    raise StoreError(f"{error}; it does not look like {format}, it looks like {looks}") from None
            raise

    def _own(self, batch: RowBatch, owners: "list[_Owner]", name: str) -> pa.Table:
        """Rows under ids of this import."""
        table, labels, mark = batch.table, self.labels, name[:8]
        sources = table.select(
            ["trajectory_id", "episode_id", "task_id", "group_id", "parent_id", "fork_at", "source_id"]
        ).to_pydict()
        ids = [owner.add(name) for owner, name in zip(owners, sources["trajectory_id"], strict=True)]
        with_parents = zip(owners, sources["parent_id"], strict=True)
        parents = [owner.ids.get(parent) if parent else None for owner, parent in with_parents]
        lost = [bool(before and not now) for before, now in zip(sources["parent_id"], parents, strict=True)]
        if any(lost):
            self.notes.ignored["parent_id"] += sum(lost)
        tasks = [f"{labels.task_prefix or ''}{task}" for task in sources["task_id"]]
        columns: dict[str, list[Any]] = {
            "trajectory_id": ids,
            "episode_id": [
                f"{own if episode == NAMELESS else episode}@{mark}"
                for own, episode in zip(ids, sources["episode_id"], strict=True)
            ],
            "task_id": tasks,
            "group_id": [f"{group or task}@{mark}" for group, task in zip(sources["group_id"], tasks, strict=True)],
            "parent_id": parents,
            "fork_at": [0 if without else fork_at for fork_at, without in zip(sources["fork_at"], lost, strict=True)],
            "pipeline": [None] * len(ids),
            "stage": [""] * len(ids),
            "run_id": [""] * len(ids),
            "fingerprint": [owner.file.fingerprint for owner in owners],
            "source_id": [
                given or (None if name == NAMELESS else name)
                for given, name in zip(sources["source_id"], sources["trajectory_id"], strict=True)
            ],
            "source_file": [owner.file.source.name for owner in owners],
        }
        for key in ("env", "split", "policy"):
            if (value := getattr(labels, key)) is not None:
                columns[key] = [value] * len(ids)
        for key, values in columns.items():
            table = with_column(table, key, values)
        return self._with_tokenizer(table) if pc.any(pc.greater(table["n_tokens"], 0)).as_py() else table

    def _with_tokenizer(self, table: pa.Table) -> pa.Table:
        """The table with the tokenizer of its rows with tokens, if the import names one, checked on each of them."""
        named_one = self.labels.tokenizer
        given, tokens = table["tokenizer"].to_pylist(), table["n_tokens"].to_pylist()
        if named_one is None:
            if count := sum(bool(has and not tokenizer) for tokenizer, has in zip(given, tokens, strict=True)):
                self.notes.remark(
                    "rows with tokens of an unknown tokenizer: name it with --tokenizer to train on them", count
                )
            return table
        for index, (tokenizer, has) in enumerate(zip(given, tokens, strict=True)):
            if not has:
                continue
            name = table["trajectory_id"][index].as_py()
            if tokenizer and tokenizer != named_one:
                raise StoreError(f"{name} was tokenised by {tokenizer}, not by {named_one}")
            if self.check_tokens:
                [row] = from_table(Trajectory, table.slice(index, 1))
                if problem := self.check_tokens(row):
                    raise StoreError(f"the tokens of {name} are not of the tokenizer that is named: {problem}")
            given[index] = named_one
        return with_column(table, "tokenizer", given)

    def check(self) -> None:
        """Read and check every row as an append would, and keep none."""
        from agentrl.datastore.table.validation import validate

        seen: set[str] = set()
        for table in self.tables("dry-run"):
            problems = validate(table, seen, 0)
            if problems and not self.notes.quarantine:
                raise InvalidRowsError([(p.row, p.trajectory_id, p.field, p.reason) for p in problems])
            self.result.quarantined += len({problem.row for problem in problems})

    def set_aside(self, buffer: "TrajectoryBuffer", name: str) -> None:
        """Keep records that could not be read, as JSON Lines beside the rows that appends set aside."""
        if self.notes.unreadable:
            lines = "".join(json.dumps(record.as_dict(), ensure_ascii=False) + "\n" for record in self.notes.unreadable)
            buffer.storage.write(f"quarantine/{name}-records.jsonl", lines.encode("utf-8", "replace"))

    def finish(self) -> Imported:
        result = self.result
        result.annotations = len(self.annotations.fitting)
        result.ignored = dict(sorted(self.notes.ignored.items(), key=lambda item: (-item[1], item[0])))
        result.remarks = dict(self.notes.remarks.most_common())
        result.unreadable = [record.as_dict() for record in self.notes.unreadable]
        return result


def _fingerprints(buffer: "TrajectoryBuffer", stage: str) -> set[str]:
    """Fingerprints of all files that this stage imported."""
    import polars as pl

    try:
        rows = buffer.scan().filter(pl.col("stage") == stage).select(pl.col("fingerprint").unique()).collect()
    except NoBufferError:
        return set()
    return set(rows["fingerprint"])
