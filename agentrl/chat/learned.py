"""Reading tool calls in the form that a chat template writes them, learned from calls that it wrote.

Most templates differ in their tags alone: a call is its function's name and then one JSON object, or one piece of text
for each argument. Names, keys and values that occur nowhere else show where the tags between them begin and end.
"""

import json
import re
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from agentrl.chat.hermes import Parsed
from agentrl.chat.readers import bare, begun, broken
from agentrl.chat.template import THOUGHT, Template, TemplateError
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Message, Role, ToolCall

_NAMES, _KEYS, _VALUES = ("fn7Qa1", "fn7Qb2"), ("key4Xa", "key4Xb"), ("val9Za", "val9Zb")
_NUMBERS = (73918, 84619)
_REASON, _SAID = "thought3Yc", "said6Wd"
_NAME = r"(?P<name>[\w./:-]+?)"
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True)
class CallTags:
    """The tags after the name of a call, as patterns: ``before`` the first argument, ``value`` between an argument's
    name and its value, ``key`` before a further argument, ``more`` to the name of the next call, or ``ends``."""

    before: re.Pattern[str]
    more: re.Pattern[str] | None
    ends: re.Pattern[str]
    value: re.Pattern[str] | None = None
    key: re.Pattern[str] | None = None

    def tail(self, text: str, start: int) -> re.Match[str] | None:
        return (self.more and self.more.match(text, start)) or self.ends.match(text, start)


@dataclass(frozen=True)
class CallForm:
    """How calls are written. ``opens`` begins the first call of a turn and ends with its name; ``trigger`` is its first
    tag. Arguments are one JSON object between the tags ``whole``, or one text each: between ``texts`` if they are
    strings, and between ``others`` if not; ``bare`` stands after a name without arguments. ``escaped``: strings are
    quoted, and written as JSON or Python write them."""

    trigger: str
    opens: re.Pattern[str]
    whole: CallTags | None = None
    texts: CallTags | None = None
    others: CallTags | None = None
    bare: CallTags | None = None
    escaped: bool = False

    def read(self, text: str, tools: str) -> tuple[str, list[ToolCall]]:
        """What is said, and the calls. Raises ValueError that says which call cannot be read."""
        functions = [tool.get("function", tool) for tool in json.loads(tools)]
        schemas = {function.get("name"): _types(function) for function in functions}
        prose: list[str] = []
        calls: list[ToolCall] = []
        start = 0
        while match := self.opens.search(text, start):
            prose.append(text[start : match.start()])
            while match:
                try:
                    arguments, call_id, tail = self._arguments(text, match, schemas.get(match["name"], {}))
                except ValueError as error:
                    raise ValueError(f"tool call {len(calls)}: {error}") from error
                call_id = call_id or f"call_{len(calls)}"
                calls.append(ToolCall(id=call_id, name=match["name"], arguments=json.dumps(arguments)))
                start, match = tail.end(), tail if "name" in tail.groupdict() else None
        prose.append(text[start:])
        if any(self.trigger in part for part in prose):
            raise ValueError(f"tool call {len(calls)}: {self.trigger!r} begins one, and what follows is none")
        return "".join(prose).strip(), calls

    def _arguments(
        self, text: str, head: re.Match[str], types: dict[str, Any]
    ) -> tuple[dict[str, Any], str | None, re.Match[str]]:
        """The arguments of the call whose name ends ``head``, its id if it has one, and the tags after it."""
        tags = self.whole or self.texts
        assert tags
        arguments: Any
        if self.bare and (tail := self.bare.tail(text, head.end())):
            return {}, head.groupdict().get("id0"), tail
        match = tags.before.match(text, head.end())
        if match is None:
            raise ValueError(f"{text[head.end() : head.end() + 20]!r} follows its name, and no argument does")
        if self.whole:
            arguments, end_of_value = _decoded(text, match.end())
            if not isinstance(arguments, dict):
                raise ValueError("its arguments are no JSON object")
        else:
            arguments, end_of_value, tags = self._texts(text, match.end(), types)
        tail = tags.tail(text, end_of_value)
        if tail is None:
            raise ValueError(
                f"{text[end_of_value : end_of_value + 20]!r} follows its arguments, and not the end of a call"
            )
        own = "id1" if "id1" in head.groupdict() else "id0"
        known = [head.groupdict().get(own), *(part.groupdict().get("id0") for part in (match, tail) if part)]
        return arguments, next((known_name for known_name in known if known_name), None), tail

    def _texts(self, text: str, start: int, types: dict[str, Any]) -> tuple[dict[str, Any], int, CallTags]:
        """Arguments that are one text each, the first of which begins at ``place``; where they end, and by which
        tags."""
        assert self.texts
        assert self.others
        arguments: dict[str, Any] = {}
        while True:
            heads = [(tags.value.search(text, start), tags) for tags in (self.texts, self.others) if tags.value]
            matches = [(head.start(), -head.end(), number) for number, (head, _) in enumerate(heads) if head]
            if not matches:
                raise ValueError("an argument has no value")
            head, tags = heads[min(matches)[2]]
            assert head
            assert tags.key
            key, start = text[start : head.start()].strip(), head.end()
            marks = [pattern.finditer(text, start) for pattern in (tags.key, tags.more, tags.ends) if pattern]
            ends = sorted(mark.start() for each in marks for mark in each)
            if not ends:
                raise ValueError(f"its argument {key} does not end")
            if self.texts == self.others:
                arguments[key], start = _typed(text[start : ends[0]], types.get(key)), ends[0]
            elif tags is self.others:
                arguments[key], start = _literal(text, start, ends)
            elif self.escaped:
                arguments[key], end = _literal(text, start - 1, [quote + 1 for quote in ends])
                start = end - 1
            else:
                arguments[key], start = text[start : ends[0]], ends[0]
            further = tags.key.match(text, start)
            if not further:
                return arguments, start, tags
            start = further.end()


class LearnedReader:
    """Reads calls in the form that the template writes, and reasoning between the tags that it writes.

    Raises ValueError if that form is none that can be learned.
    """

    def __init__(self, template: Template) -> None:
        self.template = template
        self.begins, self.closes = _thoughts(template)
        self.form = _learned(template, self.closes)

    def read(self, turn: list[int], prompt: list[int], tools: str) -> Parsed:
        """See :class:`agentrl.chat.codec.Reader`."""
        text = str(self.template.tokenizer.decode(bare(turn, self.template.stop_ids), skip_special_tokens=False))
        reasoning, rest = None, text
        if self.closes in text:
            thought, _, rest = text.partition(self.closes)
            reasoning = thought.strip().removeprefix(self.begins).strip() or None
        elif text.lstrip().startswith(self.begins) or begun(self.template, prompt, self.begins):
            return broken(text, "the turn ended inside its reasoning", text.strip().removeprefix(self.begins).strip())
        try:
            content, calls = self.form.read(rest, tools)
        except ValueError as error:
            return broken(text, str(error), reasoning)
        return Parsed(Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=calls))


def _turn(template: Template, *calls: ToolCall, content: str = "", reasoning: str | None = None) -> str:
    """A turn as it is written if tools' answers follow, so that nothing of its end is missing."""
    message = Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=list(calls))
    text = template.turn(message)
    return text.partition(template.call_end)[0] if calls and template.call_end else text


def _call(number: int, values: Sequence[Any]) -> ToolCall:
    arguments = dict(zip(_KEYS, values, strict=False))
    return ToolCall(id=f"call_{number}", name=_NAMES[number], arguments=json.dumps(arguments))


def _learned(template: Template, closes: str) -> CallForm:
    single = _turn(template, _call(0, _VALUES[:1])).rpartition(closes)[2]
    begin, name, rest = single.partition(_NAMES[0])
    if not name:
        raise ValueError("a call does not show its function's name")
    if not begin.strip():
        raise ValueError("a call begins with its function's name, so it cannot be told from text")
    patterns = _Patterns(template, single)
    trigger = re.search(r"<[^<>\s]+>|\[[A-Z_]+\]", begin)
    word, opens = trigger.group() if trigger else begin.strip(), patterns.named(begin, rest)
    rest = patterns.after_name(rest)
    whole = re.search(rf'\{{\s*"{_KEYS[0]}"\s*:\s*"{_VALUES[0]}"\s*\}}', rest)
    if whole:
        more = patterns.double(template, _VALUES[:1]).partition(whole.group())[2]
        before, ends = rest[: whole.start()], rest[whole.end() :]
        return CallForm(word, opens, whole=CallTags(patterns.of(before), patterns.until_name(more), patterns.of(ends)))
    bare = CallTags(
        patterns.of(""), patterns.until_name(patterns.double(template, ())), patterns.of(_rest(template, patterns, ()))
    )
    texts, others = _tags(template, patterns, _VALUES), _tags(template, patterns, _NUMBERS)
    escaped = (
        "\n"
        not in _rest(template, patterns, [f"{_VALUES[0]}\n{_VALUES[1]}"])
        .partition(_VALUES[0])[2]
        .partition(_VALUES[1])[0]
    )
    return CallForm(word, opens, None, texts, others, bare, escaped)


def _rest(template: Template, patterns: "_Patterns", values: Sequence[Any]) -> str:
    """What is written after the name of a call with these values."""
    return patterns.after_name(_turn(template, _call(0, values)).partition(_NAMES[0])[2])


def _tags(template: Template, patterns: "_Patterns", values: Sequence[Any]) -> CallTags:
    """The tags around arguments with these two values."""
    first = str(values[0])
    before, key, tail = _rest(template, patterns, values[:1]).partition(_KEYS[0])
    value, written, ends = tail.partition(first)
    further = _rest(template, patterns, values).partition(first)[2].partition(_KEYS[1])[0]
    if not (key and written and further):
        raise ValueError("a call's arguments are in no form that can be learned")
    more = patterns.double(template, values[:1]).partition(first)[2]
    return CallTags(
        patterns.of(before),
        patterns.until_name(more, exact=True),
        patterns.of(ends, exact=True),
        patterns.of(value, exact=True),
        patterns.of(further, exact=True),
    )


class _Patterns:
    """From tags that a template wrote to patterns: spaces may be missing or be others, ids are any ids."""

    def __init__(self, template: Template, single: str) -> None:
        self.in_id = f"functions.{_NAMES[0]}:0" in single
        self.ids = [template.id_form(f"call_{number}", _NAMES[number]) for number in range(2)]

    def double(self, template: Template, values: Sequence[Any]) -> str:
        """What is written after the first name of two calls; "" if the template writes no two calls in a turn."""
        try:
            text = _turn(template, _call(0, values), _call(1, values))
        except TemplateError:
            return ""
        return self.after_name(text.partition(_NAMES[0])[2])

    def of(self, tags: str, exact: bool = False) -> re.Pattern[str]:
        """``exact``: tags that a value touches, and so has spaces beside it that are its own. A line break that belongs
        to the tags may be missing, but no other may go with it."""
        return re.compile(self._text(tags, exact), re.DOTALL)

    def named(self, begin: str, rest: str) -> re.Pattern[str]:
        """CallTags and the name after them."""
        if not self.in_id:
            return re.compile(self._text(begin.lstrip()) + _NAME + self._stop(rest), re.DOTALL)
        lead = self._text(begin.removesuffix("functions.").lstrip())
        return re.compile(lead + r"(?P<id0>functions\." + _NAME + r":\d+)")

    def after_name(self, rest: str) -> str:
        return re.sub(r"^:\d+", "", rest) if self.in_id else rest

    def until_name(self, tags: str, exact: bool = False) -> re.Pattern[str] | None:
        """The tags between two calls and the name of the next one; None if a turn has one call only."""
        begin, name, rest = tags.partition(_NAMES[1])
        if not name:
            return None
        lead = self._text(begin.removesuffix("functions.") if self.in_id else begin, exact)
        if self.in_id:
            return re.compile(lead + r"(?P<id1>functions\." + _NAME + r":\d+)", re.DOTALL)
        return re.compile(lead + _NAME + self._stop(rest), re.DOTALL)

    def _stop(self, rest: str) -> str:
        """What ends a name: the character that follows it, or a space."""
        return rf"(?={re.escape(rest[0])}|\s)" if rest and not rest[0].isspace() else r"(?=\s|<|$)"

    def _text(self, tags: str, exact: bool = False) -> str:
        parts = re.split(r"(\s+)", tags)
        made = []
        for number, part in enumerate(parts):
            if not part.isspace():
                made.append(re.escape(part))
            elif exact and ((number == 1 and not parts[0]) or (number == len(parts) - 2 and not parts[-1])):
                made.append(f"(?:{re.escape(part)})?")
            else:
                made.append(r"\s*")
        text = "".join(made)
        for number, call_id in enumerate(self.ids):
            text = text.replace(re.escape(call_id), rf"(?P<id{number}>[\w.:-]+)", 1)
        return text


def _thoughts(template: Template) -> tuple[str, str]:
    """What begins and what closes reasoning."""
    if not template.writes_reasoning:
        return THOUGHT, "</think>"
    try:
        begin, _, rest = _turn(template, content=_SAID, reasoning=_REASON).partition(_REASON)
    except TemplateError:  # the generation prompt has closed the thought already
        return THOUGHT, "</think>"
    return begin.strip() or THOUGHT, rest.partition(_SAID)[0].strip() or "</think>"


def _types(function: dict[str, Any]) -> dict[str, Any]:
    """The types that a schema allows for each argument; None if it does not say."""
    properties = (function.get("parameters") or {}).get("properties")
    return {key: _allowed(schema) for key, schema in properties.items()} if isinstance(properties, dict) else {}


def _allowed(schema: Any) -> set[str] | None:
    if not isinstance(schema, dict):
        return None
    if "enum" in schema and "type" not in schema:
        return {"string"} if all(isinstance(value, str) for value in schema["enum"]) else None
    if options := schema.get("anyOf") or schema.get("oneOf"):
        each = [_allowed(option) for option in options]
        return None if None in each else set().union(*(types for types in each if types))
    kind = schema.get("type")
    return {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else None


def _typed(text: str, allowed: set[str] | None) -> Any:
    """A value that was written without quotes: text if its schema wants text alone, and what it says in JSON else."""
    if allowed == {"string"}:
        return text
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return _evaluated(text) if word.startswith(("[", "{")) else loads(text)
    except ValueError:
        return text


def _evaluated(text: str) -> Any:
    """A value in JSON, or as Python writes it. Raises ValueError if it is neither."""
    try:
        return loads(text)
    except ValueError:
        pass
    try:
        return json.loads(json.dumps(literal_eval(text.strip())))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text[:20]!r} is no value") from error


def _literal(text: str, start: int, ends: list[int]) -> tuple[Any, int]:
    """A value that is no string, in JSON or as Python writes it, up to the first of ``ends`` at which it is whole.
    Raises ValueError if it is at none."""
    for end in ends:
        try:
            return _evaluated(text[start:end]), end
        except ValueError:
            continue
    raise ValueError(f"{text[start : ends[0]]!r} is no value")


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """A JSON value that begins at ``place``, and where it ends. Raises ValueError if there is none."""
    start += len(list(takewhile(str.isspace, text[start:])))
    end = json.JSONDecoder().raw_decode(text, start)[1]
    return loads(text[start:end]), end
