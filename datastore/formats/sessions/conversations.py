"""Lines of a Claude Code session in the order in which the model had them.

A line names the line that it follows (``parentUuid``), and stands anywhere in the file. The last message is the end of
the session; what it follows, back to the first line, are the session's messages. Beside this chain stand pieces of one
answer (lines of one ``message.id``) and results of parallel calls: they belong to it. Every other message is of a
branch that was left: somebody went back and asked again. A line without a parent that is in the file follows the line
before it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class SessionLine(NamedTuple):
    """A record and its number in the file, from 1."""

    number: int
    record: dict[str, Any]

    @property
    def speaks(self) -> bool:
        """Whether it is a message of the model or to it."""
        return is_message(self.record)


@dataclass
class SessionPart:
    """Lines that were one context of the model. ``own`` are those that no earlier conversation has."""

    lines: list[SessionLine]
    own: list[SessionLine]
    left: bool = False
    """Whether somebody went back to before its last messages."""
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = min(line.number for line in self.own)


def is_message(record: dict[str, Any]) -> bool:
    return record.get("type") in ("user", "assistant") and isinstance(record.get("message"), dict)


def is_boundary(record: dict[str, Any]) -> bool:
    """Whether a compaction ends what was said before this line."""
    return record.get("subtype") == "compact_boundary"


def conversations(lines: list[SessionLine], apart: bool = False) -> Iterator[SessionPart]:
    """Conversations of the lines of one agent; with ``apart`` those of several agents, which have no line in common."""
    chain = _Chain(lines)
    for part in chain.components() if apart else [range(len(lines))]:
        yield from chain.conversations(part)


class _Chain:
    def __init__(self, lines: list[SessionLine]) -> None:
        self.lines = lines
        self.by_uuid = {
            uuid: index for index, line in enumerate(lines) if isinstance(uuid := line.record.get("uuid"), str)
        }
        self.parents = [self._parent(index) for index in range(len(lines))]
        self.pieces: dict[Any, list[int]] = {}
        self.results: dict[str, list[int]] = {}
        for index, line in enumerate(lines):
            if name := _answer(line):
                self.pieces.setdefault(name, []).append(index)
            for call in _block_ids(line, "tool_result", "tool_use_id"):
                self.results.setdefault(call, []).append(index)

    def _parent(self, index: int) -> int | None:
        record = self.lines[index].record
        for key in ("parentUuid", "logicalParentUuid"):
            parent = self.by_uuid.get(name) if isinstance(name := record.get(key), str) else None
            if parent is not None and parent != index:
                return parent
        begins = record.get("parentUuid", "") is None and "uuid" in record and not is_boundary(record)
        return None if begins or index == 0 else index - 1

    def path(self, index: int | None) -> list[int]:
        """A line and all that it follows, the first one first. Lines that follow each other in a circle are cut."""
        seen: dict[int, None] = {}
        while index is not None and index not in seen:
            seen[index] = None
            index = self.parents[index]
        return list(reversed(seen))

    def components(self) -> list[list[int]]:
        parts: dict[int, list[int]] = {}
        roots: dict[int, int] = {}
        for index in range(len(self.lines)):
            way: dict[int, None] = {}
            at: int | None = index
            while at is not None and at not in roots and at not in way:
                way[at] = None
                at = self.parents[at]
            root = roots[at] if at in roots else next(reversed(way))
            roots.update(dict.fromkeys(way, root))
            parts.setdefault(root, []).append(index)
        return list(parts.values())

    def conversations(self, part: Iterable[int]) -> Iterator[SessionPart]:
        speaking = [index for index in part if self.lines[index].speaks]
        taken: set[int] = set()
        for number, leaf in enumerate(reversed(speaking)):
            if leaf in taken:
                continue
            contexts = self._contexts(self.path(leaf))
            contexts[-1] += self._after(leaf)
            for context in contexts if number == 0 else contexts[-1:]:
                indices = self._told(context)
                own = [line for index in indices if index not in taken and (line := self.lines[index]).speaks]
                taken.update(indices)
                if own:
                    yield SessionPart([self.lines[index] for index in indices], own, left=number > 0)

    def _after(self, leaf: int) -> list[int]:
        """Lines that are no messages and follow the last one, such as that turns were used up."""
        after = [leaf]
        for index in range(leaf + 1, len(self.lines)):
            if self.parents[index] == after[-1] and not self.lines[index].speaks:
                after.append(index)
        return after[1:]

    def _contexts(self, path: list[int]) -> list[list[int]]:
        """The parts of a path between compactions."""
        contexts: list[list[int]] = [[]]
        for index in path:
            if is_boundary(self.lines[index].record):
                contexts.append([])
            contexts[-1].append(index)
        return contexts

    def _beside(self, context: Iterable[int]) -> Iterator[int]:
        """The lines of a path, each answer with all its pieces and all results of its calls."""
        for index in context:
            line = self.lines[index]
            pieces = self.pieces.get(name, [index]) if (name := _answer(line)) else [index]
            yield from pieces
            calls = [call for piece in pieces for call in _block_ids(self.lines[piece], "tool_use", "id")]
            if calls and line.record.get("type") == "assistant":
                yield from sorted({result for call in calls for result in self.results.get(call, ())})

    def _told(self, context: list[int]) -> list[int]:
        """What the model had: the lines of the path, and after a summary the messages that the compaction kept."""
        told = list(dict.fromkeys(self._beside(context)))
        if not told or not is_boundary(record := self.lines[told[0]].record):
            return told
        anchor, kept = self._kept(record)
        kept = [index for index in dict.fromkeys(self._beside(kept)) if index not in set(told)]
        after = told.index(anchor) + 1 if anchor in told else 1
        return told[:after] + kept + told[after:]

    def _kept(self, boundary: dict[str, Any]) -> tuple[int | None, list[int]]:
        """The line after which the kept messages stand, and these."""
        about = boundary.get("compactMetadata") or boundary.get("compact_metadata")
        about = about if isinstance(about, dict) else {}
        names = _first(_object(about, "preservedMessages", "preserved_messages"), "allUuids", "all_uuids", "uuids")
        part = _object(about, "preservedSegment", "preserved_segment")
        head, tail = (
            self.by_uuid.get(str(_first(part, *keys)))
            for keys in (("headUuid", "head_uuid"), ("tailUuid", "tail_uuid"))
        )
        if isinstance(names, list):
            kept = [self.by_uuid[name] for name in names if isinstance(name, str) and name in self.by_uuid]
        else:
            path = self.path(tail) if tail is not None else []
            kept = path[path.index(head) :] if head in path else []
        anchor = _first(_object(about, "preservedMessages", "preserved_messages"), "anchorUuid", "anchor_uuid")
        return self.by_uuid.get(str(anchor or _first(part, "anchorUuid", "anchor_uuid"))), kept


def _object(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    value = _first(record, *keys)
    return value if isinstance(value, dict) else {}


def _first(record: dict[str, Any], *keys: str) -> Any:
    return next((record[key] for key in keys if record.get(key)), None)


def _answer(line: SessionLine) -> str | None:
    """The id of the answer that a line is a piece of."""
    if line.record.get("type") != "assistant" or not line.speaks:
        return None
    name = line.record["message"].get("id")
    return name if isinstance(name, str) else None


def _block_ids(line: SessionLine, kind: str, key: str) -> Iterator[str]:
    if line.speaks and isinstance(content := line.record["message"].get("content"), list):
        for block in content:
            if isinstance(block, dict) and block.get("type") == kind and isinstance(block.get(key), str):
                yield block[key]
