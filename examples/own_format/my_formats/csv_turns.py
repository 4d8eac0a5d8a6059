"""Conversations as CSV: a line for each turn, with the columns ``conversation``, ``role``, ``text`` and ``score``."""

import csv
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from agentrl.datastore.formats.own import OwnFormat
from agentrl.datastore.formats.rows import make_row
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.schemas.trajectory import Trajectory

COLUMNS = ("conversation", "role", "text", "score")


class CsvTurns(OwnFormat):
    """Lines of one conversation follow each other. ``score`` stands in its last line. Calls and tokens are not
    carried."""

    suffix: ClassVar[str] = ".csv"

    delimiter: str = Field(",", min_length=1, max_length=1)
    success: float = Field(0.5, description="scores from this one on are successes")

    def fits(self, source: Source) -> int:
        with source.text() as text:
            return int(set(COLUMNS) <= set(next(csv.reader(text, delimiter=self.delimiter), [])))

    def rows(self, source: Source) -> Iterator[Row]:
        with source.text() as text:
            turns = csv.DictReader(text, delimiter=self.delimiter)
            conversations = (list(group) for _, group in groupby(turns, lambda turn: turn["conversation"]))
            yield from each(source, conversations, lambda lines: self._row(source, lines))

    def _row(self, source: Source, turns: list[dict[str, Any]]) -> Iterator[Row]:
        source.number += 1
        for turn in turns:
            source.notes.rest(turn, {*COLUMNS})
        score = float(turns[-1]["score"]) if turns[-1]["score"] else None
        yield make_row(
            [{"role": turn["role"], "content": turn["text"]} for turn in turns],
            source="csv-turns",
            task=turns[0]["conversation"],
            reward=score,
            success=None if score is None else score >= self.success,
        )

    def write(self, rows: Iterable[Trajectory], path: Path) -> int:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter=self.delimiter)
            writer.writerow(COLUMNS)
            records = 0
            for row in rows:
                for message in row.messages:
                    score = row.reward if message is row.messages[-1] and row.reward is not None else ""
                    writer.writerow([row.task_id, message.role.value, message.content, score])
                records += 1
            return records
