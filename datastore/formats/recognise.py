"""Which format a file is read by, by the evidence of its first records; readers that take each record by the format
that it fits; and what a file that fits none looks like."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import FORMATS, ByRecord, Format, named
from agentrl.datastore.formats.own import OwnFormat
from agentrl.datastore.formats.parts import by_record
from agentrl.datastore.formats.source import Row, Source

SUFFIXES = frozenset(
    {".json", ".jsonl", ".ndjson", ".traj", ".parquet", ".eval", ".csv", ".tsv", ".gz", ".zst"}
    | {".db", ".sqlite", ".sqlite3"}
)
"""Files of a folder that are looked at."""


@dataclass(frozen=True)
class Recognised:
    """The format that a file is read by, and why."""

    format: str | OwnFormat
    evidence: str = ""
    """In words, for the user."""
    looks: str | None = None
    """The format that the file looks like, if it was named and is another one."""
    forced: bool = False

    @property
    def reader(self) -> Format:
        """What reads the file. Without ``-f`` a record that does not fit its format is read by the one that it fits."""
        return named(self.format) if self.forced else _by_record(str(self.format))


def format_of(source: Source, format: str | OwnFormat | None, alone: bool) -> Recognised | None:
    """The format to read a file by. A format that is named wins. None if a file of a folder fits none, or not the one
    that is named, or if it is set aside; raises otherwise."""
    if not alone and source.path.suffix not in SUFFIXES:
        return None
    try:
        recognised = _named(source, format, alone) if format is not None else recognise(source)
    except StoreError as error:
        if not source.notes.quarantine:
            raise
        source.notes.refuse(source.name, error)
        return None
    if recognised or not alone:
        return recognised
    wanted = f"does not look like {format}" if format else "fits no format"
    unfit = StoreError(f"{wanted}: it is {_description(source)}; docs/reference/formats.md says what each looks like")
    if not source.notes.quarantine:
        raise StoreError(f"{source.name} {unfit}")
    source.notes.refuse(source.name, unfit)
    return None


def _named(source: Source, format: str | OwnFormat, alone: bool) -> Recognised | None:
    chosen = named(format)
    if chosen.fits(source):
        return Recognised(format, "named", forced=True)
    readable = source.kind in chosen.reads and (source.kind == "folder" or source.head is not None)
    if not alone or not readable or isinstance(format, OwnFormat) or format not in FORMATS:
        return None
    looks = recognise(source)
    return Recognised(format, "named", looks=str(looks.format) if looks else "no format", forced=True)


def recognise(source: Source) -> Recognised | None:
    """The format that fits a file best, by its first records; None if none does."""
    scores = {name: format.fits(source) for name, format in FORMATS.items()}
    best = max(scores, key=lambda name: scores[name])
    if not scores[best]:
        return None
    fits = FORMATS[best].fits
    if not isinstance(fits, ByRecord):
        return Recognised(best)
    number, fit = len(source.sample), sum(fits.of(record) > 0 for record in source.sample)
    alike = [name for name, score in scores.items() if score == scores[best] and name != best]
    evidence = f"{fit} of the first {number} records fit it" if number > 1 else "its first record fits it"
    return Recognised(best, evidence + (f", and {' and '.join(alike)} as well" if alike else ""))


def _by_record(name: str) -> Format:
    """The format of that name. If its records are rows of their own, each that does not fit it is read by the format of
    this kind that it fits best; if it fits none, the format of the file refuses it."""
    format = FORMATS[name]
    others = {other: form.fits for other, form in FORMATS.items() if form.cut is by_record}
    if name not in others:
        return format
    own = others.pop(name)

    def which(record: Any) -> str:
        if not isinstance(own, ByRecord) or own.of(record):
            return name
        scores = {other: fits.of(record) for other, fits in others.items() if isinstance(fits, ByRecord)}
        best = max(scores, key=lambda other: scores[other])
        return best if scores[best] else name

    def rows(source: Source) -> Iterator[Row]:
        for kind, run in groupby(source.records(), which):
            remark = None if kind == name else f"records read as {kind} in a file of {name}"
            source.given = _counted(run, source, remark)
            yield from FORMATS[kind].rows(source)

    return replace(format, rows=rows)


def _counted(records: Iterator[Any], source: Source, remark: str | None) -> Iterator[Any]:
    for record in records:
        if remark:
            source.notes.remark(remark)
        yield record


def _description(source: Source) -> str:
    kind = _KINDS[source.kind]
    head = source.head
    if isinstance(head, dict):
        what = f"{kind} with the {'columns' if source.kind in ('csv', 'parquet') else 'keys'} "
        known = next((f"; {text}" for keys, text in _LOOKS.items() if keys <= head.keys()), "")
        return what + ", ".join(map(str, list(head)[:12])) + known
    if isinstance(head, list):
        return f"{kind} of lists"
    if head is None and source.kind not in ("empty", "folder", "zip", "sqlite"):
        return f"text that is not {kind} ({source.headless})" if source.headless else f"text that is not {kind}"
    return kind


_KINDS = {
    "lines": "JSON Lines",
    "array": "a JSON array",
    "document": "a JSON document",
    "csv": "CSV",
    "parquet": "Parquet",
    "empty": "empty",
    "folder": "a folder",
    "zip": "a ZIP archive",
    "sqlite": "an SQLite database",
}
_LOOKS = {
    frozenset({"messages_display"}): "these are tau-bench's few-shot texts, without messages: import its results",
    frozenset({"simulation_index", "tasks"}): "this is a tau2 run without its simulations: import the folder it is in",
    frozenset({"input", "output", "timestamp"}): "these may be Langfuse's traces: export its observations",
    frozenset({"prompt", "completions", "labels"}): "this is TRL's stepwise supervision, which has no whole answer",
    frozenset({"responses_create_params"}): "these are NeMo Gym's inputs, without responses: import its rollouts",
    frozenset({"input_ids"}): "these are token ids without messages",
}
"""What files look like that people have, and that no reader takes: keys, and what to do."""
