"""YAML text that others wrote, read within limits as plain values: text, numbers, booleans, null, lists and mappings.

``<<`` merges mappings as YAML 1.1 defines it. Dates, sets and unknown tags are refused or stay text.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

Key = tuple[str | int, ...]

MAX_CHARACTERS = 4_000_000
MAX_VALUES = 100_000
"""Values of a document once every alias is written out."""
MAX_DEPTH = 50
"""Greatest depth of nested mappings and lists."""


class YamlError(ValueError):
    """What is wrong with the text. ``line`` counts from 1; None if no line can be named. ``key`` is the path to it."""

    def __init__(self, message: str, line: int | None = None, key: Key = ()) -> None:
        super().__init__(message)
        self.message, self.line, self.key = message, line, key


class _Size(NamedTuple):
    values: int
    depth: int


def parse(text: str, on_place: Callable[[Key, int], None] = lambda key, line: None) -> tuple[Any, list[YamlError]]:
    """The value of one document (None if it is empty), and all that is wrong with its keys and scalars.

    ``on_place`` is told the line (from 1) of every key path.
    Raises YamlError if the text is not YAML or passes a limit.
    """
    try:
        _check_size(text)
        yaml = YAML(typ="safe")
        node = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = _tab(text, mark.line) if mark else ""
        what = what or " ".join(str(part) for part in (error.context, error.problem) if part)
        raise YamlError(f"is not YAML: {what}", mark and mark.line + 1) from None
    except (YAMLError, ValueError) as error:
        if isinstance(error, YamlError):
            raise
        raise YamlError(f"is not YAML: {' '.join(str(error).split())[:300]}") from None
    builder = _Builder(yaml, on_place)
    value = None if node is None else builder.build(node, ())
    return value, builder.problems


def _tab(text: str, number: int) -> str:
    """What is wrong with a line (from 0) that is indented with a tab; empty if it is not."""
    lines = text.splitlines()
    line = lines[number] if number < len(lines) else ""
    indentation = line[: len(line) - len(line.lstrip())]
    return "a tab indents this line; YAML takes only spaces: replace the tab with them" if "\t" in indentation else ""


def plain(text: str) -> Any:
    """The value of a short text such as that of ``--set``. Raises YamlError with the first thing that is wrong."""
    value, problems = parse(text)
    if problems:
        raise problems[0]
    return value


def _check_size(text: str) -> None:
    """Raise YamlError if the document is too large, too deep, or contains itself; aliases count as what they repeat."""
    if len(text) > MAX_CHARACTERS:
        raise YamlError(f"has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    anchors: dict[str, _Size | None] = {}
    open_: list[tuple[str | None, int, int]] = []  # anchor, values and depth of what is inside so far
    for event in YAML(typ="safe").parse(text):
        if isinstance(event, CollectionStartEvent):
            if event.anchor:
                anchors[event.anchor] = None
            open_.append((event.anchor, 1, 1))
            if len(open_) > MAX_DEPTH:
                raise YamlError(f"is nested {len(open_)} levels deep; at most {MAX_DEPTH} are allowed", _line(event))
            continue
        if isinstance(event, CollectionEndEvent):
            anchor, *size = open_.pop()
            inside = _Size(*size)
        elif isinstance(event, AliasEvent):
            anchor, anchored = None, anchors.get(event.anchor, _Size(1, 0))
            if anchored is None:
                raise YamlError(f"*{event.anchor} stands inside what it repeats", _line(event))
            inside = anchored
        elif isinstance(event, NodeEvent):
            anchor, inside = event.anchor, _Size(1, 0)
        else:
            continue
        if anchor:
            anchors[anchor] = inside
        if open_:
            name, values, depth = open_[-1]
            open_[-1] = (name, values + inside.values, max(depth, inside.depth + 1))
            _check_limits(open_[-1][1], len(open_) - 1 + open_[-1][2], _line(event))


def _check_limits(values: int, depth: int, line: int) -> None:
    if values > MAX_VALUES:
        raise YamlError(f"holds {values:,} values once its aliases are written out; at most {MAX_VALUES:,}", line)
    if depth > MAX_DEPTH:
        raise YamlError(f"is nested {depth} levels deep; at most {MAX_DEPTH} are allowed", line)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


class _Builder:
    """Plain values from nodes, with the place of every key and every problem on the way."""

    def __init__(self, yaml: YAML, on_place: Callable[[Key, int], None]) -> None:
        self.constructor = yaml.constructor
        self.on_place = on_place
        self.problems: list[YamlError] = []

    def problem(self, message: str, node: Node, key: Key) -> None:
        self.problems.append(YamlError(message, _line(node), key))

    def build(self, node: Node, key: Key) -> Any:
        self.on_place(key, _line(node))
        if isinstance(node, MappingNode):
            return self.mapping(node, key)
        if isinstance(node, SequenceNode):
            return [self.build(item, (*key, number)) for number, item in enumerate(node.value)]
        return self.scalar(node, key)

    def scalar(self, node: Node, key: Key) -> Any:
        try:
            value = self.constructor.construct_object(node)
        except (YAMLError, ValueError, TypeError, ArithmeticError, AttributeError, LookupError):
            kind = str(node.tag).rpartition(":")[2]  # the value itself is not repeated: it may be a secret
            self.problem(f"is read as {kind!r}, which is not allowed or not valid here; put it in quotes", node, key)
            return None
        return value if isinstance(value, str | int | float | bool | None) else str(node.value)

    def mapping(self, node: MappingNode, key: Key) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name = name_node.value
            if not isinstance(name_node, ScalarNode) or not isinstance(name, str):
                self.problem("a key is text, not a list or a mapping", name_node, key)
                continue
            here = (*key, name)
            if name == "<<" and not name_node.style:
                for other in self.sources(value_node, here):
                    merged = self.mapping(other, key) | merged
                continue
            if name in own:
                self.problem("this key is written twice", name_node, here)
            own[name] = self.build(value_node, here)
            self.on_place(here, _line(name_node))
        return {**merged, **own}

    def sources(self, node: Node, key: Key) -> list[MappingNode]:
        """The mappings that ``<<`` merges in. If several have a key, the first one counts."""
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        mappings = [mapping for mapping in nodes if isinstance(mapping, MappingNode)]
        if len(mappings) < len(nodes):
            self.problem("<< takes a mapping, or a list of mappings, as in <<: *base", node, key)
        return mappings
