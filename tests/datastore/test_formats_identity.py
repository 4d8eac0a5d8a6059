"""Imports: what makes two rows one task, what counts as success, and whose tokens they have."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from format_files import CHAT, chat, count, lines
from store_rows import build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.imports import Labels, import_paths


@pytest.fixture
def buffer(tmp_path: Path) -> TrajectoryBuffer:
    return TrajectoryBuffer(tmp_path / "store")


def test_the_same_content_says_so(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    path = lines(tmp_path / "a.jsonl", CHAT)
    assert import_paths(buffer, [path]).rows == 1
    (tmp_path / "b.jsonl").write_text(path.read_text())
    named = import_paths(buffer, [tmp_path / "b.jsonl"])
    assert (named.rows, named.known) == (0, [str(tmp_path / "b.jsonl")])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert import_paths(buffer, [tmp_path / "c.jsonl.gz"]).rows == 0
    labelled = import_paths(buffer, [path], labels=Labels(env="shop"))
    assert (labelled.rows, labelled.repeats) == (1, [str(path)])
    twice = import_paths(TrajectoryBuffer(tmp_path / "other"), [path, tmp_path / "b.jsonl"])
    assert (twice.rows, twice.known) == (1, [str(tmp_path / "b.jsonl")])


def tasks(buffer: TrajectoryBuffer) -> list[str]:
    return buffer.sql("select task_id from trajectories order by episode_id")["task_id"].to_list()


def test_tasks_are_the_same_across_files_and_never_collide(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    def simulation(number: str, domain: str, name: str) -> Path:
        task = {"id": number, "user_scenario": f"{domain} {number}"}
        item = {"id": name, "task_id": number, "termination_reason": "user_stop", "messages": CHAT["messages"]}
        document = {"info": {"environment_info": {"domain_name": domain}}, "tasks": [task], "simulations": [item]}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(document))
        return path

    import_paths(
        buffer, [simulation("5", "airline", "x"), simulation("5", "retail", "y"), simulation("5", "airline", "z")]
    )
    airline, retail, again = tasks(buffer)  # x, y, z
    assert airline == again != retail
    assert airline.startswith("tau2/airline/5-")
    import_paths(buffer, [lines(tmp_path / "q.jsonl", chat("same", "a"), chat("same", "b"), chat("other"))])
    chats = [task for task in tasks(buffer) if task.startswith("openai-chat/")]
    assert (len(chats), len(set(chats))) == (3, 2)


def test_labels(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    records = [
        {
            "example_id": i,
            "prompt": f"q{i}",
            "completion": "a",
            "reward": r,
            "metrics": {"exact": e},
            "stats": {"final": f},
        }
        for i, (r, e, f) in enumerate([(0.2, 1.0, 7), (0.9, 0.0, None)])
    ]
    path = lines(tmp_path / "r.jsonl", *records)
    columns = "select reward, success, policy, split, task_id from trajectories order by prompt"

    def rows(**labels: Any) -> list[tuple[Any, ...]]:
        fresh = TrajectoryBuffer(tmp_path / f"store{len(list(tmp_path.iterdir()))}")
        import_paths(fresh, [path], labels=Labels(**labels))
        return fresh.sql(columns).rows()

    assert [row[:2] for row in rows()] == [(0.2, None), (0.9, None)]
    assert [row[:2] for row in rows(success="reward >= 0.5")] == [(0.2, False), (0.9, True)]
    assert [row[:2] for row in rows(success="exact = 1", reward="exact")] == [(1.0, True), (0.0, False)]
    assert [row[:2] for row in rows(reward="stats.final", success="reward > 5")] == [(7.0, True), (None, None)]
    first = rows(policy="m", split="dev", task_prefix="mine/")[0]
    assert first[2:4] == ("m", "dev")
    assert first[4].startswith("mine/verifiers/")
    with pytest.raises(StoreError, match="names are reward"):
        import_paths(buffer, [path], labels=Labels(success="nothing > 1"))
    assert count(buffer) == 0


def test_episodes_and_groups_of_two_imports_stay_apart(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    record = {"example_id": 0, "prompt": "q", "completion": "a", "reward": 1.0}
    import_paths(buffer, [lines(tmp_path / "a.jsonl", record, record | {"completion": "b"})])
    import_paths(buffer, [lines(tmp_path / "b.jsonl", record | {"completion": "c"})])
    table = buffer.sql(
        "select count(distinct task_id), count(distinct group_id), count(distinct episode_id) from trajectories"
    )
    assert table.row(0) == (1, 2, 3)


# tokens


def test_tokens_take_the_tokenizer_that_is_named_and_checked(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    path = tmp_path / "a.jsonl"
    row = build(0, tokenizer="")
    write = FORMATS["atif"].write
    assert write is not None
    write([row], path)
    plain = import_paths(TrajectoryBuffer(tmp_path / "plain"), [path])
    assert "rows with tokens of an unknown tokenizer: name it with --tokenizer to train on them" in plain.remarks
    with pytest.raises(StoreError, match="not of the tokenizer that is named: says no"):
        import_paths(buffer, [path], labels=Labels(tokenizer="tok"), check_tokens=lambda row: "says no")
    seen: list[int] = []

    def good(row: Any) -> None:
        seen.append(row.n_tokens)

    import_paths(buffer, [path], labels=Labels(tokenizer="tok"), check_tokens=good)
    assert seen == [12]
    assert buffer.sql("select tokenizer, n_tokens from trajectories").rows() == [("tok", 12)]


def test_completion_ids_without_prompt_ids_come_without_tokens(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "q"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "a",
            "metrics": {"completion_token_ids": [1, 2], "logprobs": [-1, -2]},
        },
    ]
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps({"schema_version": "ATIF-v1.7", "session_id": "s", "agent": {"name": "x"}, "steps": steps})
    )
    result = import_paths(buffer, [path])
    assert result.tokens == 0
    assert "completion ids without prompt ids: the row comes without tokens" in result.remarks
