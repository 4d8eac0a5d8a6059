"""Alpaca, JSON Lines or a JSON array: ``{"instruction", "input", "output", "system", "history"}``. Read only.

``instruction`` and ``input`` are one user message, joined by a line; ``history`` is a list of earlier (user,
assistant) turns, ``system`` the system message. ``chosen`` and ``rejected`` instead of ``output`` (LLaMA-Factory)
are two rows of one task, a success with reward 1 and a failure with 0; ``kto_tag`` is the success. Cannot carry:
calls, tokens.
"""

from collections.abc import Iterator
from typing import Any

from agentrl.datastore.formats import regular
from agentrl.datastore.formats.messages import text_of
from agentrl.datastore.formats.origin import BESIDE, beside, unspent
from agentrl.datastore.formats.rows import canonical, make_row
from agentrl.datastore.formats.source import Row, Source, each

_KNOWN = frozenset({"instruction", "input", "output", "system", "history", "chosen", "rejected", "kto_tag"}) | BESIDE
_KNOWN_PAIR, _KNOWN_ONE = _KNOWN - {"output", "kto_tag"}, _KNOWN - {"rejected"}


def fits(head: Any) -> int:
    if not isinstance(head, dict) or not isinstance(head.get("instruction"), str):
        return 0
    return 3 if "output" in head or {"chosen", "rejected"} <= head.keys() else 0


def _asked(instruction: str, given: str | None) -> str:
    return "\n".join(filter(None, (instruction, given)))


def read(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        opening = [{"role": "system", "content": line["system"]}] if line.get("system") else []
        for asked, answer in line.get("history") or []:
            texts = [text_of(text, source.notes, "history.") for text in (asked, answer)]
            opening += [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
        asked = _asked(line["instruction"], line.get("input"))
        opening.append({"role": "user", "content": asked})
        paired = "chosen" in line
        source.notes.rest(line, _KNOWN_PAIR if paired else _KNOWN_ONE)
        origin = beside(line, source.notes)
        sides = [("output", source.notes.outcome(line, "kto_tag"))]
        if paired:
            sides = [("chosen", True), ("rejected", False)]
        content = canonical([line.get("system"), line.get("history"), asked])
        for index, (key, success) in enumerate(sides):
            yield make_row(
                [*opening, {"role": "assistant", "content": text_of(line[key], source.notes, f"{key}.")}],
                source="alpaca",
                origin=unspent(origin) if index else origin,
                task_content=content,
                sample_index=index,
                success=success,
                reward=float(bool(success)) if len(sides) == 2 else None,
            )

    return each(source, source.records(), convert)


class _Record(regular.Typed):
    instruction: str
    output: str
    input: str | None = None
    system: str | None = None
    history: list[tuple[str, str]] | None = None


def _row(record: _Record) -> regular.RegularRow:
    messages = [regular.MadeMessage("system", record.system)] if record.system else []
    for asked, answer in record.history or ():
        messages += [regular.MadeMessage("user", asked), regular.MadeMessage("assistant", answer)]
    asked = _asked(record.instruction, record.input)
    messages += [regular.MadeMessage("user", asked), regular.MadeMessage("assistant", record.output)]
    return regular.RegularRow(messages, {}, content=canonical([record.system, record.history, asked]))


REGULAR = regular.Regular("alpaca", _Record, _row)
