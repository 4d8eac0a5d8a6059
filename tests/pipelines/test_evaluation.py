"""What evaluations measure of rollouts, against cases worked by hand; comparisons; training that made things worse."""

import asyncio
from collections import Counter
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_not_trained import row

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.environments import load_environment
from agentrl.flows import cli
from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.file.load import load
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.parts.measures import Attempted, Optimum, choices, parts, summary
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.results.compare import Arm, compare, regressions, verdict
from agentrl.pipelines.results.lineage import find_artifact
from agentrl.pipelines.run.execute import job_of, perform
from agentrl.pipelines.stages.evaluate import EvaluateConfig, evaluate
from agentrl.pipelines.stages.tasks import generate
from agentrl.rewards import Components
from agentrl.rollouts.demonstrations import optimal_steps
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role
from agentrl.statistics.intervals import wilson, wilson_of_tasks
from agentrl.statistics.paired import Difference, difference, mcnemar
from agentrl.statistics.passes import pass_all, pass_at, pass_rates


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_passes_are_the_shares_of_all_draws(outcomes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    draws = list(combinations(outcomes, k))
    n, c = len(outcomes), sum(outcomes)
    assert pass_at(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))
    assert pass_all(n, c, k) == pytest.approx(sum(all(draw) for draw in draws) / len(draws))


def test_rates_of_passes_are_means_over_tasks() -> None:
    result = pass_rates([(6, 3), (6, 6), (8, 0)])
    assert list(result) == ["pass@1", "pass@2", "pass@4", "pass@6", "pass^1", "pass^2", "pass^4", "pass^6"]
    assert result["pass@1"] == pytest.approx((1 / 2 + 1) / 3)
    assert result["pass^2"] == pytest.approx((comb(3, 2) / comb(6, 2) + 1) / 3)
    assert (result["pass@6"], result["pass^6"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert pass_rates([]) == {}


@pytest.mark.parametrize(
    ("gained", "lost", "p"), [(0, 0, 1.0), (1, 1, 1.0), (5, 0, 2 / 32), (0, 6, 2 / 64), (8, 2, 2 * 56 / 1024)]
)
def test_mcnemar_against_the_binomial(gained: int, lost: int, p: float) -> None:
    assert mcnemar(gained, lost) == pytest.approx(p)


def test_a_difference_has_mcnemars_p_where_each_task_was_attempted_once() -> None:
    before, after = dict.fromkeys(range(8), 0.0), {n: float(n < 6) for n in range(8)}
    assert difference([before], [after]).p == pytest.approx(2 / 64)
    assert difference([before, before], [after, after]).p is None
    assert difference([before], [dict.fromkeys(range(8), 0.5)]).p is None


def test_a_comparison_of_few_tasks_says_how_little_it_sees() -> None:
    arm = Arm((), (), {"steps": 1})
    text = verdict(arm, arm, Difference(0.0, 0.0, 0.0, tasks=8, gained=0, lost=0))
    assert text.endswith("cannot see differences of less than about 31.2 points")


def made(task: str, success: bool, level: int = 1, env: str = "e", **numbers: Any) -> Attempted:
    fixed = {"steps": 2, "tokens": 10, "calls": 0, "valid_calls": 0, "tool_errors": 0, "format_error": False}
    return Attempted(f"{env} {task}", env, level, success, **{**fixed, "violations": 0, **numbers})


def test_a_summary_by_hand() -> None:
    result = summary([
        made("a", True, steps=6, optimum=3, tool_errors=2, calls=4, valid_calls=3),
        made("b", False, tool_errors=1, calls=2, valid_calls=1, violations=3),
        made("c", True, steps=3, optimum=3),
        made("d", False, format_error=True),
    ])  # fmt: skip
    assert (result["tasks"], result["attempts"], result["successes"], result["success"]) == (4, 4, 2, 0.5)
    assert (result["steps_over_optimum"], result["recovered"], result["valid_calls"]) == (
        1.5,
        0.5,
        pytest.approx(4 / 6),
    )
    assert (result["violations_per_1000"], result["format_errors"], result["tool_errors"]) == (750, 0.25, 0.75)
    assert "pass@1" not in result
    empty = summary([made("a", False)])
    assert [empty[name] for name in ("steps_over_optimum", "recovered", "valid_calls", "best_of_n")] == [None] * 4


def test_several_attempts_are_means_over_tasks() -> None:
    rows = [made("a", True, chosen=0.5), made("a", False, chosen=0.5), made("b", True, chosen=1.0),
            made("b", True, chosen=0.0)]  # fmt: skip
    result = summary(rows)
    assert (result["tasks"], result["attempts"], result["success"]) == (2, 4, 0.75)
    assert (result["pass@2"], result["pass^2"], result["best_of_n"]) == (1.0, 0.5, 0.75)
    assert result["low"] <= 0.75 <= result["high"]


def test_intervals_count_tasks_rather_than_attempts() -> None:
    apart = [[True] * 8, [False] * 8, [True] * 8, [False] * 8]
    assert wilson_of_tasks(apart) == pytest.approx(wilson(2, 4), abs=0.03)
    alike = [[True, False] * 4] * 4
    assert wilson_of_tasks(alike) == pytest.approx(wilson(2, 4), abs=1e-9), "nothing varies: the number of tasks"
    assert wilson_of_tasks([[False] * 8] * 4) == wilson(0, 4)
    assert wilson_of_tasks([[True], [False], [True]]) == pytest.approx(wilson(2, 3))


def test_rows_by_level_and_family() -> None:
    item = parts([made("a", True, 1), made("b", True, 2)])
    assert {key: len(rows) for key, rows in item.items()} == {("", -1): 2, ("", 1): 1, ("", 2): 1}
    two = parts([made("a", True, 1), made("b", True, 2, env="f")])
    assert {key: len(rows) for key, rows in two.items()} == {
        ("", -1): 2, ("", 1): 1, ("", 2): 1, ("e", -1): 1, ("e", 1): 1, ("f", -1): 1, ("f", 2): 1,
    }  # fmt: skip


def test_a_scorer_picks_one_of_several_attempts() -> None:
    class Config(EvaluateConfig):
        scorer: Components = []  # noqa: RUF012

    scorer = Config(scorer=[{"type": "self_consistency"}]).scorer
    group = [
        row(f"r{n}", []).model_copy(update={"messages": [Message(role=Role.ASSISTANT, content=name)], "reward": 0.0})
        for n, name in enumerate(["x", "y", "y"])
    ]
    task = Task(task_id="t", env="e", split="heldout", prompt="q")
    assert asyncio.run(choices(group, task, scorer)) == [0.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="best_of picks one of several samples; set samples"):
        EvaluateConfig(best_of=[{"type": "format"}])


def test_the_optimum_is_what_the_task_says_or_the_expert_takes() -> None:
    lookup = load_environment("lookup")
    tasks = lookup.tasks({"train": 20}, seed=0)["train"]
    assert {task.level: optimal_steps(lookup, task) for task in tasks} == {1: 2, 2: 3, 3: 4}
    text = tasks[0].model_copy(update={"metadata": '{"optimal_steps": 7}'})
    assert optimal_steps(lookup, text) == 7

    rooms = load_environment("rooms")
    far = rooms.tasks({"train": 1}, seed=0)["train"][0]
    assert (optimal_steps(rooms, far) or 0) > 1, "what its episodes advise"
    begun: list[str] = []

    class Mute:
        name = version = "mute"
        tools = "[]"
        opening: list[Message] = []  # noqa: RUF012

        async def reset(self, task: Task) -> "Mute":
            begun.append(task.task_id)
            return self

        async def close(self) -> None:
            pass

    result = Optimum([task.model_copy(update={"env": "mute"}) for task in tasks], {"mute": Mute()})  # type: ignore[dict-item]
    done = [row(task.task_id, []).model_copy(update={"env": "mute", "task_id": task.task_id}) for task in tasks]
    assert [result.of(entry) for entry in done] == [None] * 20, "failures have none"
    assert [result.of(entry.model_copy(update={"success": True})) for entry in done] == [None] * 20
    assert len(begun) == 1, "an expert is looked for once"


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture(scope="module")
def tasks(harness: Harness) -> Tasks:
    return harness.run(generate, {"env": "lookup", "train": 1, "dev": 1, "heldout": 3})["heldout"]


@pytest.fixture(scope="module")
def model(harness: Harness) -> Model:
    return harness.model(tiny_policy([[Message(role=Role.USER, content="city of Ann?")]], seed=0).save)


def test_an_evaluation_of_several_attempts(harness: Harness, tasks: Tasks, model: Model) -> None:
    config = {"samples": 2, "max_turn_tokens": 4, "max_tokens": 120, "best_of": [{"type": "self_consistency"}]}
    done = harness.run(evaluate, config, model=model, tasks=tasks)
    results = done["results"].table().to_pylist()
    overall = {result["decoding"]: result for result in results if result["level"] == -1}
    assert (overall["sampled"]["tasks"], overall["sampled"]["attempts"], overall["greedy"]["attempts"]) == (3, 6, 3)
    assert {"pass@1", "pass@2", "pass^2", "best_of_n", "violations_per_1000"} <= overall["sampled"].keys()
    assert overall["greedy"]["pass@2"] is None
    assert overall["greedy"]["best_of_n"] is None
    assert done.metrics["pass@2"] >= done.metrics["pass^2"]
    sampled = [row for row in done["trajectories"].read() if "sampled" in row.tags]
    roles = [[message.role for message in row.messages] for row in sampled]
    first = [row.message_seconds[spoke.index(Role.ASSISTANT)] for row, spoke in zip(sampled, roles, strict=True)]
    assert done.metrics["first_action_s"] == pytest.approx(sum(first) / len(first), abs=1e-4)
    assert not any("first_action_s" in row for row in results), "digests of results do not depend on time"
    rows = done["trajectories"].table(["group_id", "tags"]).to_pylist()
    assert sorted(Counter(entry["group_id"] for entry in rows if "sampled" in entry["tags"]).values()) == [2, 2, 2]


STAGES = '''
"""Policies that solve the tasks whose number is below a share."""

from typing import NamedTuple

import pyarrow as pa

from agentrl.pipelines.handles import Model, Table, Tasks, Trajectories
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class Config(StageConfig):
    share: int


def _write(share):
    return lambda path: (path / "share").write_text(str(share))


@stage("my.tasks", version=1)
def tasks(context: Context, config: Config) -> Tasks:
    made = (Task(task_id=f"t-{n}", env="e", split="heldout", prompt=f"{n}?") for n in range(config.share))
    return context.tasks(made)


@stage("my.train", version=1)
def train(context: Context, config: Config, model: Model | None = None) -> Model:
    return context.model(_write(config.share))


class Nothing(StageConfig):
    pass


class Measured(NamedTuple):
    results: Table
    trajectories: Trajectories


@stage("my.measure", version=1)
def measure(context: Context, config: Nothing, model: Model, tasks: Tasks) -> Measured:
    share, rows = int((model.path / "share").read_text()), []
    for number, task in enumerate(tasks.read()):
        name, solved = context.trajectory_id(number), number < share
        rows.append(Trajectory(
            trajectory_id=name, episode_id=name, task_id=task.task_id, source="model", env="e", split="heldout",
            prompt=task.prompt, reward=float(solved), success=solved, termination="answered", messages=[],
        ))
    context.append(rows)
    row = {"policy": model.stage, "level": -1, "split": "heldout", "tasks": 9, "success": 0.5, "low": 0.4, "high": 0.6}
    row |= {"tokens": 1.0, "tool_errors": 0.0, "format_errors": 0.0, "env": ""}
    more = {"steps_over_optimum": 1.25, "pass@4": 0.5, "pass^4": 0.25, "recovered": None}
    both = [{**row, **more, "decoding": "sampled"}, {**row, "decoding": "greedy"}]
    both.append({**both[0], "env": "e"})
    return Measured(context.table(pa.Table.from_pylist(both), "results"), context.select())


@stage("my.retry", version=1)
def retry(context: Context, config: Nothing, model: Model, tasks: Tasks) -> Trajectories:
    """Solves all tasks, as with a hint."""
    rows = []
    for number, task in enumerate(tasks.read()):
        name = context.trajectory_id(number)
        rows.append(Trajectory(
            trajectory_id=name, episode_id=name, task_id=task.task_id, source="model", env="e", split="heldout",
            prompt=task.prompt, reward=1.0, success=True, termination="answered", messages=[],
        ))
    context.append(rows)
    return context.select()
'''

PIPELINE = """
name: worse
stages:
  tasks: {uses: "my_worse:tasks", with: {share: 60}}
  warm: {uses: "my_worse:train", with: {share: 40}}
  dpo: {uses: "my_worse:train", inputs: {model: warm}, with: {share: 20}}
  grpo: {uses: "my_worse:train", inputs: {model: dpo}, with: {share: 50}}
  kto: {uses: "my_worse:train", inputs: {model: grpo}, with: {share: 49}}
  eval_warm: {uses: "my_worse:measure", inputs: {model: warm, tasks: tasks}}
  eval_dpo: {uses: "my_worse:measure", inputs: {model: dpo, tasks: tasks}}
  eval_grpo: {uses: "my_worse:measure", inputs: {model: grpo, tasks: tasks}}
  eval_kto: {uses: "my_worse:measure", inputs: {model: kto, tasks: tasks}}
  retry_warm: {uses: "my_worse:retry", inputs: {model: warm, tasks: tasks}}
  compare: {uses: evaluate.compare, inputs: {attempts: [eval_warm, eval_dpo, eval_grpo]}}
  report: {uses: report.training, inputs: {evaluations: ["eval*"]}}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("worse")
    (folder / "my_worse.py").write_text(STAGES)
    (folder / "worse.yaml").write_text(PIPELINE)
    store = str(folder / "store")
    plan = make_plan(load(str(folder / "worse.yaml")), Catalog(store), store)
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))
    return store


WORSE = "dpo made the policy worse than warm, which it trained: -33.3 points (95 % interval -"


def test_training_that_made_the_policy_worse_is_said(store: str) -> None:
    catalog = Catalog(store)
    manifests = [find_artifact(catalog, f"eval_{name}") for name in ("warm", "dpo", "grpo", "kto")]
    [worse] = regressions(catalog, manifests)  # chance may explain that kto is below grpo
    assert worse.startswith(WORSE)
    assert worse.endswith("20 of 60 tasks lost, 0 gained")
    assert regressions(catalog, manifests[1:3]) == [], "the start was not evaluated"
    retried = find_artifact(catalog, "retry_warm")
    assert regressions(catalog, [retried, *manifests[1:3]]) == [], "a retry with a hint does not evaluate the start"


def test_the_report_says_it_too(store: str) -> None:
    catalog = Catalog(store)
    manifest = find_artifact(catalog, "report")
    assert [warning.startswith(WORSE) for warning in manifest.warnings] == [True]
    path = catalog.local(manifest, manifest.outputs["report"].path)
    text = (path / "report.md").read_text()
    assert "**Warning:** dpo made the policy worse than warm, which it trained: " in text
    assert "| after | pass@4 | pass^4 | steps over the optimum |\n| --- | --- | --- | --- |\n| warm | 0.500 |" in text
    assert text.count("| warm |") == 2, "rows of one of several environments are not those of all"
    assert "made the policy worse" in (path / "report.html").read_text()


@pytest.mark.slow
def test_the_end_of_a_run_says_what_no_report_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_worse.py").write_text(STAGES)
    path = tmp_path / "worse.yaml"
    path.write_text(PIPELINE.partition("  compare:")[0])
    assert cli.call(["run", str(path), "--store", "store"]) == 0
    printed = capsys.readouterr()
    assert f"warning: {WORSE}" in printed.out + printed.err
    assert cli.call(["run", str(path), "--store", "store"]) == 0
    printed = capsys.readouterr()
    assert "made the policy worse" not in printed.out + printed.err, "nothing ran"


def test_a_stage_compares_evaluations(store: str) -> None:
    catalog = Catalog(store)
    manifest = find_artifact(catalog, "compare")
    tables = {
        name: pq.read_table(catalog.local(manifest, output.path)).to_pylist()
        for name, output in manifest.outputs.items()
    }
    first, second = tables["differences"]
    assert (first["gained"], first["lost"], first["tasks"]) == (0, 20, 60)
    assert first["p"] == pytest.approx(mcnemar(0, 20))
    assert "is worse than" in first["verdict"]
    assert "McNemar p = 1.9e-06" in first["verdict"]
    assert second["gained"] == 10
    lost = [task["task_id"] for task in tables["tasks"] if task["change"] == "lost"]
    assert lost == sorted((f"t-{n}" for n in range(20, 40)), key=lost.index)
    assert len(lost) == 20


def test_the_command_names_the_tasks_that_changed(store: str) -> None:
    comparison = compare(Catalog(store), ["eval_warm", "eval_dpo"]).to_json()
    [item] = comparison["differences"]
    assert (sorted(item["tasks_lost"]), item["tasks_gained"]) == (sorted(f"t-{n}" for n in range(20, 40)), [])
    assert item["p"] == pytest.approx(mcnemar(0, 20))
