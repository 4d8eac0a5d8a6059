"""Exports: rows of the buffer in another format, after a count of what they lose in it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import FORMATS, Format, named
from agentrl.datastore.formats.annotated import annotated, said_of
from agentrl.datastore.formats.files import replaced
from agentrl.datastore.formats.own import OwnFormat
from agentrl.datastore.formats.row_parts import present
from agentrl.datastore.read.lookup import Ids, id_array
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.redaction.rows import RowRedaction

BATCH_ROWS = 256

OnSecrets = Literal["redact", "refuse"]
"""What an export does with rows that hold secrets."""


@dataclass
class Exported:
    """What an export wrote. ``loses`` counts the rows that have something the format cannot hold, by what it is, and
    ``redacted`` the places of secrets that were replaced, by their kind; None if nobody looked for any. The tokens of
    ``unread`` rows were not searched for secrets, since nobody knows what they say. ``annotations`` were written with
    their rows."""

    path: str
    format: str
    rows: int
    records: int = 0
    loses: dict[str, int] = field(default_factory=dict)
    redacted: dict[str, int] | None = None
    unread: int = 0
    annotations: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def losses(buffer: "TrajectoryBuffer", ids: Ids, name: str | OwnFormat) -> dict[str, int]:
    """How many of these rows would lose what, most first."""
    format = named(name)
    counts: Counter[str] = Counter()
    for row in _rows(buffer, ids):
        left = format.leaves_out is not None and format.leaves_out(row)
        counts.update({"the whole row"} if left else present(row) & format.loses)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def export_rows(
    buffer: "TrajectoryBuffer",
    ids: Ids,
    path: Path,
    name: str | OwnFormat,
    *,
    force: bool = False,
    secrets: OnSecrets | None = None,
    annotations: bool = False,
) -> Exported:
    """Write rows to a file or folder, a bounded number in memory at a time. If ``secrets`` is "redact", placeholders
    stand for the secrets in them; if it is "refuse", rows with secrets are an error. With
    ``annotations`` records say what counts of what was said of their rows.

    The name's extension may ask for compression (``.gz``). The file or folder appears whole or not at all. Raises
    StoreError if it is there already; with ``force`` the old one is replaced as a whole. Raises StoreError too if no
    row gives a record, or if rows with secrets are refused: the error names rows and kinds, and no secret.
    """
    format = _writable(name)
    if not len(ids):
        raise StoreError("there are no rows to export; the filter or the selection is empty")
    exported = Exported(str(path), str(name), len(ids))
    rows, counts = _rows(buffer, ids), Counter[str]()
    given = said_of(buffer, ids) if annotations else {}
    redaction: RowRedaction | None = None
    if secrets == "refuse":
        held = held_secrets(buffer, ids, given)
        refuse_secrets(held)
        exported.unread = held.unread
    elif secrets == "redact":
        redaction = _redaction(buffer)
        rows = _redacted(redaction, rows, counts)
    if annotations:
        rows, exported.annotations = annotated(rows, given, redaction), sum(map(len, given.values()))
    with replaced(path, force) as working:
        assert format.write is not None
        exported.records = format.write(rows, working)
        if not exported.records:
            raise StoreError(
                f"none of the {len(ids)} rows gives a record of {name}, which leaves out rows without an outcome, and "
                "for preferences tasks without both a success and a failure; nothing was written"
            )
    if secrets is not None:
        exported.redacted = dict(sorted(counts.items()))
    return exported


def _redaction(buffer: "TrajectoryBuffer") -> "RowRedaction":
    from agentrl.datastore.redaction.rows import RowRedaction

    return RowRedaction(buffer.storage)


def _writable(name: str | OwnFormat) -> Format:
    format = named(name)
    if format.write is None:
        able = ", ".join(name for name, each in FORMATS.items() if each.write)
        raise StoreError(f"{name} is only read; formats that are written are {able}")
    return format


def _rows(buffer: "TrajectoryBuffer", ids: Ids) -> Iterator[Trajectory]:
    names = id_array(ids)
    for start in range(0, len(names), BATCH_ROWS):
        yield from buffer.get_many(names.slice(start, BATCH_ROWS))


class HeldSecrets(NamedTuple):
    """Rows that hold secrets, or of which something was said that does, and the places where these stand, by kind:
    those in the texts of a row, or in its tokens if its texts hold none. The tokens of ``unread`` further rows were not
    searched, since nobody knows what they say."""

    rows: list[str]
    places: Counter[str]
    unread: int


ANNOTATION = "ANNOTATION"
"""In place of the kind of a secret: what was said of a row holds one."""
_NOTHING: Mapping[str, Sequence[Annotation]] = MappingProxyType({})


def held_secrets(
    buffer: "TrajectoryBuffer", ids: Ids, given: Mapping[str, Sequence[Annotation]] = _NOTHING
) -> HeldSecrets:
    """Which of these rows hold secrets, or have annotations among those ``given`` that do."""
    from agentrl.datastore.redaction.rows import RowRedaction

    redaction = RowRedaction(buffer.storage, on_tokens="drop")  # nothing is written: they need not be encoded again
    held, counts, unread = list[str](), Counter[str](), 0
    for row in _rows(buffer, ids):
        cleaned = redaction.clean(row)
        counts.update(cleaned.counts)
        of_row = sum(redaction.annotation(each) is not each for each in given.get(row.trajectory_id, ()))
        counts.update({ANNOTATION: of_row} if of_row else {})
        if cleaned.changed or of_row:
            held.append(row.trajectory_id)
        unread += cleaned.unread
    return HeldSecrets(held, counts, unread)


def refuse_secrets(held: HeldSecrets) -> None:
    """Raise StoreError that names rows and kinds, and no secret, if there are any."""
    if not held.rows:
        return
    kinds = ", ".join(f"{kind} {number}" for kind, number in held.places.most_common())
    named = ", ".join(held.rows[:3]) + (f" and {len(held.rows) - 3} more" if len(held.rows) > 3 else "")
    raise StoreError(
        f"{len(held.rows)} rows hold secrets ({kinds}): {named}; nothing was written. Export a selection of "
        "trajectories.redact, leave such rows out by the rule `secrets`, or let `buffer export --secrets redact` write "
        "placeholders"
    )


def _redacted(redaction: "RowRedaction", rows: Iterator[Trajectory], counts: Counter[str]) -> Iterator[Trajectory]:
    """Rows with placeholders for their secrets, which are counted."""
    for row in rows:
        cleaned = redaction.clean(row)
        counts.update(cleaned.counts)
        yield cleaned.row
