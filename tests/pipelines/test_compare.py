"""Sweeps and pairs of evaluations side by side."""

import json

import pytest

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows import cli
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.results.compare import compare, verdict
from agentrl.pipelines.run.execute import job_of, perform

STAGES = '''
"""A policy that solves a task if its number is below a share; the matrix varies the share and the seed."""

from random import Random
from typing import NamedTuple

import pyarrow as pa

from agentrl.pipelines.handles import Table, Trajectories
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.trajectory import Trajectory


class Config(StageConfig):
    share: float = 0.5
    shift: int = 0
    nested: dict[str, int] = {}


@stage("my.train", version=1)
def train(context: Context, config: Config) -> Table:
    share = config.share + Random(context.seed).uniform(-0.02, 0.02)
    return context.table(pa.table({"share": [share], "shift": [config.shift]}))


class Other(StageConfig):
    n: int = 1


@stage("my.other", version=1)
def other(context: Context, config: Other) -> Table:
    return context.table(pa.table({"share": [0.3], "shift": [0]}))


class Measure(StageConfig):
    tasks: int = 200
    prefix: str = "t"


class Measured(NamedTuple):
    results: Table
    trajectories: Trajectories


@stage("my.measure", version=1)
def measure(context: Context, config: Measure, policy: Table) -> Measured:
    [row] = policy.table().to_pylist()
    rows = []
    for number in range(config.tasks):
        solved = (number * 7919 % 100) / 100 < row["share"] and number >= row["shift"]
        for greedy in (False, True):
            name = context.trajectory_id(2 * number + greedy)
            rows.append(Trajectory(
                trajectory_id=name, episode_id=name, task_id=f"{config.prefix}-{number}", source="model", env="e",
                split="heldout", prompt=f"{number}?", reward=float(solved),
                success=None if number == 199 else solved or greedy,
                termination="answered", messages=[], tags=["greedy"] if greedy else [],
            ))
    context.append(rows)
    row = {"policy": policy.stage, "level": -1, "split": "heldout", "tasks": 1, "success": 0.5, "low": 0.4, "high": 0.6}
    row |= {"tokens": 1.0, "tool_errors": 0.0, "format_errors": 0.0}
    results = pa.Table.from_pylist([{**row, "decoding": decoding} for decoding in ("sampled", "greedy")])
    return Measured(context.table(results, "results"), context.select())
'''

PIPELINE = """
name: sweep
stages:
  fit: {uses: "my_sweep:train", matrix: {share: [0.4, 0.6], seed: [0, 1, 2]}}
  eval: {uses: "my_sweep:measure", matrix: {inputs.policy: [fit]}}
  shifted: {uses: "my_sweep:train", with: {share: 0.4, shift: 3}}
  eval_shifted: {uses: "my_sweep:measure", inputs: {policy: shifted}}
  elsewhere: {uses: "my_sweep:measure", inputs: {policy: shifted}, with: {prefix: u}}
  else: {uses: "my_sweep:other"}
  eval_else: {uses: "my_sweep:measure", inputs: {policy: else}}
  report: {uses: report.training, inputs: {evaluations: ["eval*"], attempts: ["eval*"]}}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "my_sweep.py").write_text(STAGES)
    (folder / "sweep.yaml").write_text(PIPELINE)
    store = str(folder / "store")
    plan = make_plan(load(str(folder / "sweep.yaml")), Catalog(store), store)
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))
    return store


def test_a_sweep_is_one_table_with_seeds_pooled(store: str) -> None:
    comparison = compare(Catalog(store), ["eval"])
    assert comparison.keys == ["share"]
    assert [(arm.varied, arm.seeds, len(arm.runs)) for arm in comparison.arms] == [
        ({"share": 0.4}, ("0", "1", "2"), 3),
        ({"share": 0.6}, ("0", "1", "2"), 3),
    ]
    first, second = (arm.estimate for arm in comparison.arms)
    assert first.mean == pytest.approx(0.4, abs=0.03)
    assert second.mean == pytest.approx(0.6, abs=0.03)
    [(arm, difference)] = comparison.differences()
    assert difference.mean == pytest.approx(0.2, abs=0.02)
    assert (difference.tasks, difference.lost, difference.shown) == (199, 0, True)
    assert verdict(arm, comparison.arms[0], difference).startswith("share 0.6 is better than share 0.4: +20.")
    assert "tasks gained, 0 lost" in verdict(arm, comparison.arms[0], difference)


def test_the_report_has_the_same_table(store: str) -> None:
    catalog = Catalog(store)
    [manifest] = catalog.manifests("report")
    path = catalog.local(manifest, manifest.outputs["report"].path)
    text = (path / "report.md").read_text()
    assert "## Sweep over share, shift\n" in text
    assert "| share | shift | seeds | tasks | success at temperature 1 |\n| --- |" in text
    assert "| 0.6 | 0 | 0, 1, 2 | 199 | 0." in text
    assert r"- share 0.6, shift 0 is better at temperature 1 than share 0.4, shift 0: \+20." in text
    assert "<th>share</th><th>shift</th><th>seeds</th>" in (path / "report.html").read_text()


def test_two_artifacts_are_compared_task_by_task(store: str) -> None:
    comparison = compare(Catalog(store), ["eval-fit-0.4-0", "eval_shifted"])
    assert comparison.keys == ["shift"]
    [(arm, difference)] = comparison.differences()
    assert (difference.gained, difference.lost) == (0, 3)
    assert difference.mean == pytest.approx(-3 / 199)
    assert verdict(arm, comparison.arms[0], difference).startswith(
        "no difference shown between shift 3 and shift 0: -1.5 p"
    )
    assert comparison.to_json()["arms"][0]["unscored"] == 1


def test_arms_that_are_made_in_different_ways_have_no_varied_keys(store: str) -> None:
    comparison = compare(Catalog(store), ["eval_else", "eval-fit-0.6-*"])
    assert comparison.keys == []
    assert [arm.name for arm in comparison.arms] == ["eval_else", "eval-fit-0.6-0 to eval-fit-0.6-2"], (
        "seeds are pooled"
    )
    assert comparison.arms[1].seeds == ("0", "1", "2")


def test_greedy_attempts_are_compared_apart(store: str) -> None:
    comparison = compare(Catalog(store), ["eval"], greedy=True)
    assert [arm.estimate.mean for arm in comparison.arms] == [1.0, 1.0]


def test_the_command_prints_a_table_and_a_verdict(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["compare", "eval-fit-0.4-0", "eval_shifted", "--store", store]) == 0
    out = capsys.readouterr().out
    assert "shift  tasks  success  95 % interval" in out
    assert "no difference shown between shift 3 and shift 0" in out
    assert cli.call(["compare", "eval", "--store", store, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["varied"] == ["share"]
    assert printed["differences"][0]["verdict"].startswith("share 0.6 is better")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["evol"], "there is no artifact or tag 'evol'"),
        (["eval-fat-*"], "no stage is called like 'eval-fat-*'"),
        (["fit"], "was not measured; name an evaluation, rollouts, or a model that an evaluation has read"),
        (
            ["eval_shifted", "elsewhere"],
            "share no task, so they cannot be compared; name evaluations of the same tasks",
        ),
    ],
)
def test_what_was_not_measured_is_named(
    store: str, names: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["compare", *names, "--store", store]) == 2
    assert message in capsys.readouterr().err
