"""The door into pipelines: what others recorded reaches training from a pipeline file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.cli import app
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.plan.plan import Plan, Status, make_plan
from agentrl.pipelines.run.execute import job_of, perform
from agentrl.pipelines.stages.imports import import_
from agentrl.pipelines.stages.select import select
from agentrl.pipelines.stages.tasks import from_trajectories, generate
from agentrl.pipelines.stages.tasks import import_ as import_tasks
from agentrl.pipelines.stages.trajectories import synthesize
from agentrl.schemas.task import Task

CHATS = Path(__file__).parents[2] / "examples" / "chats"


def chat(question: str, **more: Any) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"{question} Yes."}]
    return json.dumps({"messages": messages, **more}) + "\n"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(chat(f"Is {n} a number?") for n in range(3)))
    (folder / "b.jsonl").write_text(chat("Is it late?", rating=4))
    return folder


def planned(text: str, folder: Path) -> Plan:
    path = folder / "p.yaml"
    path.write_text(text)
    store = str(folder / "store")
    return make_plan(load(str(path)), Catalog(store), store)


def run(plan: Plan) -> None:
    """Run what is to run in this process."""
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))


def test_the_librarys_pipeline_takes_chat_logs_to_a_policy(tmp_path: Path) -> None:
    folder = shutil.copytree(CHATS, tmp_path / "chats")
    settings = [f"stages.logs.with.paths=[{folder}]", "stages.policy.with.steps=2"]

    def plan() -> Plan:
        return make_plan(load("chats", settings=settings), Catalog(tmp_path / "store"), str(tmp_path / "store"))

    first = plan()
    run(first)
    [logs, _, policy] = [Catalog(tmp_path / "store").manifest(s.name, s.fingerprint) for s in first.steps.values()]
    assert (logs.metrics["rows"], logs.metrics["calls"], logs.metrics["ignored"]) == (7, 4, "rating 4")
    assert logs.outputs["files"].rows == 2
    assert policy.metrics["rows"] == 7
    assert policy.metrics["last_loss"] < policy.metrics["first_loss"]
    assert {step.status for step in plan().steps.values()} == {Status.CACHED}
    (folder / "small_talk.json").write_text((folder / "small_talk.json").read_text().replace("small", "tiny"))
    assert plan().steps["logs"].reasons == ["file paths.0 changed"]


def test_an_import_names_its_rows_and_says_what_it_leaves(tmp_path: Path, logs: Path) -> None:
    (logs / "twin.jsonl").write_text((logs / "b.jsonl").read_text())
    (logs / "notes.json").write_text('{"nothing": "of ours"}')
    harness = Harness(tmp_path)
    done = harness.run(import_, {"paths": [str(logs)], "split": "dev", "success": "n_steps = 1", "policy": "theirs"})
    rows = done["trajectories"].read()
    assert {(row.split, row.success, row.policy) for row in rows} == {("dev", True, "theirs")}
    assert [row.trajectory_id for row in rows] == [f"trajectories.import-1-00000000-{n:06d}" for n in range(4)]
    assert (done.metrics["rows"], done.metrics["ignored"]) == (4, "rating 1")
    assert done.metrics["doubled"] == str(logs / "twin.jsonl")
    assert done.metrics["skipped"] == str(logs / "notes.json")
    assert [file["rows"] for file in done["files"].table().to_pylist()] == [3, 1]


def test_what_was_said_of_the_rows_comes_with_them(tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thumb = {"name": "thumbs", "value": "up", "author": "ann", "created_at": "2026-01-02"}
    (logs / "c.jsonl").write_text(chat("Is it so?", annotations=[thumb, {**thumb, "turn": 9}]))
    harness, append = Harness(tmp_path), TrajectoryBuffer.append

    def killed(self: TrajectoryBuffer, rows: Any, **options: Any) -> Any:
        list(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(TrajectoryBuffer, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        harness.run(import_, {"paths": [str(logs)]})
    monkeypatch.setattr(TrajectoryBuffer, "append", append)
    before = harness.buffer.annotations.version
    done = harness.run(import_, {"paths": [str(logs)]})
    about = harness.buffer.annotations.frame().filter(trajectory_id=done["trajectories"].ids()[-1])
    assert about.select("name", "value", "author", "turn").rows() == [("thumbs", "up", "ann", None)]
    assert (done.metrics["annotations"], before) == (1, 1)
    assert "annotations that do not fit their row and are set aside in quarantine: 1" in str(done.metrics["remarks"])


def test_two_imports_of_one_file_have_rows_of_their_own(tmp_path: Path, logs: Path) -> None:
    """As every stage run has; so a folder that grew is imported again without a clash of ids."""
    harness = Harness(tmp_path)
    first = harness.run(import_, {"paths": [str(logs / "a.jsonl")]})["trajectories"].read()
    both = harness.run(import_, {"paths": [str(logs)]})["trajectories"].read()
    assert [row.task_id for row in first] == [row.task_id for row in both][:3]
    assert not {row.trajectory_id for row in first} & {row.trajectory_id for row in both}
    assert len({row.episode_id for row in [*first, *both]}) == 7  # rows that name no episode are one each


def test_broken_records_stop_an_import_or_are_set_aside(tmp_path: Path, logs: Path) -> None:
    with (logs / "a.jsonl").open("a") as file:
        file.write('{"messages": [\n')
    harness = Harness(tmp_path)
    with pytest.raises(ValueError, match=r"a\.jsonl:4"):
        harness.run(import_, {"paths": [str(logs)]})
    done = harness.run(import_, {"paths": [str(logs)], "quarantine": True})
    assert (len(done["trajectories"].ids()), done.metrics["unreadable"]) == (4, 1)
    assert len(harness.buffer.unreadable()) == 1


def test_what_an_import_names_is_checked_with_the_file(tmp_path: Path, logs: Path) -> None:
    config = '{paths: [PATH], format: chat, success: "a ="}'
    text = f"name: p\nstages:\n  logs: {{uses: trajectories.import, with: {config}}}\n"
    with pytest.raises(SpecError, match=r"logs\.with\.format: there is no format 'chat'") as error:
        planned(text.replace("PATH", str(logs)), tmp_path)
    assert "success: is no SQL expression" in str(error.value)
    with pytest.raises(SpecError, match=r"paths\.0: there is no file at .*nowhere"):
        planned(text.replace("PATH", "nowhere").replace(", format: chat", "").replace(', success: "a ="', ""), tmp_path)


def test_what_was_chosen_of_a_commands_import_outlives_gc(tmp_path: Path, logs: Path) -> None:
    store = ["--store", str(tmp_path / "store")]

    def agentrl(*arguments: str) -> Any:
        done = CliRunner().invoke(app, [*arguments, *store, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    made = agentrl("buffer", "import", str(logs))
    agentrl("buffer", "sample", "2", "--name", "two")
    agentrl("gc", "--keep-runs", "0")
    assert [manifest.ingredients.stage for manifest in Catalog(tmp_path / "store").all()] == ["two"]
    assert TrajectoryBuffer(tmp_path / "store").scan().collect().height == 4
    refused = CliRunner().invoke(app, ["buffer", "forget", made["fingerprint"], *store])
    assert "1 artifacts read rows of this import: two/" in str(refused.exception)


QUESTIONS = [{"question": "1 + 1?", "answer": "2", "difficulty": 1}, {"question": "2 + 2?", "answer": "4"}]


def test_tasks_come_from_files_of_questions(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in [*QUESTIONS, QUESTIONS[0]]))
    config = {"paths": [str(path)], "columns": {"prompt": "question"}, "env": "lookup", "split": "heldout"}
    done = harness.run(import_tasks, config)
    tasks = done["tasks"].read()
    assert [(task.prompt, task.ground_truth, task.env, task.split) for task in tasks] == [
        ("1 + 1?", '"2"', "lookup", "heldout"),
        ("2 + 2?", '"4"', "lookup", "heldout"),
    ]
    assert done.metrics == {"tasks": 2, "doubled": 1, "ignored": "difficulty 2"}
    with pytest.raises(ValueError, match=r"math\.jsonl:1: task field 'prompt'.*its keys are question, answer"):
        harness.run(import_tasks, {"paths": [str(path)]})
    with pytest.raises(ValueError, match="a task has no"):
        harness.run(import_tasks, config | {"columns": {"question": "prompt"}})


def test_files_number_their_records_and_keys_of_columns_that_are_missing_are_said(tmp_path: Path) -> None:
    harness, path = Harness(tmp_path), tmp_path / "math.jsonl"
    records = [{"id": number, **question} for number, question in enumerate([*QUESTIONS, {"question": "3 + 3?"}])]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    columns = {"prompt": "question", "task_id": "id", "ground_truth": "answer"}
    with pytest.warns(UserWarning, match="1 of 3 records have no 'answer', so their tasks have no ground_truth"):
        tasks = harness.run(import_tasks, {"paths": [str(path)], "columns": columns})["tasks"].read()
    assert [(task.task_id, task.ground_truth) for task in tasks] == [("0", '"2"'), ("1", '"4"'), ("2", "null")]
    with pytest.raises(
        ValueError, match=r"takes ground_truth from the key 'anwser', which no record of .* the last has"
    ):
        harness.run(import_tasks, {"paths": [str(path)], "columns": columns | {"ground_truth": "anwser"}})


def test_our_own_tasks_come_back_as_they_were(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    made = harness.run(generate, {"env": "lookup", "train": 4, "dev": 1, "heldout": 1})["train"]
    lines = tmp_path / "tasks.jsonl"
    lines.write_text("".join(task.model_dump_json() + "\n" for task in made.read()))
    for path in (lines, made.path):
        assert harness.run(import_tasks, {"paths": [str(path)], "env": "lookup"})["tasks"].read() == made.read()
    lines.write_text(made.read()[0].model_copy(update={"env": "other"}).model_dump_json() + "\n")
    with pytest.raises(ValueError, match=r"is of env 'other', and with\.env is 'lookup'"):
        harness.run(import_tasks, {"paths": [str(lines)], "env": "lookup"})


def test_tasks_of_trajectories_are_whole_if_the_tasks_are_there(tmp_path: Path, logs: Path) -> None:
    harness = Harness(tmp_path)
    made = harness.run(generate, {"env": "lookup", "train": 6, "dev": 1, "heldout": 1})["train"]
    rows = harness.run(synthesize, {"noise": 0.5}, tasks=made)["trajectories"]
    failed = harness.run(select, {"version": harness.buffer.version, "where": "not success"}, trajectories=[rows])
    wanted = [row.task_id for row in failed["trajectories"].read()]
    assert 0 < len(wanted) < 6
    done = harness.run(from_trajectories, {"env": "lookup"}, trajectories=[failed["trajectories"]], tasks=[made])
    assert done["tasks"].read() == [task for name in wanted for task in made.read() if task.task_id == name]
    assert done.metrics["without_ground_truth"] == 0
    chats = harness.run(import_, {"paths": [str(logs)]})["trajectories"]
    bare = harness.run(from_trajectories, trajectories=[chats])
    assert [task.prompt for task in bare["tasks"].read()][-1] == "Is it late?"
    assert bare.metrics == {"tasks": 4, "without_ground_truth": 4}
    with pytest.raises(ValueError, match=r"4 of 4 tasks are not of env 'lookup'.*trajectories\.select"):
        harness.run(from_trajectories, {"env": "lookup"}, trajectories=[chats])
    of_format = harness.run(import_tasks, {"paths": [str(logs)], "format": "openai-chat"})["tasks"].read()
    assert [(task.task_id, task.prompt) for task in of_format] == [
        (task.task_id, task.prompt) for task in bare["tasks"].read()
    ]


def test_data_cannot_bring_in_an_environment_that_no_config_chose(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "h")
    made = harness.run(generate, {"env": "lookup", "train": 2, "dev": 1, "heldout": 1})["train"].read()
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(Task.model_dump_json(task) + "\n" for task in made))
    text = (
        "name: p\nstages:\n"
        f"  tasks: {{uses: tasks.import, with: {{paths: [{path}]ENV}}}}\n"
        "  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks}}\n"
    )
    with pytest.raises(ValueError, match=r"of env 'lookup', which no stage before expert chose.*with\.env: 'lookup'"):
        run(planned(text.replace("ENV", ""), tmp_path))
    plan = planned(text.replace("ENV", ", env: lookup"), tmp_path)
    assert "environment lookup" in plan.steps["expert"].ingredients.choices
    run(plan)
