"""Rows out in every format and in again: equal, or the loss is the documented one."""

import json
from pathlib import Path
from typing import Any

import pytest
from format_rows import KINDS, LOOK, hard, spoken, user
from format_rows import said as says
from store_rows import build

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import FORMATS, detect
from agentrl.datastore.formats.huggingface import from_dataset, to_dataset
from agentrl.datastore.formats.row_parts import PARTS, lost, present
from agentrl.datastore.formats.source import Source
from agentrl.datastore.formats.verl import read_tasks, write_tasks
from agentrl.schemas.arrow import to_table
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Span, Trajectory

WRITTEN = [name for name, format_ in FORMATS.items() if format_.write]
ROWWISE = [name for name in WRITTEN if name != "trl-preference"]
ROWS = [hard(0), hard(1), build(2), build(3)]
DOCS = Path(__file__).parents[2] / "docs/reference/formats.md"


def out(name: str, rows: list[Trajectory], folder: Path) -> Path:
    path = folder / f"out{FORMATS[name].suffix}"
    write = FORMATS[name].write
    assert write is not None
    write(rows, path)
    return path


def back(name: str, path: Path) -> list[Trajectory]:
    files = sorted(path.iterdir()) if path.is_dir() and name != "huggingface" else [path]
    return [row for file in files for row in FORMATS[name].read(Source(file))]


def round_trip(name: str, rows: list[Trajectory], folder: Path) -> list[Trajectory]:
    return back(name, out(name, rows, folder))


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_after_a_round_trip_is_documented(name: str, kind: str, tmp_path: Path) -> None:
    leaves_out = FORMATS[name].leaves_out
    rows = [row for row in KINDS[kind] if not (leaves_out and leaves_out(row))]
    for before, after in zip(rows, round_trip(name, rows, tmp_path) if rows else [], strict=True):
        assert lost(before, after) <= FORMATS[name].loses & present(before)
        assert json.loads(after.model_dump_json())["messages"]


@pytest.mark.parametrize("name", ROWWISE)
def test_every_documented_loss_is_one(name: str, tmp_path: Path) -> None:
    differ: set[str] = set()
    for kind, rows in KINDS.items():
        (folder := tmp_path / kind).mkdir()
        leaves_out = FORMATS[name].leaves_out
        kept = [row for row in rows if not (leaves_out and leaves_out(row))]
        for before, after in zip(kept, round_trip(name, kept, folder) if kept else [], strict=True):
            differ |= lost(before, after)
    assert differ == FORMATS[name].loses


def test_the_kinds_of_rows_have_every_part() -> None:
    assert set().union(*(present(row) for rows in KINDS.values() for row in rows)) == set(PARTS)


@pytest.mark.parametrize("name", ["atif", "verifiers-v1", "huggingface"])
def test_whole_rows_survive(name: str, tmp_path: Path) -> None:
    for first, two in zip(round_trip(name, ROWS, tmp_path), ROWS, strict=True):
        elsewhere = {"created_at", "stage", "fingerprint", "run_id"}
        assert json.loads(first.model_dump_json(exclude=elsewhere)) == json.loads(
            two.model_dump_json(exclude=elsewhere)
        )


@pytest.mark.parametrize("name", [name for name, format_ in FORMATS.items() if format_.tokens])
def test_token_ids_masks_and_log_probs_survive_exactly(name: str, tmp_path: Path) -> None:
    for first, two in zip(round_trip(name, ROWS, tmp_path), ROWS, strict=True):
        assert (first.input_ids, first.action_mask) == (two.input_ids, two.action_mask)
        assert json.dumps(first.logprobs) == json.dumps(two.logprobs)  # NaN equals NaN as text


@pytest.mark.parametrize("name", WRITTEN)
def test_a_format_is_recognised_by_what_it_writes(name: str, tmp_path: Path) -> None:
    path = out(name, KINDS["tools"] + [build(i) for i in range(4)] + KINDS["reasoning"], tmp_path)
    files = sorted(path.iterdir()) if path.is_dir() and name != "huggingface" else [path]
    assert {detect(Source(file)) for file in files} == {name}


def matrix(folder: Path) -> str:
    """The matrix of ``docs/reference/formats.md``: what each kind of row loses in each format."""
    kinds = list(KINDS)
    lines = ["| format | " + " | ".join(kinds) + " |", "|" + "---|" * (len(kinds) + 1)]
    common = {"identity", "tags", "end", "reward", "success", "reward components"}
    for name in ROWWISE:
        cells = []
        for kind in kinds:
            (position := folder / name / kind).mkdir(parents=True)
            leaves_out = FORMATS[name].leaves_out
            rows = [row for row in KINDS[kind] if not (leaves_out and leaves_out(row))]
            if not rows:
                cells.append("not written")
                continue
            pairs = zip(rows, round_trip(name, rows, position), strict=True)
            gone = set().union(*(lost(before, after) for before, after in pairs))
            cells.append(
                ", ".join([part for part in PARTS if part in gone - common]) or ("=" if not gone else "text =")
            )
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_matrix_in_the_documentation_is_this_one(tmp_path: Path) -> None:
    counts = matrix(tmp_path)
    assert counts in DOCS.read_text(), f"put this matrix into docs/reference/formats.md:\n{counts}"


def test_every_format_is_documented() -> None:
    text = DOCS.read_text()
    assert [name for name in FORMATS if f"| `{name}` |" not in text] == []


def test_a_dataset_of_an_older_schema_comes_in_with_the_columns_of_this_one(tmp_path: Path) -> None:
    rows = [build(0), build(1, policy="warm/1", policy_version=4), spoken(2, [user("hi"), says("ho")])]
    old = to_dataset(rows).remove_columns(["pipeline", "fork_at", "spans"])
    old.save_to_disk(str(tmp_path / "old"))
    result = list(FORMATS["huggingface"].read(Source(tmp_path / "old")))
    assert [row.spans for row in result] == [[], [Span(version=4, start=4, end=12)], []]
    assert {(row.pipeline, row.fork_at) for row in result} == {(None, 0)}
    assert [row.trajectory_id for row in result] == [row.trajectory_id for row in rows]
    (tmp_path / "no").mkdir()
    to_dataset(rows).remove_columns(["prompt"]).save_to_disk(str(tmp_path / "no" / "rows"))
    with pytest.raises(StoreError, match="lacks the columns prompt"):
        list(FORMATS["huggingface"].read(Source(tmp_path / "no" / "rows")))


# TRL


def test_preferences_take_best_against_worst_and_leave_unscored_rows_out(tmp_path: Path) -> None:
    rows = [build(i) for i in range(8)]  # tasks t0 and t1, alternating failure and success
    rows += [build(i, success=True) for i in range(8, 12)]
    rows += [build(i, success=None, reward=None) for i in range(12, 16)]
    read_back = round_trip("trl-preference", rows, tmp_path)
    assert [row.success for row in read_back] == [True, False] * 2
    assert [row.task_id for row in read_back[:2]] == [read_back[0].task_id] * 2
    assert read_back[0].task_id != read_back[2].task_id
    line = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert line["prompt"] == [{"role": "user", "content": "boss of Ann 1?"}]
    assert line["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"who": "Ann", "rel": "boss"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl-sft", "trl-prompt-completion", "trl-preference", "trl-kto"])
def test_trl_loads_and_trains_on_what_is_exported(name: str, tmp_path: Path) -> None:
    """One optimiser step of TRL's own trainer on a tiny model changes the weights."""
    pytest.importorskip("trl")
    from formats_trl import train

    rows = []
    for i in range(8):
        text = [user(f"ask {i // 2}"), says(f"reply {i}"), user("and?"), says("done")]
        rows.append(spoken(i, text, task_id=f"t{i // 2}", success=bool(i % 2), reward=float(i % 2), tools="[]"))
    if name == "trl-sft":
        rows = [build(i) for i in range(8)]  # with tool calls and token ids
    assert train(name, out(name, rows, tmp_path), tmp_path / "run") > 0


# others


def test_sharegpt_alternates(tmp_path: Path) -> None:
    turns = json.loads(out("sharegpt", [hard(0)], tmp_path).read_text())["conversations"]
    assert [turn["from"] for turn in turns] == ["human", "function_call", "observation", "gpt"]


def test_anthropic_answers_of_parallel_calls_are_one_message(tmp_path: Path) -> None:
    line = json.loads(out("anthropic", KINDS["parallel calls"], tmp_path).read_text())
    assert [message["role"] for message in line["messages"]] == ["user", "assistant", "user", "assistant"]
    assert [block["type"] for block in line["messages"][2]["content"]] == ["tool_result", "tool_result"]


def test_verl_tasks(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"env": "shop", "split": "dev", "ground_truth": '"Bob"', "tools": '[{"a": 1}]'}
    tasks = [Task(task_id=f"t{i}", level=i, prompt=f"p{i}", **fields) for i in range(3)]
    assert write_tasks(tasks, tmp_path / "t.parquet") == 3
    assert read_tasks(tmp_path / "t.parquet") == tasks


def test_verl_sft_keeps_to_the_documented_schema(tmp_path: Path) -> None:
    """Columns and types of verl's multi-turn SFT data (``docs/preparation/prepare_data``)."""
    import pyarrow.parquet as pq

    table = pq.read_table(out("verl-sft", KINDS["tools"], tmp_path))
    assert set(table.schema.names) == {"messages", "tools", "enable_thinking"}
    [messages] = table["messages"].to_pylist()
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"place": "here"}
    assert table["tools"].to_pylist() == [json.loads(LOOK)]
    bare = pq.read_table(out("verl-sft", KINDS["text"], tmp_path))
    assert bare.schema.names == ["messages", "enable_thinking"]  # verl takes a text for tools if the column is there
    some = pq.read_table(out("verl-sft", KINDS["tools"] + KINDS["text"], tmp_path))
    assert some["tools"].to_pylist() == [json.loads(LOOK), []]
    mixed = pq.read_table(out("verl-sft", KINDS["tokens"], tmp_path))
    assert [json.loads(text) for text in mixed["tools"].to_pylist()] == [
        json.loads(row.tools) for row in KINDS["tokens"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "tools", "reasoning"])
def test_verl_loads_what_is_exported(kind: str, tmp_path: Path) -> None:
    """In verl's own dataset class, if it is installed: it cannot be beside this project's transformers."""
    pytest.importorskip("verl")
    from formats_trl import tokenizer_of_bytes
    from formats_verl import load

    item = load(out("verl-sft", KINDS[kind], tmp_path), tokenizer_of_bytes())
    assert item["input_ids"].shape == item["loss_mask"].shape
    assert item["loss_mask"].sum() > 0


def test_datasets_in_memory() -> None:
    table = to_table(ROWS, TRAJECTORY_SCHEMA)
    dataset = to_dataset(table)
    assert dataset.num_rows == 4
    picked = from_dataset(dataset.select([3, 0]))
    assert picked["trajectory_id"].to_pylist() == [ROWS[3].trajectory_id, ROWS[0].trajectory_id]
