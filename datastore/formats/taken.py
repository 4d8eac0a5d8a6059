"""What people and judges said of the rows of an import, as its records carry it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from agentrl.datastore.formats.annotated import KEY, SIDE, carried_by
from agentrl.datastore.formats.annotations import AT_ONCE, fitting, keep_refused, read
from agentrl.datastore.formats.labels import Fields
from agentrl.datastore.formats.notes import Notes, Unreadable
from agentrl.datastore.formats.rows import batched
from agentrl.schemas.annotation import Annotation

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.formats.source import Source


@dataclass(frozen=True)
class Kept:
    """What is kept of a record beside its row."""

    fields: Fields

    @property
    def of_each(self) -> bool:
        """Whether it may keep something of a record without annotations."""
        return bool(self.fields.wanted) or self.fields.key is not None

    def __call__(self, record: Any) -> dict[str, Any] | None:
        labels, annotations = self.fields(record), TakenAnnotations.keep(record)
        return {**(labels or {}), **annotations} if annotations else labels


class TakenAnnotations:
    """Collects the annotations of an import's rows under the ids that these get."""

    def __init__(self) -> None:
        self.fitting: list[Annotation] = []
        self.refused: list[Unreadable] = []

    @staticmethod
    def keep(record: Any) -> dict[str, Any] | None:
        """What is kept of a record until its row has an id."""
        given = carried_by(record)
        return {KEY: given} if given else None

    def take(
        self, rows: pa.Table, sources: "Sequence[Source]", kept: Sequence[Mapping[str, Any] | None], left: pa.Table
    ) -> None:
        """Take what records say of rows that are ``left`` of these."""
        places = [number for number, values in enumerate(kept) if values and values.get(KEY)]
        if not places:
            return
        appended = set(left["trajectory_id"].to_pylist())
        about = rows.select(["trajectory_id", "success", "n_tokens", "messages"]).take(places).to_pylist()
        for number, row in zip(places, about, strict=True):
            values = kept[number]
            if values and row["trajectory_id"] in appended:
                self._of_row(row, sources[number].name, values[KEY])

    def _of_row(self, row: dict[str, Any], source: str, given: Sequence[Mapping[str, Any]]) -> None:
        name, side = row["trajectory_id"], "chosen" if row["success"] else "rejected"
        turns = sum(message["role"] == "assistant" for message in row["messages"])
        mine = ({**each, "trajectory_id": name} for each in given if each.get(SIDE, side) == side)
        without = ({key: value for key, value in each.items() if key != SIDE} for each in mine)
        fine = filter(None, (read(f"{source}: {name}", each, source, {}, self.refused) for each in without))
        self.fitting += fitting([*fine], {name: row["n_tokens"]}, {name: turns}, {}, self.refused)

    def append(self, buffer: "TrajectoryBuffer", notes: Notes) -> None:
        """Append them. Those that do not fit their row are set aside in ``quarantine``. What is there already, as after
        an import that was killed, is not added again."""
        keep_refused(buffer, self.refused)
        if self.refused:
            notes.remark("annotations that do not fit their row and are set aside in quarantine", len(self.refused))
        parts: Iterator[list[Annotation]] = batched(self.fitting, AT_ONCE)
        for part in parts:
            buffer.annotations.append(part)
