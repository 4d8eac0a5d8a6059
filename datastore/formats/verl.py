"""verl's Parquet files.

- ``verl-sft``: ``messages`` (arguments of calls as JSON text), ``tools``, ``enable_thinking``. ``tools`` is a list of
  schemas, as verl's own dataset class wants it, if all rows that have tools share theirs, and missing if none has.
  Tools that differ from row to row, or whose parameters differ in kind, are JSON text, since one Arrow type would put
  nulls into them; verl reads such a file by a ``custom_cls``. Carries text, reasoning and calls; cannot carry tokens,
  log-probs, outcome, identity or lineage. Streams in row groups.
- RL prompts are tasks, not trajectories: :func:`write_tasks` and :func:`read_tasks` give ``data_source`` (env),
  ``prompt``, ``ability`` (env), ``reward_model`` {``style``: rule, ``ground_truth``}, ``extra_info`` {``split``,
  ``index``, ``task_id``, ``level``, ``verifier``, ``tools``, ``metadata``}.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.datastore.formats.annotated import KEY, AnnotatedRow, in_record
from agentrl.datastore.formats.chat import is_chat
from agentrl.datastore.formats.messages import from_chat, json_text, to_chat, tools_text
from agentrl.datastore.formats.origin import BESIDE, beside
from agentrl.datastore.formats.rows import answered, batched, make_row
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.datastore.formats.valid import functions_text
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

_TEXT = pa.string()
_FUNCTION = pa.struct([("name", _TEXT), ("arguments", _TEXT)])
_MESSAGE = pa.struct(
    [
        ("role", _TEXT),
        ("content", _TEXT),
        ("reasoning_content", _TEXT),
        ("tool_calls", pa.list_(pa.struct([("id", _TEXT), ("type", _TEXT), ("function", _FUNCTION)]))),
        ("tool_call_id", _TEXT),
        ("name", _TEXT),
    ]
)
_SFT = pa.schema([("messages", pa.list_(_MESSAGE)), ("tools", _TEXT), ("enable_thinking", pa.bool_())])
_KNOWN = frozenset(_SFT.names) | BESIDE
NO_TOOLS = "[]"
_TASK_INFO = ("split", "task_id", "level", "verifier", "tools", "metadata")
_RL = pa.schema(
    [
        ("data_source", _TEXT),
        ("prompt", pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT)]))),
        ("ability", _TEXT),
        ("reward_model", pa.struct([("style", _TEXT), ("ground_truth", _TEXT)])),
        (
            "extra_info",
            pa.struct([("index", pa.int64()), *((n, pa.int32() if n == "level" else _TEXT) for n in _TASK_INFO)]),
        ),
    ]
)


def fits(head: Any) -> int:
    return (1 + ("enable_thinking" in head)) if isinstance(head, dict) and is_chat(head.get("messages")) else 0


def write(rows: Iterable[Trajectory], path: Path) -> int:
    count = 0
    offered: set[str] = set()
    rows = iter(rows)
    first = list(islice(rows, 1))  # all rows carry annotations, or none
    schema = _SFT.append(pa.field(KEY, _TEXT)) if first and isinstance(first[0], AnnotatedRow) else _SFT
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for part in batched(chain(first, rows), 1024):
            lines = [_line(row) for row in part]
            writer.write_table(pa.Table.from_pylist(lines, schema=schema))
            count += len(part)
            if len(offered) < 2:
                offered |= {str(line["tools"]) for line in lines} - {NO_TOOLS}
    if len(offered) < 2:
        _with_native_tools(path, json.loads(offered.pop() if offered else NO_TOOLS))
    return count


def _with_native_tools(path: Path, tools: list[Any]) -> None:
    """Put the tools that all rows with tools share in the place of their text, if Arrow gives them back as they are."""
    try:
        column = pa.array([tools])
    except pa.ArrowException:
        return
    if tools and column.to_pylist() != [tools]:
        return
    fields = [field for field in pq.read_schema(path) if field.name != "tools"]
    schema = pa.schema([*fields, ("tools", column.type)] if tools else fields)
    native = path.with_name(f"{path.name}.native")
    with pq.ParquetFile(path) as file, pq.ParquetWriter(native, schema, compression="zstd") as writer:
        for batch in file.iter_batches(1024):
            columns = [batch[field.name] for field in fields]
            lists = [[] if text == NO_TOOLS else tools for text in batch["tools"].to_pylist()]
            shared = [pa.array(lists, column.type)] if tools else []
            writer.write_batch(pa.RecordBatch.from_arrays([*columns, *shared], schema=schema))
    native.replace(path)


def _line(row: Trajectory) -> dict[str, Any]:
    thinks = any(message.reasoning for message in row.messages)
    return {
        "messages": to_chat(row.messages),
        "tools": functions_text(row.tools),
        "enable_thinking": thinks,
        **in_record(row, text=True),
    }


def read(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(line, _KNOWN)
        chat = [{key: value for key, value in message.items() if value is not None} for message in line["messages"]]
        messages, origin = from_chat(chat, source.notes), beside(line, source.notes)
        row = make_row(messages, source="verl", origin=origin, tools=tools_text(line.get("tools")))
        yield answered(row, source.notes)

    return each(source, source.records(), convert)


def write_tasks(tasks: Iterable[Task], path: Path) -> int:
    """Write tasks as verl's RL prompts. Returns how many."""
    lines: list[dict[str, Any]] = [
        {
            "data_source": task.env,
            "prompt": [{"role": "user", "content": task.prompt}],
            "ability": task.env,
            "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
            "extra_info": {"index": index, **{name: getattr(task, name) for name in _TASK_INFO}},
        }
        for index, task in enumerate(tasks)
    ]
    pq.write_table(pa.Table.from_pylist(lines, schema=_RL), path, compression="zstd")
    return len(lines)


def read_tasks(path: Path) -> list[Task]:
    """Tasks from verl's RL prompts. If ``extra_info`` lacks them, the id has the row's number, and the split is
    train."""
    tasks = []
    for number, line in enumerate(pq.read_table(path).to_pylist()):
        info = line.get("extra_info") or {}
        known = {name: info[name] for name in _TASK_INFO if info.get(name) is not None}
        prompt = next(message["content"] for message in reversed(line["prompt"]) if message["role"] == "user")
        values = {"task_id": f"{line['data_source']}-{number}", "split": "train"} | known
        truth = (line.get("reward_model") or {}).get("ground_truth")
        tasks.append(Task(env=line["data_source"], prompt=prompt, ground_truth=json_text(truth), **values))
    return tasks
