"""What will run and why; which stages a selection may run."""

import json
import subprocess
import sys

import pytest
from toy_project import Project

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.plan.plan import Selection, differences
from agentrl.pipelines.run.execute import Outcome, open_output
from agentrl.schemas.manifest import Ingredients, InputRecord

PIPELINE = """
    name: p
    stages:
      a: {uses: "toy:numbers", with: {n: 5}}
      b: {uses: "toy:add", inputs: {tables: a}}
      c: {uses: "toy:add", inputs: {tables: [a, b.sums]}}
      d: {uses: "toy:numbers", with: {n: 2}}
"""


MAYBE = "may be re-used if their content is equal"


def statuses(
    project: Project, selection: Selection | None = None, text: str = PIPELINE, **options: object
) -> dict[str, str]:
    plan = project.plan(text, selection, **options)
    return {step.name: str(step.status) for step in plan.steps.values()}


def reasons(project: Project, stage: str, text: str = PIPELINE, **options: object) -> list[str]:
    return project.plan(text, **options).steps[stage].reasons


def test_first_everything_runs_then_nothing(project: Project) -> None:
    assert statuses(project) == dict.fromkeys("abcd", "run")
    assert reasons(project, "a") == ["never ran"]
    assert set(project.run(PIPELINE)) == set("abcd")
    assert statuses(project) == dict.fromkeys("abcd", "cached")
    assert project.run(PIPELINE) == {}


def test_reasons_name_the_key_the_module_the_input(project: Project) -> None:
    project.run(PIPELINE)
    assert reasons(project, "a", settings=["stages.a.with.n=6"]) == ["config n: 5 -> 6"]
    assert reasons(project, "b", settings=["stages.a.with.n=6"]) == ["input a is made again", MAYBE]
    assert reasons(project, "c", settings=["stages.a.with.n=6"]) == [
        "input a is made again",
        "input b is made again",
        MAYBE,
    ]
    assert reasons(project, "a", settings=["seed=3"]) == ["seed 0 -> 3"]
    assert reasons(project, "a", settings=["stages.a.with.names.x=3"]) == [
        "config names: {} -> unset",
        "config names.x: unset -> 3",
    ]
    rewired = PIPELINE.replace("tables: [a, b.sums]", "tables: a")
    assert reasons(project, "c", rewired) == ["input tables a.table, b.sums -> a.table"]
    assert (
        reasons(project, "d", PIPELINE.replace('d: {uses: "toy:numbers", with: {n: 2}}', 'd: {uses: "toy:loose"}'))[0]
        == "uses toy.numbers -> toy.loose"
    )
    project.edit("deeper", "return a + b", "return b + a")
    assert reasons(project, "b") == [f"code {project.package}/deeper.py changed"]
    project.edit("deeper", "return b + a", "return a + b")
    project.run(PIPELINE, Selection(only=("a",)), settings=["stages.a.with.n=6"])
    assert reasons(project, "b", settings=["stages.a.with.n=6"]) == ["input a changed"]


def test_a_reason_names_the_key_within_a_list() -> None:
    old = Ingredients(
        scheme=1,
        stage="s",
        uses="u",
        uses_version="1",
        config={"rules": [{"rule": "keep", "n": 1}], "splits": ["a"]},
        seed=0,
        inputs={},
        code={},
    )
    new = old.model_copy(update={"config": {"rules": [{"rule": "keep", "n": 2}, {"rule": "cap"}], "splits": ["b"]}})
    assert differences(old, new) == [
        "config rules.0.n: 1 -> 2",
        "config rules.1.rule: unset -> cap",
        'config splits: ["a"] -> ["b"]',
    ]


def test_an_external_file_is_a_reason(project: Project) -> None:
    text = 'name: p\nstages: {a: {uses: "toy:numbers"}, o: {uses: "toy:outside", inputs: {table: a}, with: {base: m}}}'
    (project.folder / "m").mkdir()
    (project.folder / "m" / "weights").write_text("1")
    project.run(text)
    (project.folder / "m" / "weights").write_text("2")
    assert reasons(project, "o", text) == ["model base changed"]


def test_selections(project: Project) -> None:
    assert statuses(project, Selection(until=("b",))) == {"a": "run", "b": "run", "c": "skipped", "d": "skipped"}
    assert statuses(project, Selection(first=("b",))) == {
        "a": "skipped",
        "b": "blocked",
        "c": "blocked",
        "d": "skipped",
    }
    project.run(PIPELINE, Selection(until=("b",)))
    assert statuses(project, Selection(first=("b",))) == {"a": "cached", "b": "cached", "c": "run", "d": "skipped"}
    assert statuses(project, Selection(only=("d",))) == {"a": "cached", "b": "cached", "c": "skipped", "d": "run"}
    assert statuses(project, Selection(first=("b",), until=("c",), force=True)) == {
        "a": "cached", "b": "run", "c": "run", "d": "skipped",
    }  # fmt: skip


def test_only_runs_one_stage_from_cached_inputs_and_says_what_is_missing(project: Project) -> None:
    project.run(PIPELINE)
    only = Selection(only=("b",))
    assert statuses(project, only, settings=["stages.b.with.power=2"]) == {
        "a": "cached", "b": "run", "c": "skipped", "d": "cached",
    }  # fmt: skip
    plan = project.plan(PIPELINE, only, settings=["stages.a.with.n=6"])
    assert str(plan.steps["b"].status) == "blocked"
    [reason] = plan.steps["b"].reasons
    assert "input a is not cached (config n: 5 -> 6)" in reason
    assert "--set stages.a.with.n=6" in reason
    assert reason.endswith("--until a")


def test_force_says_whether_the_result_is_the_same(project: Project) -> None:
    project.run(PIPELINE)
    outcomes = project.run(PIPELINE, Selection(only=("b",), force=True))
    assert set(outcomes) == {"b"}
    assert outcomes["b"].reproduced is True
    assert statuses(project) == dict.fromkeys("abcd", "cached")


def test_equal_content_of_an_input_cuts_off_and_other_content_does_not(project: Project) -> None:
    project.run(PIPELINE)
    project.edit("stages", "config.factor * number for number", "number * config.factor for number")
    assert reasons(project, "b")[-1] == MAYBE
    assert set(project.run(PIPELINE)) == {"a", "d"}
    assert project.reused == {"b", "c"}
    assert statuses(project) == dict.fromkeys("abcd", "cached")
    assert set(project.run(PIPELINE, settings=["stages.a.with.n=6"])) == {"a", "b", "c"}


DRAW = """


class Draw(StageConfig):
    rows: int = 2


@stage("toy.draw", version=1)
def draw(context: Context, config: Draw) -> Trajectories:
    value = float(open("value" + ".txt").read())
    rows = []
    for number in range(config.rows):
        name = context.trajectory_id(number)
        task = {"task_id": "t", "env": "e", "split": "train", "prompt": "p", "messages": []}
        more = {"source": "policy", "reward": value, "success": True, "termination": "answered"}
        rows.append(Trajectory(trajectory_id=name, episode_id=name, **task, **more))
    if not context.has_shard(0):
        context.append(rows)
    return context.select()


@stage("toy.rewards", version=1)
def rewards(context: Context, config: Sum, trajectories: Trajectories) -> Table:
    return context.table(trajectories.table(["trajectory_id", "reward"]))


@stage("toy.copy", version=1)
def copy(context: Context, config: Sum, trajectories: Trajectories) -> Trajectories:
    rows = trajectories.read()
    context.append([r.model_copy(update={"trajectory_id": context.trajectory_id(n)}) for n, r in enumerate(rows)])
    return context.select()
"""

DRAWN = """
    name: p
    stages:
      draw: {uses: "toy:draw"}
      rewards: {uses: "toy:rewards", inputs: {trajectories: draw}}
      total: {uses: "toy:rewards", inputs: {trajectories: draw}, with: {power: 2}}
"""


@pytest.fixture
def drawing(project: Project) -> Project:
    """A stage whose rows depend on a file that no fingerprint knows."""
    source = project.source("stages")
    source.write_text(source.read_text() + "\n\nfrom agentrl.schemas.trajectory import Trajectory\n" + DRAW)
    value(project, 0.25)
    return project


def value(project: Project, number: float) -> None:
    (project.folder / "value.txt").write_text(str(number))


def drawn(outcome: Outcome, project: Project) -> list[str]:
    return open_output(
        InputRecord(stage="draw", output="trajectories", fingerprint=outcome.manifest.fingerprint),
        project.catalog,
        TrajectoryBuffer(project.store),
    ).ids()


def test_a_forced_stage_makes_new_rows_and_says_whether_they_are_the_same(drawing: Project) -> None:
    force = Selection(only=("draw",), force=True)
    first = drawing.run(DRAWN)["draw"]
    before = drawn(first, drawing)
    again = drawing.run(DRAWN, force)["draw"]
    assert again.reproduced is True
    after = drawn(again, drawing)
    assert not set(before) & set(after)
    buffer = TrajectoryBuffer(drawing.store)
    assert [row.trajectory_id for row in buffer.get_many(before)] == before, "rows of before stay"
    assert {row.fingerprint for row in buffer.get_many(after)} == {f"{again.manifest.fingerprint}.1"}
    assert statuses(drawing, text=DRAWN) == dict.fromkeys(["draw", "rewards", "total"], "cached")


def test_other_content_of_a_forced_stage_is_said_and_runs_what_reads_it(drawing: Project) -> None:
    drawing.run(DRAWN)
    value(drawing, 0.75)
    plan = drawing.plan(DRAWN, Selection(until=("rewards",), first=("draw",)))
    assert {str(step.status) for step in plan.steps.values()} == {"cached"}
    outcome = drawing.run(DRAWN, Selection(only=("draw",), force=True))["draw"]
    assert outcome.reproduced is False
    buffer = TrajectoryBuffer(drawing.store)
    assert {row.reward for row in buffer.get_many(drawn(outcome, drawing))} == {0.75}
    assert statuses(drawing, text=DRAWN) == {"draw": "cached", "rewards": "run", "total": "run"}
    assert reasons(drawing, "rewards", DRAWN) == ["input draw changed"]
    assert set(drawing.run(DRAWN)) == {"rewards", "total"}
    value(drawing, 0.25)
    assert drawing.run(DRAWN, Selection(only=("draw",), force=True))["draw"].manifest.made_again == 2
    assert statuses(drawing, text=DRAWN)["rewards"] == "cached", "the content of the first time is back"


def test_copied_rows_get_the_lineage_of_the_stage_that_appends_them(drawing: Project) -> None:
    text = DRAWN + '      copy: {uses: "toy:copy", inputs: {trajectories: draw}}\n'
    outcomes = drawing.run(text)
    fingerprint = outcomes["copy"].manifest.fingerprint
    rows = TrajectoryBuffer(drawing.store).get_many(TrajectoryBuffer(drawing.store).ids(fingerprint))
    assert [(row.pipeline, row.stage, row.fingerprint) for row in rows] == [("p", "copy", fingerprint)] * 2


def test_rows_carry_the_pipeline_that_made_them(drawing: Project) -> None:
    drawing.run(DRAWN)
    drawing.run(DRAWN.replace("name: p", "name: other") + "    seed: 7\n")
    buffer = TrajectoryBuffer(drawing.store)
    table = buffer.sql("select pipeline, stage, count(*) as n from trajectories group by pipeline, stage").rows()
    assert sorted(table) == [("other", "draw", 2), ("p", "draw", 2)]
    by_stage = buffer.stats()["stages"]
    assert sorted((row["pipeline"], row["stage"], row["rows"]) for row in by_stage) == sorted(table)
    assert {commit["pipeline"] for commit in buffer.history() if commit["rows"]} == {"p", "other"}


def test_two_pipelines_do_not_give_each_others_reasons(project: Project) -> None:
    other = PIPELINE.replace("name: p", "name: q").replace("n: 5", "n: 7")
    project.run(PIPELINE)
    assert reasons(project, "a", other) == ["never ran"]
    project.run(other)
    assert reasons(project, "a", settings=["stages.a.with.n=6"]) == ["config n: 5 -> 6"]
    assert reasons(project, "a", other, settings=["stages.a.with.n=6"]) == ["config n: 7 -> 6"]


def test_unknown_names_in_a_selection(project: Project) -> None:
    with pytest.raises(SpecError, match="--only: there is no stage 'bb'; did you mean 'b'"):
        statuses(project, Selection(only=("bb",)))


def test_two_fresh_stores_hold_the_same_content(project: Project) -> None:
    first = project.run(PIPELINE)
    (project.folder / "store").rename(project.folder / "other")
    second = project.run(PIPELINE)
    for name, outcome in first.items():
        assert outcome.manifest.fingerprint == second[name].manifest.fingerprint
        assert outcome.manifest.outputs == second[name].manifest.outputs


def test_a_manifest_cut_in_half_counts_as_absent(project: Project) -> None:
    outcome = project.run(PIPELINE)["b"]
    path = project.folder / "store" / "artifacts" / "b" / outcome.manifest.fingerprint / "manifest.json"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.warns(UserWarning, match="corrupt"):
        assert statuses(project)["b"] == "run"
    with pytest.warns(UserWarning, match="corrupt"):
        again = project.run(PIPELINE)
    assert again["b"].manifest.outputs == outcome.manifest.outputs
    assert statuses(project) == dict.fromkeys("abcd", "cached")


def test_json_of_a_plan(project: Project) -> None:
    plan = json.loads(json.dumps(project.plan(PIPELINE).to_json()))
    assert plan["counts"] == {"cached": 0, "run": 4, "blocked": 0, "skipped": 0}
    assert plan["stages"][2]["inputs"] == {"tables": ["a.table", "b.sums"]}


def test_planning_200_stages_starts_neither_prefect_nor_torch(project: Project) -> None:
    lines = ["name: big", "stages:", '  s0: {uses: "toy:numbers"}']
    for number in range(1, 200):
        edge = f"s{number - 3}.sums" if number > 3 else "s0"
        lines.append(f'  s{number}: {{uses: "toy:add", inputs: {{tables: [{edge}]}}}}')
    path = project.write("\n".join(lines), "big.yaml")
    code = (
        "import sys, agentrl.flows.cli; sys.argv = ['agentrl', 'plan', sys.argv[1], '--json']\n"
        "try: agentrl.flows.cli.main()\n"
        "except SystemExit as error: assert not error.code, error.code\n"
        "assert not {'torch', 'prefect', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["run"] == 200
