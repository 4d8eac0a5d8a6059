"""Success and subgoals by tag, against counts by hand; what tasks and rows may say of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_not_trained import row

from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.report import training_report
from agentrl.pipelines.stages.tags import about_of, by_tag, tags
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory
from agentrl.statistics.intervals import wilson


def task(name: str, **metadata: Any) -> Task:
    return Task(task_id=name, env="e", split="heldout", prompt=name, metadata=json.dumps(metadata))


def tried(number: int, of: Task, reached: list[int | None], decoding: str = "greedy", policy: str = "p") -> Trajectory:
    text = {"task_id": of.task_id, "prompt": of.prompt, "policy": f"{policy}/0", "termination": "answered"}
    state = {"final_state": json.dumps({"subgoals": reached}), "success": None not in reached, "reward": 0.0}
    return row(f"r{number}", [decoding], "heldout").model_copy(update=text | state)


BOTH, ONE, NONE = task("a", subgoals=["foe", "pet"], tags=["long"]), task("b", subgoals=["pet"]), task("c")


def measured(harness: Harness, rows: list[Trajectory]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    outputs = harness.run(tags, attempts=[harness.trajectories(rows)], tasks=[harness.tasks([BOTH, ONE, NONE])])
    return outputs["table"].table().to_pylist(), outputs.metrics


def test_success_and_subgoals_by_tag_are_those_of_cases_worked_by_hand(tmp_path: Path) -> None:
    rows = [
        tried(0, BOTH, [0, 1]),  # solved
        tried(1, BOTH, [0, None]),  # foe, but not pet
        tried(2, BOTH, [None, None]),  # pet was not even tried
        tried(3, ONE, [0]),
        tried(4, NONE, []),
        tried(5, ONE, [None], "sampled"),
        tried(6, ONE, [0], "control"),
    ]
    result, metrics = measured(Harness(tmp_path), rows)
    keys = ("policy", "decoding", "tag", "attempts", "successes", "tried", "reached")
    assert [tuple(item[key] for key in keys) for item in result] == [
        ("p", "greedy", "foe", 3, 1, 3, 2),
        ("p", "greedy", "long", 3, 1, None, None),
        ("p", "greedy", "pet", 4, 2, 3, 2),
        ("p", "sampled", "pet", 1, 0, 1, 0),
    ]
    assert [item["share_reached"] for item in result] == [pytest.approx(2 / 3), None, pytest.approx(2 / 3), 0.0]
    assert (metrics["without_tags"], metrics["other_decodings"], metrics["tags"]) == (1, 1, 3)


def test_attempts_at_one_task_are_no_tasks_of_their_own(tmp_path: Path) -> None:
    rows = [tried(number, BOTH, [0, 1]) for number in range(8)] + [
        tried(8 + number, ONE, [None]) for number in range(8)
    ]
    [pet] = [item for item in measured(Harness(tmp_path), rows)[0] if item["tag"] == "pet"]
    assert (pet["attempts"], pet["successes"], pet["success"]) == (16, 8, 0.5)
    assert (pet["low"], pet["high"]) == pytest.approx(wilson(1, 2)), "one of two tasks is always solved, one never"


def test_tasks_of_one_id_have_their_own_tags(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    other = task("a", tags=["short"]).model_copy(update={"prompt": "another question"})
    attempts = [harness.trajectories([tried(0, BOTH, [0, 1]), tried(1, other, [])])]
    result = harness.run(tags, attempts=attempts, tasks=[harness.tasks([BOTH, other])])["table"].table().to_pylist()
    assert {item["tag"]: item["attempts"] for item in result} == {"foe": 1, "long": 1, "pet": 1, "short": 1}


def test_tables_of_a_report_have_a_column_for_each_policy(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    rows = [tried(0, BOTH, [0, None], policy="warm"), tried(1, BOTH, [0, 1], policy="grpo")]
    result, _ = measured(harness, rows)
    success, subgoals = by_tag(result)
    assert success["columns"] == subgoals["columns"] == ["tag", "warm", "grpo"]
    assert success["rows"] == [["foe", "0.00", "1.00"], ["long", "0.00", "1.00"], ["pet", "0.00", "1.00"]]
    assert subgoals["rows"] == [["foe", "1.00", "1.00"], ["pet", "0.00", "1.00"]]
    other = [{**item, "split": "compositional"} for item in result if item["policy"] == "grpo"]
    assert by_tag([*result, *other])[0]["columns"] == ["tag", "warm", "grpo", "grpo, compositional"]
    assert by_tag([]) == []


def test_the_report_prints_them(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    outputs = harness.run(
        tags, attempts=[harness.trajectories([tried(0, BOTH, [0, 1])])], tasks=[harness.tasks([BOTH])]
    )
    same = {"policy": "p", "split": "heldout", "level": -1, "tasks": 1, "success": 1.0, "low": 0.2, "high": 1.0}
    more = {"env": "", "tokens": 9.0, "tool_errors": 0.0, "format_errors": 0.0}
    results = [{**same, **more, "decoding": name, "temperature": 0.0} for name in ("sampled", "greedy")]
    evaluation = harness.table(pa.Table.from_pylist(results))
    report = harness.run(training_report, evaluations=[evaluation], tags=[outputs["table"]])["report"]
    assert "<td>foe</td><td>1.00</td>" in (report.path / "report.html").read_text()
    page = (report.path / "report.md").read_text()
    assert (
        "## Share of tries that reached the subgoal by tag, greedy\n\n| tag | p |\n| --- | --- |\n| foe | 1.00 |"
        in page
    )


@pytest.mark.parametrize("given", [{"tags": "foe"}, {"subgoals": [1]}, {"tags": {"foe": 1}}])
def test_tags_that_are_no_list_of_texts_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"in the metadata of task x is .*; make it a list of texts"):
        about_of(task("x", **given))
