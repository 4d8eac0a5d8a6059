"""Files give the same whether regular records go straight into columns or through the format's reader."""

import gzip
import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from format_rows import KINDS
from format_samples import SAMPLES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import FORMATS, Format, workers
from agentrl.datastore.formats.blocks import RowBlock
from agentrl.datastore.formats.labels import Fields
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.recognise import _by_record
from agentrl.datastore.formats.rows import canonical
from agentrl.datastore.formats.source import Source
from agentrl.datastore.formats.taken import Kept
from agentrl.datastore.formats.workers import File, read_files

REGULAR = [name for name, format_ in FORMATS.items() if format_.regular]
ROWS = [row for rows in KINDS.values() for row in rows]

USER, ANSWERED = {"role": "user", "content": "who?"}, {"role": "assistant", "content": "Ann", "reasoning_content": "hm"}
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": [1.5, None, "é"]}}},
    {"id": "b", "function": {"name": "g", "arguments": '{"q": 2}'}},
    {"function": {"name": "h", "arguments": "no JSON"}},
]
CALLED = {"role": "assistant", "content": None, "tool_calls": CALLS}
TOLD = {"role": "tool", "content": "r"}
TALKS = [
    [USER, {"role": "assistant", "content": "Ann"}],
    [{"role": "developer", "content": "be brief"}, USER, CALLED, {**TOLD, "tool_call_id": "b"}, TOLD, ANSWERED],
    [USER, CALLED, {**TOLD, "name": "g"}, {**USER, "name": "bob"}],
    [{"role": "user", "content": ""}, USER, {"role": "assistant", "content": "", "reasoning_content": ""}],
    [{"role": "human", "content": "u"}, {"role": "gpt", "content": ""}, {"role": "tool", "content": "no call"}],
    [USER],
]
SCHEMAS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minimum": 0.5}}}]
OF_ANTHROPIC = [{"name": "f", "input_schema": {"type": "object"}}]
TOOLS: list[Any] = [SCHEMAS, SCHEMAS * 60, OF_ANTHROPIC, json.dumps(SCHEMAS), None, []]
TEXT = {"type": "text", "text": "t"}
USED = [{"type": "tool_use", "id": "1", "name": "f", "input": {"q": 1}}, {"type": "tool_use", "id": "2", "name": "g"}]
USED[1] |= {"input": {}}
RESULTS = [
    {"type": "tool_result", "tool_use_id": "2", "content": [TEXT, TEXT], "is_error": True},
    {"type": "tool_result", "tool_use_id": "1", "content": "r", "is_error": False},
    {"type": "tool_result", "tool_use_id": "9"},
]
_CONTENTS: list[list[Any]] = [
    [[TEXT], [TEXT, *USED], [*RESULTS, TEXT], "done"],
    ["who?", [], [TEXT, TEXT], [TEXT], "", "Ann"],
    ["who?", [*RESULTS[:1], TEXT]],
]
BLOCKS = [
    [{"role": "assistant" if at % 2 else "user", "content": content} for at, content in enumerate(talk)]
    for talk in _CONTENTS
]
ASKED = {"type": "message", "role": "user", "content": "who?"}
MADE = [{"type": "function_call", "call_id": i, "name": "f", "arguments": '{"q": 1}'} for i in "12"]
GOT = [{"type": "function_call_output", "call_id": i, "output": "r"} for i in "21"]
SPOKEN = {"type": "message", "role": "assistant", "content": "Ann"}
OUTPUTS = [[SPOKEN], [*MADE, *GOT, SPOKEN], [SPOKEN, MADE[0], SPOKEN], [SPOKEN | {"content": ""}, *MADE]]
ITEMS = [
    {"input": asked, "output": output, "tools": tools, "model": model}
    for asked, tools, model in (([ASKED], SCHEMAS, "m"), ("who?", [], None), ([], OF_ANTHROPIC, ""))
    for output in OUTPUTS
]
RECORDS: dict[str, list[Any]] = {
    "openai-chat": [{"messages": talk, "tools": tools} for talk in TALKS for tools in TOOLS],
    "trl-sft": [{"messages": talk, "tools": SCHEMAS} for talk in TALKS],
    "trl-prompt-completion": [{"prompt": talk[:1], "completion": talk[1:], "tools": SCHEMAS} for talk in TALKS],
    "trl-kto": [{"prompt": talk[:1], "completion": talk[1:], "label": True} for talk in TALKS],
    "anthropic": [
        {"messages": talk, **more}
        for talk in BLOCKS
        for more in ({"system": "s", "tools": OF_ANTHROPIC, "model": "m"}, {"system": ""}, {"model": "m" * 1001})
    ],
    "openai-responses": ITEMS,
    "nemo-gym": [
        {
            "responses_create_params": {"input": item["input"], "tools": item["tools"]},
            "response": {"output": item["output"], "model": item["model"]},
            "reward": reward,
        }
        for item in ITEMS
        for reward in (1, 0.5, None)
    ],
    "alpaca": [
        {"instruction": "i", "input": given, "output": "o", "system": system, "history": history}
        for given, system, history in (("", None, None), ("y", "é", []), (None, "", [["a", "b"], ["\x7f", '"']]))
    ],
}
RECORDS["alpaca"] += [{"instruction": "i", "chosen": "a", "rejected": "b"}]
RECORDS["trl-prompt-completion"] += [{"prompt": "q", "completion": "a"}, {"prompt": "", "completion": [*TALKS[0]]}]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2.5, 10**30, float("nan"), float("inf"), "", "x", "\ud800", "é\u2028", "\x00\x7f"),
    *([], {}, [None], ["a"], {"a": 1}, "null", '{"a": 1}', "[]", {"x": [[[[1]]]]}, [TEXT], TEXT, USER, [ANSWERED]),
    *("user", "assistant", "tool", "system", "developer", "function_call", OF_ANTHROPIC, CALLS),
]
KEYS = ["name", "id", "model", "error", "is_error", "label", "system", "tools", "tool_calls", "tool_call_id", "content"]
KEYS += ["role", "refusal", "x", "type", "arguments", "response", "request", "usage", "annotations", "history", "input"]


class Everything:
    """What comes of a file: rows, what was kept, places, notes, and the error."""

    def __init__(self, format_: Format, path: Path, quarantine: bool, limit: int) -> None:
        self.notes, self.error = Notes(quarantine), ""
        source = Source(path, self.notes)
        source.limit = limit
        batches = []
        try:
            for batch in read_files([File(source, format_)], Kept(Fields())):
                batches.append(batch)
        except StoreError as error:
            self.error = str(error)
        table = pa.concat_tables([batch.table for batch in batches]).drop_columns("created_at") if batches else []
        self.rows = [] if isinstance(table, list) else list(map(repr, table.to_pylist()))
        self.kept = [kept for batch in batches for kept in batch.kept]
        self.read = (source.number, source.read_to)

    def comparable(self) -> list[Any]:
        counted = [list(counter.items()) for counter in (self.notes.ignored, self.notes.remarks)]
        return [self.rows, self.kept, self.read, self.error, counted, self.notes.unreadable]


def same(name: str, path: Path, quarantine: bool = True, limit: int = 2**26) -> Everything:
    """What comes of a file, whose records may be known to be of the format, or be looked at one by one."""
    for format_ in (FORMATS[name], _by_record(name)):
        result = Everything(format_, path, quarantine, limit)
        through_reader = Everything(replace(format_, regular=None), path, quarantine, limit)
        for mine, reader in zip(result.comparable(), through_reader.comparable(), strict=True):
            assert mine == reader
    return result


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST_WORKERS", 1)


def kinds(name: str, path: Path) -> list[bool]:
    """Of each row whether its record was regular."""
    rows = FORMATS[name].blocks(Source(path, Notes(quarantine=True)))
    return [kind for row in rows for kind in ([True] * len(row.lengths) if isinstance(row, RowBlock) else [False])]


def seeds(name: str) -> list[Any]:
    """Records of many shapes: those of this module, those that others write, and those that agentrl writes."""
    records = list(RECORDS[name])
    records += [record for suffix, sample in SAMPLES.get(name, []) if suffix == ".jsonl" for record in sample]
    if write := FORMATS[name].write:
        with TemporaryDirectory() as folder:
            write(ROWS, path := Path(folder) / "rows.jsonl")
            written = [line for line in path.read_text().splitlines() if line.count("[") < 60]
            records += map(json.loads, written)
    return records


SEEDS = {name: seeds(name) for name in REGULAR}


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object and list in a value, with each of its keys or places."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from parts(value[key])


def changed(record: Any, random: Random) -> Any:
    """A record in which values are removed, replaced, added or in another order."""
    record = deepcopy(record)
    for _ in range(random.choice([1, 1, 2, 3])):
        holder, key = random.choice([*parts(record)] or [({"": None}, "")])
        other = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        match random.randrange(4):
            case 0:
                del holder[key]
            case 1:
                holder[key] = deepcopy(random.choice(VALUES))
            case 2 if isinstance(holder, dict):
                holder[random.choice(KEYS)] = deepcopy(random.choice(VALUES))
            case _:
                holder[key], holder[other] = holder[other], holder[key]
    return record


def line(record: Any, random: Random) -> bytes:
    """A record as one may find it written."""
    text = json.dumps(record, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    at = random.randrange(len(text))
    match random.randrange(12):
        case 0:
            return text.replace(b'"content":', b'"content": "first", "content":')
        case 1:
            return text[:at] + random.choice([b"", b"\xff", b'"', b"}", b"\x01", b"1e999", b"\\ud800"]) + text[at + 1 :]
        case 2:
            return b" " + text.replace(b"content", b"c\\u006fntent", 1) + b"\t\r"
        case 3:
            deep = random.choice([90, 150, 250])
            return text.replace(b": 1", b": " + b"[" * deep + b"]" * deep, 1)  # in arguments, or in another number
        case 4:
            return b"\n" + text + b"\n  "
    return text


@pytest.mark.parametrize("name", REGULAR)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=False), rate=st.sampled_from([0.0, 0.1, 0.6]), strict=st.booleans())
def test_records_of_any_shape(name: str, random: Random, rate: float, strict: bool) -> None:
    lines = []
    for _ in range(random.choice([1, 20, 140])):
        record = random.choice(SEEDS[name])
        altered = random.random() < rate
        lines.append(line(changed(record, random), random) if altered else json.dumps(record).encode())
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(random.choice([b"", b"\xef\xbb\xbf"]) + b"\n".join(lines) + random.choice([b"", b"\n\n"]))
        same(name, path, quarantine=not strict)


@pytest.mark.parametrize("name", REGULAR)
def test_records_as_they_are_and_in_turns(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in SEEDS[name] * 3))
    assert same(name, path).rows
    assert {True, False} == set(kinds(name, path))  # otherwise this compares nothing


def test_tools_of_another_api_are_left_to_who_finds_the_format(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    records = [{"messages": TALKS[0], "tools": tools} for tools in (SCHEMAS, OF_ANTHROPIC)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert kinds("openai-chat", path) == [True, False]
    assert same("openai-chat", path).notes.remarks == {"records read as anthropic in a file of openai-chat": 1}


def test_what_stands_after_many_irregular_records(tmp_path: Path) -> None:
    """A file in which 64 lines have no regular record is read by the reader to its end."""
    path = tmp_path / "rows.jsonl"
    odd, regular = (json.dumps({"messages": TALKS[0]} | more) + "\n" for more in ({"odd": 1}, {}))
    path.write_text(regular + odd * 200 + "{\n" + regular * 100)
    assert same("openai-chat", path).notes.ignored == {"odd": 200}
    assert sum(kinds("openai-chat", path)) == 1
    assert len(kinds("openai-chat", path)) == 301


def test_a_line_that_is_too_long_by_its_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    text = json.dumps({"messages": TALKS[0]})
    path.write_text(f"{text}\n" * 2 + f" {text}\n" + f"{text}\n")
    result = same("openai-chat", path, limit=len(text) + 1)
    assert [item.place for item in result.notes.unreadable] == [f"{path}:3"]


@pytest.mark.parametrize("deep", [90, 150, 250])
def test_values_that_are_nested_deeply(deep: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    nested: Any = 1
    for _ in range(deep):
        nested = [nested]
    call = {"id": "a", "function": {"name": "f", "arguments": {"x": nested}}}
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    records = [{"messages": TALKS[0], "tools": [nested]}, {"messages": TALKS[0]}, {"messages": talk}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(same("openai-chat", path).rows) == (3 if deep < 100 else 1)


def test_what_was_read_before_a_file_breaks(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    random = Random(0)
    texts = [json.dumps({"messages": [{**USER, "content": random.randbytes(99).hex()}, ANSWERED]}) for _ in range(5000)]
    path.write_bytes(gzip.compress("\n".join(texts).encode())[:-9000])
    assert len(same("openai-chat", path).rows) > 64


@pytest.mark.parametrize("fields", [Fields(("model",)), Fields((), "model")])
def test_fields_of_records_are_kept(fields: Fields, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    records = [{"messages": BLOCKS[0], "model": f"m{number}"} for number in range(100)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    [batch] = read_files([File(Source(path), FORMATS["anthropic"])], Kept(fields))
    assert [next(iter(kept.values())) for kept in batch.kept] == [f"m{number}" for number in range(100)]


def test_contents_of_tasks_are_written_as_json_does() -> None:
    """Else the ids of tasks would change."""
    texts = [chr(code) * 2 + "a" for code in (*range(0x300), 0x2028, 0xD800, 0x1F600)]
    for value in ([texts, None, 1.5, True, ("a", None), [[]], []], {"b": texts, "a": [1]}):
        assert canonical(value) == json.dumps(value, sort_keys=True)
