import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from store_rows import build

from datastore import StoreError, TrajectoryBuffer
from datastore.formats import FORMATS, export_file, import_file
from datastore.formats.huggingface import from_dataset, to_dataset
from datastore.formats.verl import read_tasks, write_tasks
from schemas.arrow import to_table
from schemas.task import Task
from schemas.trajectory import TRAJECTORY_SCHEMA, Message, Role, Termination, ToolCall, Trajectory

SUFFIX = {"verl-sft": ".parquet", "atif": "", "swe-agent": "", "huggingface": "", "tau2": ".json"}


def hard(number: int) -> Trajectory:
    """What formats stumble over: a system message, parallel calls, odd spacing in arguments, tools that differ from row
    to row, gaps between spans, trailing tokens, a NaN inside an action, unicode."""
    messages = [
        Message(role=Role.SYSTEM, content="be brief", token_start=0, token_end=2),
        Message(role=Role.USER, content=f"wéather {number}?\n", token_start=3, token_end=5),
        Message(
            role=Role.ASSISTANT,
            content="both",
            reasoning="two at once",
            tool_calls=[
                ToolCall(id="a", name="find", arguments='{"who":  "Ann", "n": [1, {"x": null}]}'),
                ToolCall(id="b", name="find", arguments="{}"),
            ],
            reward=0.25,
            token_start=6,
            token_end=9,
        ),
        Message(role=Role.TOOL, content="sunny", tool_call_id="a", name="find", token_start=10, token_end=11),
        Message(role=Role.TOOL, content="rainy", tool_call_id="b", name="find", token_start=11, token_end=12),
        Message(role=Role.ASSISTANT, content="mixed", token_start=13, token_end=15),
    ]
    mask = [6 <= i < 9 or 13 <= i < 15 for i in range(17)]
    logprobs = [-0.1 * (i + 1) if action else math.nan for i, action in enumerate(mask)]
    logprobs[7] = math.nan
    tools = [{"type": "function", "function": {"name": "find", "parameters": {f"p{number}": [number, "x"]}}}]
    return build(
        number,
        messages=messages,
        tools=json.dumps(tools),
        input_ids=[number * 100 + i for i in range(17)],
        action_mask=mask,
        logprobs=[float(x) for x in pa.array(logprobs, pa.float32()).to_pylist()],
        n_tokens=17,
        n_action_tokens=5,
        n_tool_calls=2,
        final_state='{"a": [1]}',
        termination=Termination.MAX_STEPS if number % 2 else Termination.ANSWERED,
    )


ROWS = [hard(0), hard(1), build(2), build(3)]


def round_trip(name: str, rows: list[Trajectory], folder: Path) -> list[Trajectory]:
    path = folder / f"out{SUFFIX.get(name, '.jsonl')}"
    FORMATS[name].write(rows, path)
    return list(FORMATS[name].read(path))


def same_tokens(one: Trajectory, two: Trajectory) -> bool:
    logprobs = [json.dumps(row.logprobs) for row in (one, two)]  # NaN equals NaN as text
    return (one.input_ids, one.action_mask) == (two.input_ids, two.action_mask) and logprobs[0] == logprobs[1]


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.tokens])
def test_token_ids_masks_and_log_probs_survive_exactly(name: str, tmp_path: Path) -> None:
    back = round_trip(name, ROWS, tmp_path)
    assert len(back) == len(ROWS)
    for one, two in zip(back, ROWS, strict=True):
        assert same_tokens(one, two)
        spans = [(m.token_start, m.token_end) for m in one.messages if m.role is Role.ASSISTANT]
        assert spans == [(m.token_start, m.token_end) for m in two.messages if m.role is Role.ASSISTANT]


@pytest.mark.parametrize("name", ["atif", "verifiers-v1", "huggingface"])
def test_whole_rows_survive(name: str, tmp_path: Path) -> None:
    for one, two in zip(round_trip(name, ROWS, tmp_path), ROWS, strict=True):
        lost = {"created_at", "stage", "fingerprint", "run_id"}
        assert json.loads(one.model_dump_json(exclude=lost)) == json.loads(two.model_dump_json(exclude=lost))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "trl-preference"])
def test_what_was_said_and_done_survives(name: str, tmp_path: Path) -> None:
    rows = [build(2), build(3)]  # one call a step, no text beside it: what every format can hold
    back = round_trip(name, rows, tmp_path)
    assert len(back) == 2
    back.sort(key=lambda row: row.messages[0].content)
    for one, two in zip(back, rows, strict=True):
        said = [(m.role, m.content, [(c.name, c.parsed()) for c in m.tool_calls]) for m in one.messages]
        assert said == [(m.role, m.content, [(c.name, c.parsed()) for c in m.tool_calls]) for m in two.messages]
        assert (one.n_steps, one.n_tool_calls) == (2, 1)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "trl-preference"])
def test_tool_schemas_that_differ_from_row_to_row_survive(name: str, tmp_path: Path) -> None:
    back = round_trip(name, ROWS, tmp_path)
    assert [json.loads(row.tools) for row in back] == [json.loads(row.tools) for row in ROWS]


@pytest.mark.parametrize("name", ["tau2", "verifiers", "verifiers-v1", "atif", "huggingface"])
def test_the_outcome_survives(name: str, tmp_path: Path) -> None:
    for one, two in zip(round_trip(name, ROWS, tmp_path), ROWS, strict=True):
        for column in ("reward", "success", "termination", "task_id", "env", "split", "level", "reward_components"):
            assert getattr(one, column) == getattr(two, column), column


@pytest.mark.parametrize("name", FORMATS)
def test_import_appends_once_and_passes_validation(name: str, tmp_path: Path) -> None:
    source, buffer = TrajectoryBuffer(tmp_path / "a"), TrajectoryBuffer(tmp_path / "b")
    source.append(ROWS, stage="s", fingerprint="f")
    path = tmp_path / f"file{SUFFIX.get(name, '.jsonl')}"
    written = export_file(source, [row.trajectory_id for row in ROWS], path, name)
    result = import_file(buffer, path, name, env="shop", split="dev")
    assert result.rows >= written > 0
    assert import_file(buffer, path, name, env="shop", split="dev").skipped
    rows = buffer.sql("select distinct env, split, stage from trajectories")
    assert rows.rows() == [("shop", "dev", "import")]


def test_verifiers_turns_whose_context_was_rewritten_become_segments(tmp_path: Path) -> None:
    def turn(prompt: list[int], completion: list[int], text: str) -> dict[str, Any]:
        tokens = {"prompt_ids": prompt, "completion_ids": completion, "completion_logprobs": [-1.0] * len(completion)}
        return {
            "prompt": [{"role": "user", "content": "q"}],
            "completion": [{"role": "assistant", "content": text}],
            "tokens": tokens | {"completion_mask": [1] * len(completion)},
        }

    turns = [turn([1, 2], [3], "a"), turn([1, 2, 3, 4], [5], "b"), turn([9], [8], "c")]
    line = {"example_id": 7, "prompt": "q", "completion": [], "reward": 1.0, "trajectory": turns}
    (tmp_path / "r.jsonl").write_text(json.dumps(line) + "\n")
    first, second = FORMATS["verifiers"].read(tmp_path / "r.jsonl")
    assert (first.input_ids, first.action_mask) == ([1, 2, 3, 4, 5], [False, False, True, False, True])
    assert (second.input_ids, second.action_mask) == ([9, 8], [False, True])
    assert first.episode_id == second.episode_id
    assert (first.segment, second.segment) == (0, 1)


def test_a_trace_that_branches_gives_a_row_per_leaf(tmp_path: Path) -> None:
    def node(parent: int | None, role: str, text: str, ids: list[int]) -> dict[str, Any]:
        mask = [role == "assistant"] * len(ids)
        own = {"token_ids": ids, "mask": mask, "is_content": [True] * len(ids), "logprobs": [-0.5] * sum(mask)}
        return {"parent": parent, "message": {"role": role, "content": text}, "sampled": role == "assistant", **own}

    nodes = [node(None, "user", "q", [1]), node(0, "assistant", "a", [2, 3]), node(0, "assistant", "b", [4])]
    trace = {"id": "t", "nodes": nodes, "rewards": {"exact": {"score": 0.5, "weight": 2.0}}}
    (tmp_path / "v1.jsonl").write_text(json.dumps({"id": "e", "env": {"id": "shop"}, "traces": [trace]}))
    one, two = FORMATS["verifiers-v1"].read(tmp_path / "v1.jsonl")
    assert (one.input_ids, two.input_ids) == ([1, 2, 3], [1, 4])
    assert (one.reward, one.success, one.env) == (1.0, True, "shop")


def test_atif_of_others(tmp_path: Path) -> None:
    document = {
        "schema_version": "ATIF-v1.7",
        "session_id": "s1",
        "agent": {"name": "acme", "version": "2", "model_name": "m"},
        "steps": [
            {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "hello"}]},
            {
                "step_id": 2,
                "source": "agent",
                "message": "",
                "tool_calls": [{"tool_call_id": "c", "function_name": "look", "arguments": {"x": 1}}],
                "observation": {"results": [{"source_call_id": "c", "content": "seen"}, {"content": None}]},
                "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]},
            },
            {
                "step_id": 3,
                "source": "agent",
                "message": "done",
                "metrics": {"prompt_token_ids": [1, 2, 3, 4], "completion_token_ids": [5], "logprobs": [-0.25]},
            },
        ],
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    [row] = FORMATS["atif"].read(tmp_path / "a.json")
    assert [m.role.value for m in row.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert (row.input_ids, row.action_mask) == ([1, 2, 3, 4, 5], [False, False, True, False, True])
    assert (row.messages[1].token_start, row.messages[4].token_end) == (2, 5)
    assert row.messages[2].name == "look"
    document["steps"][2]["metrics"]["prompt_token_ids"] = [7, 7]  # type: ignore[index]
    (tmp_path / "a.json").write_text(json.dumps(document))
    [row] = FORMATS["atif"].read(tmp_path / "a.json")
    assert row.input_ids == []  # not one sequence: better no tokens than wrong ones


def test_swe_agent_of_others(tmp_path: Path) -> None:
    step = {"action": "ls\n", "observation": "a.py", "response": "Let me look\n```\nls\n```", "thought": "Let me look"}
    query = [{"role": "system", "content": "you are"}, {"role": "user", "content": "fix it"}]
    last = {"action": "submit", "observation": "", "response": "", "thought": ""}
    for key in ("query", "message"):
        document = {"trajectory": [step | {key: query}, last], "info": {"exit_status": "submitted", "submission": "d"}}
        (tmp_path / "x.traj").write_text(json.dumps(document))
        [row] = FORMATS["swe-agent"].read(tmp_path / "x.traj")
        assert [m.content for m in row.messages[:4]] == ["you are", "fix it", "Let me look", "a.py"]
        assert row.messages[2].tool_calls[0].parsed() == {"command": "ls"}
        assert row.termination is Termination.ANSWERED
        assert json.loads(row.final_state) == {"submission": "d"}
    (tmp_path / "y.traj").write_text(json.dumps({"history": query}))
    assert len(list(FORMATS["swe-agent"].read(tmp_path))) == 2


def test_preferences_take_best_against_worst_and_skip_the_rest(tmp_path: Path) -> None:
    rows = [build(i) for i in range(8)]  # tasks t0 and t1, alternating failure and success
    rows += [build(i, success=True) for i in range(8, 12)]
    back = round_trip("trl-preference", rows, tmp_path)
    assert [(row.success, row.task_id) for row in back] == [
        (True, "task-000000"),
        (False, "task-000000"),
        (True, "task-000001"),
        (False, "task-000001"),
    ]
    line = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert line["prompt"] == [{"role": "user", "content": "boss of Ann 1?"}]
    assert line["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"who": "Ann", "rel": "boss"}


def test_sharegpt_alternates(tmp_path: Path) -> None:
    round_trip("sharegpt", [hard(0)], tmp_path)
    turns = json.loads((tmp_path / "out.jsonl").read_text())["conversations"]
    assert [turn["from"] for turn in turns] == ["human", "function_call", "observation", "gpt"]


def test_verl_tasks(tmp_path: Path) -> None:
    tasks = [
        Task(
            task_id=f"t{i}", env="shop", split="dev", level=i, prompt=f"p{i}", ground_truth='"Bob"', tools='[{"a": 1}]'
        )
        for i in range(3)
    ]
    assert write_tasks(tasks, tmp_path / "t.parquet") == 3
    assert read_tasks(tmp_path / "t.parquet") == tasks


def test_datasets_in_memory(tmp_path: Path) -> None:
    table = to_table(ROWS, TRAJECTORY_SCHEMA)
    dataset = to_dataset(table)
    assert from_dataset(dataset).equals(table.select(TRAJECTORY_SCHEMA.names)) or dataset.num_rows == 4
    picked = from_dataset(dataset.select([3, 0]))
    assert picked["trajectory_id"].to_pylist() == [ROWS[3].trajectory_id, ROWS[0].trajectory_id]
    TrajectoryBuffer(tmp_path).append(picked, stage="s", fingerprint="f")


def test_bad_files_are_named(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    path = tmp_path / "x.jsonl"
    path.write_text('{"messages": []}\n{"messages": \n')
    with pytest.raises(StoreError, match=r"x.jsonl:2 is not JSON"):
        import_file(buffer, path, "openai-chat")
    path.write_text('{"message": []}\n')
    with pytest.raises(StoreError, match="does not look like openai-chat: lacks 'messages'"):
        import_file(buffer, path, "openai-chat")
    path.write_text('{"messages": [{"role": "robot", "content": ""}]}\n')
    with pytest.raises(StoreError, match="'robot' is not a valid Role"):
        import_file(buffer, path, "openai-chat")
    with pytest.raises(StoreError, match="did you mean 'sharegpt'"):
        import_file(buffer, path, "share-gpt")
    with pytest.raises(StoreError, match="nothing to import"):
        import_file(buffer, tmp_path / "none", "atif")
    assert buffer.version in (None, 0)
