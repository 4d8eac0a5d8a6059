"""Whether training adds to a policy or sharpens it, from planted outcomes: in words, in compare, show and reports."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows import cli
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.results.compare import compare
from agentrl.pipelines.results.gains import gain_of, gains
from agentrl.pipelines.results.lineage import find_artifact
from agentrl.pipelines.run.execute import job_of, perform
from agentrl.statistics.sharpening import Learned

STAGES = '''
"""Policies that solve the tasks of these numbers, sampled, greedy, and at the temperature that is best on dev tasks."""

import json
from typing import NamedTuple

import pyarrow as pa

from agentrl.pipelines.handles import Model, Table, Tasks, Trajectories
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class Number(StageConfig):
    n: int


@stage("my.tasks", version=1)
def tasks(context: Context, config: Number) -> Tasks:
    return context.tasks(Task(task_id=f"t-{n}", env="e", split="heldout", prompt=f"{n}?") for n in range(config.n))


class Solved(StageConfig):
    sampled: list[int] = []
    greedy: list[int] = []
    control: list[int] = []


@stage("my.train", version=1)
def train(context: Context, config: Solved, model: Model | None = None) -> Model:
    return context.model(lambda path: (path / "solved.json").write_text(config.model_dump_json()))


class Best(StageConfig):
    temperature: float | None = None


class Measured(NamedTuple):
    results: Table
    trajectories: Trajectories


def _in(ranges, number):
    return any(first <= number < last for first, last in zip(ranges[::2], ranges[1::2]))


@stage("evaluate.mine", version=1)
def measure(context: Context, config: Best, model: Model, tasks: Tasks) -> Measured:
    solved, all_, rows = json.loads((model.path / "solved.json").read_text()), tasks.read(), []
    kinds = ["sampled", "greedy", *(["control"] if config.temperature not in (None, 0.0, 1.0) else [])]
    for place, kind in enumerate(kinds):
        for number, task in enumerate(all_):
            name, success = context.trajectory_id(place * len(all_) + number), _in(solved[kind], number)
            rows.append(Trajectory(
                trajectory_id=name, episode_id=name, task_id=task.task_id, source="model", env="e", split="heldout",
                prompt=task.prompt, reward=float(success), success=success, termination="answered", messages=[],
                tags=[kind],
            ))
    context.append(rows)
    row = {"policy": model.stage, "level": -1, "split": "heldout", "tasks": 9, "success": 0.5, "low": 0.4, "high": 0.6}
    row |= {"tokens": 1.0, "tool_errors": 0.0, "format_errors": 0.0, "env": "", "temperature": 1.0}
    results = [{**row, "decoding": kind} for kind in ("sampled", "greedy")]
    if config.temperature is not None:
        results.append({**row, "decoding": "control", "temperature": config.temperature})
    context.metrics.update(success=0.5, success_low=0.4, success_high=0.6, greedy=0.5)
    return Measured(context.table(pa.Table.from_pylist(results), "results"), context.select())
'''

# Of 64 tasks, at temperature 1, 12 are gained and 2 lost, greedily 8 and 5, as GRPO on SmolLM2 was measured. Lists are
# ranges of numbers: from, to, from, to.
PIPELINE = """
name: gains
stages:
  tasks: {uses: "my_gains:tasks", with: {n: 64}}
  warm: {uses: "my_gains:train", with: {sampled: [0, 8], greedy: [0, 15]}}
  sharp: {uses: "my_gains:train", inputs: {model: warm}, with: {sampled: [2, 20], greedy: [5, 23]}}
  unmeasured: {uses: "my_gains:train", inputs: {model: sharp}}
  taught: {uses: "my_gains:train", inputs: {model: unmeasured}, with: {sampled: [0, 30], control: [5, 43]}}
  spoilt: {uses: "my_gains:train", inputs: {model: taught}, with: {sampled: [0, 30], greedy: [5, 20]}}
  blind: {uses: "my_gains:train", inputs: {model: taught}, with: {sampled: [0, 50], greedy: [0, 50]}}
  eval_warm: {uses: "my_gains:measure", inputs: {model: warm, tasks: tasks}, with: {temperature: 0.0}}
  eval_sharp: {uses: "my_gains:measure", inputs: {model: sharp, tasks: tasks}, with: {temperature: 0.0}}
  eval_taught: {uses: "my_gains:measure", inputs: {model: taught, tasks: tasks}, with: {temperature: 0.3}}
  eval_spoilt: {uses: "my_gains:measure", inputs: {model: spoilt, tasks: tasks}, with: {temperature: 0.0}}
  eval_blind: {uses: "my_gains:measure", inputs: {model: blind, tasks: tasks}}
  compare: {uses: evaluate.compare, inputs: {attempts: [eval_warm, eval_sharp]}}
  report: {uses: report.training, inputs: {evaluations: ["eval*"]}}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gains")
    (folder / "my_gains.py").write_text(STAGES)
    return run(folder, PIPELINE)


def run(folder: Path, pipeline: str) -> str:
    path, store = folder / "gains.yaml", str(folder / "store")
    path.write_text(pipeline)
    plan = make_plan(load(str(path)), Catalog(store), store)
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))
    return store


def test_a_gain_at_temperature_1_alone_is_sharpening(store: str) -> None:
    comparison = compare(Catalog(store), ["eval_warm", "eval_sharp"])
    [gained] = comparison.gains.values()
    assert gained.pooled.word is Learned.SHARPENS
    sampled, greedy = gained.pooled.sampled, gained.pooled.best
    assert sampled is not None
    assert greedy is not None
    assert (sampled.gained, sampled.lost, round(sampled.p or 0, 3)) == (12, 2, 0.013)
    assert (greedy.gained, greedy.lost, round(greedy.p or 0, 2)) == (8, 5, 0.58)
    [told] = comparison.to_json()["differences"]
    assert told["verdict"].startswith("sharp sharpens warm: a lower temperature gives as much; over warm at its best ")
    assert "temperature 0: 0.234 -> 0.281, +4.7 points (95 % interval -" in told["verdict"]
    assert "8 gained, 5 lost of 64 tasks, exact McNemar p = 0.58; at temperature 1: 0.125 -> 0.281" in told["verdict"]
    assert "better" not in told["verdict"]
    assert told["gain"]["word"] == "sharpens"


def test_each_policy_is_measured_by_its_nearest_predecessor_that_was_evaluated(store: str) -> None:
    catalog = Catalog(store)
    manifests = {
        name: find_artifact(catalog, f"eval_{name}") for name in ("warm", "sharp", "taught", "spoilt", "blind")
    }
    result = gains(catalog, manifests.values())
    told = {name: result.get(manifest.fingerprint) for name, manifest in manifests.items()}
    assert told["warm"] is None, "it started from nothing"
    words = {name: (item.than, item.word) for name, item in told.items() if item}
    assert words == {
        "sharp": ("warm", Learned.SHARPENS),
        "taught": ("sharp", Learned.ADDS),
        "spoilt": ("taught", Learned.WORSE),
        "blind": ("taught", Learned.CANNOT_TELL),
    }
    taught = told["taught"]
    assert taught is not None
    assert taught.best is not None
    assert (taught.best.gained, taught.best.lost) == (20, 0), "rows at its best temperature, 0.3"
    assert (taught.best.p or 0) == pytest.approx(2 / 2**20)
    assert "(the control was not run; set inputs.dev of eval_blind, as in dev: tasks.dev)" in str(told["blind"])
    alone = gain_of(catalog, manifests["taught"])
    assert alone is not None
    assert str(alone) == str(taught)


def test_the_control_that_was_not_run_is_said_by_compare(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["compare", "eval_taught", "eval_blind", "--store", store]) == 0
    out = capsys.readouterr().out
    assert "blind is better at temperature 1 than taught: +31.2 points" in out
    assert "; cannot tell whether blind adds to taught: the control was not run; set inputs.dev of eval_blind" in out


def test_the_stage_that_compares_says_it_too(store: str) -> None:
    catalog = Catalog(store)
    manifest = find_artifact(catalog, "compare")
    [row] = pq.read_table(catalog.local(manifest, manifest.outputs["differences"].path)).to_pylist()
    assert (row["word"], row["verdict"].startswith("sharp sharpens warm")) == ("sharpens", True)
    assert manifest.metrics["verdict on sharp"] == row["verdict"]


def test_show_says_what_an_evaluation_shows(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["show", "eval_sharp", "--store", store]) == 0
    assert "sharp sharpens warm" in capsys.readouterr().out
    assert cli.call(["show", "eval_sharp", "--store", store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gain"]["word"] == "sharpens"


def test_the_report_says_what_each_stage_adds(store: str) -> None:
    catalog = Catalog(store)
    manifest = find_artifact(catalog, "report")
    path = catalog.local(manifest, manifest.outputs["report"].path)
    text = (path / "report.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in text.splitlines() if " | " in line}
    assert rows["after"][3:5] == ["at its best temperature", "over its predecessor"]
    assert rows["taught"][3:5] == ["0.500 (0.400 to 0.600) at 0.3", r"adds \(sharp\)"]
    assert rows["blind"][3:5] == ["not run", r"cannot tell \(taught\)"]
    assert rows["sharp"][4] == r"sharpens \(warm\)"
    assert "- taught adds to sharp; over sharp at its best temperature 0: 0.281" in text
    assert "<td>sharpens (warm)</td>" in (path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.ci
def test_seeds_of_one_stage_are_pooled_and_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of four seeds gains 8 of 64 tasks, and one artifact has other settings."""
    (tmp_path / "my_gains.py").write_text(STAGES)
    before = PIPELINE.partition("  unmeasured:")[0]
    evaluated = "\n".join(line for line in PIPELINE.splitlines() if "eval_warm" in line or "eval_sharp" in line)
    for seed, solved in (("0", "[0, 23]"), ("1", "[0, 23]"), ("2", "[0, 23]")):
        text = before.replace("name: gains", f"name: gains\nseed: {seed}").replace("[5, 23]", solved)
        store = run(tmp_path, f"{text}{evaluated}\n")
    run(tmp_path, f"{before.replace('[5, 23]', '[0, 16]')}{evaluated}\n".replace("name: gains", "name: gains\nseed: 3"))
    run(tmp_path, f"{text}{evaluated}\n".replace("seed: 2", "seed: 4"))
    comparison = compare(Catalog(store), ["eval_warm", "eval_sharp"])
    assert [(len(arm.runs), arm.seeds) for arm in comparison.arms] == [
        (5, ("0", "1", "2", "3", "4")),
        (4, ("0", "1", "2", "4")),
    ]
    [gained] = comparison.gains.values()
    assert gained.pooled.best is not None
    assert (gained.pooled.best.gained, gained.pooled.best.lost, gained.pooled.word) == (32, 0, Learned.ADDS)
    assert list(gained.by_seed) == ["0", "1", "2", "4"]
    assert comparison.notes == ["eval_sharp: 1 older artifacts with other settings are left out; name them as "
                           "eval_sharp/FINGERPRINT"]  # fmt: skip
    assert cli.call(["compare", "eval_warm", "eval_sharp", "--store", store]) == 0
    out = capsys.readouterr().out
    assert "  seed 2: adds" in out
    assert comparison.notes[0] in out
