"""Attempts that fail by no doing of the policy: made again, kept, counted, and in no rate of any stage or page."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import polars as pl
import pytest
from faulty_shop import Shop, task
from graded_rows import TASK
from graded_rows import row as graded_row
from hypothesis import given
from hypothesis import strategies as st
from json_server import serving
from test_engine_openai import Endpoint

from agentrl.algorithms.grpo import GRPO
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.environments.hosts import HostedError
from agentrl.flows import cli
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.online.learner import Learner
from agentrl.pipelines.diagnose import diagnose
from agentrl.pipelines.file.load import load
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.parts.failed_attempts import FailedAttempts
from agentrl.pipelines.parts.selected import Selected
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.results.compare import compare
from agentrl.pipelines.results.lineage import find_artifact
from agentrl.pipelines.results.measured import counts_of
from agentrl.pipelines.run.execute import job_of, perform
from agentrl.pipelines.stages.score import score
from agentrl.pipelines.stages.trajectories import synthesize
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import INFRASTRUCTURE, NOT_TRAINED, RETRIED, Message, Role, Termination, Trajectory
from agentrl.training.optimizer import OptimizerConfig

ENVIRONMENT = '''
"""A shop whose database is away: for every fourth task always, for the next one at its first attempt."""

import json
from collections import Counter
from typing import Any

from agentrl.environments.tools import tool
from agentrl.schemas.task import Task

SEEN: Counter[str] = Counter()


class Visit:
    def __init__(self, task: Task) -> None:
        self.number = json.loads(task.metadata)["number"]
        SEEN[task.task_id] += 1
        if self.number % 4 == 0 or (self.number % 4 == 1 and SEEN[task.task_id] == 1):
            raise OSError("the database is away")

    @tool
    def price(self, item: str) -> int:
        """The price of an item."""
        return len(item)

    def score(self, answer: str | None) -> float:
        return float(answer == "done" and self.number % 4 != 3)


class Flaky:
    name, version = "flaky", "1"

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return {
            split: [
                Task(task_id=f"{split}-{n}", env=self.name, split=split, prompt=f"{n} figs?",
                     metadata=json.dumps({"number": n}))
                for n in range(size)
            ]
            for split, size in sizes.items()
        }

    def episode(self, task: Task) -> Any:
        return Visit(task)
'''

PIPELINE = """
name: flaky
stages:
  tasks: {{uses: tasks.generate, with: {{env: "my_flaky:Flaky", train: 4, dev: 0, heldout: 12}}}}
  some:
    uses: trajectories.sample
    inputs: {{tasks: tasks.train}}
    with: {{samples: 2, sampling: {{max_turn_tokens: 50}}, {common}}}
  eval: {{uses: evaluate.policy, inputs: {{tasks: tasks.heldout}}, with: {{max_turn_tokens: 50, {common}}}}}
  report: {{uses: report.training, inputs: {{evaluations: [eval]}}}}
"""
COMMON = (
    "limits: {{in_flight: 1, retry: {{attempts: 3, backoff_s: 0.01}}}}, "
    "engine: {{type: openai, model: teacher, base_url: '{url}', api_key: null}}"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("flaky")
    server = Endpoint()
    (folder / "my_flaky.py").write_text(ENVIRONMENT)
    (folder / "flaky.yaml").write_text(PIPELINE.format(common=COMMON.format(url=server.url)))
    store = str(folder / "store")
    with serving(server):
        plan = make_plan(load(str(folder / "flaky.yaml")), Catalog(store), store)
        for step in plan.to_run:
            perform(job_of(step, plan, "r"))
    return store


def rows_of(store: str, stage: str) -> pl.DataFrame:
    return TrajectoryBuffer(store).scan().filter(pl.col("stage") == stage).sort("trajectory_id").collect()


def test_failed_attempts_are_kept_and_no_stage_selects_them(store: str) -> None:
    manifest, rows = find_artifact(Catalog(store), "some"), rows_of(store, "some")
    failed = rows.filter(pl.col("tags").list.contains(RETRIED))
    # task 0: three attempts at each of two episodes, of which the last is its row; task 1: one at its first episode
    assert failed["trajectory_id"].str.tail(8).to_list() == [f"00000{n}" for n in ("0~1", "0~2", "1~1", "1~2", "2~1")]
    assert failed["tags"].list.contains(NOT_TRAINED).all()
    assert failed["termination"].unique().to_list() == ["env_error"]
    assert failed["reward"].null_count() == failed["success"].null_count() == 5
    chosen = Catalog(store).local(manifest, manifest.outputs["trajectories"].path)
    assert pl.read_parquet(chosen)["trajectory_id"].str.contains("~").sum() == 0
    assert len(pl.read_parquet(chosen)) == 8
    counts = ("attempts", "retried", "env_errors", "excluded", "tasks_lost", "rows")
    assert [manifest.metrics[name] for name in counts] == [13, 5, 2, 2, 1, 8]
    assert manifest.metrics["success"] == pytest.approx(4 / 6)
    text = "\n".join(manifest.warnings)
    assert "rollouts: all attempts at 1 of 4 tasks failed by no doing of the policy" in text
    assert "retried 5: attempts failed by no doing of the policy and were made again" in text
    assert "2 of 8 attempts (25%, more than 5%) failed by no doing of the policy and are in no rate" in text


def test_rates_of_an_evaluation_are_of_the_others_and_say_how_many_those_are(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog = Catalog(store)
    manifest = find_artifact(catalog, "eval")
    assert manifest.metrics["success"] == pytest.approx(6 / 9)
    results = pl.read_parquet(catalog.local(manifest, manifest.outputs["results"].path))
    overall = results.filter(pl.col("level") == -1)
    assert overall.select("decoding", "attempts", "successes", "excluded").rows() == [
        ("sampled", 9, 6, 3),
        ("greedy", 9, 6, 3),
    ]
    comparison = compare(catalog, ["eval"])
    [note] = comparison.notes
    assert note.startswith("eval/")
    assert "3 of 12 attempts (25%, more than 5%) failed by no doing of the policy" in note
    assert comparison.to_json()["arms"][0]["excluded"] == 3
    assert cli.call(["compare", "eval", "--store", store]) == 0
    assert "3 rows without an outcome are left out, 3 of which failed by no doing" in capsys.readouterr().out
    findings = diagnose(store, {"stages": {"eval": {"fingerprint": manifest.fingerprint}}})["eval"]
    [finding] = [finding for finding in findings if finding.name.startswith("many attempts failed")]
    assert "env_error 3" in finding.evidence
    assert len(finding.rows) == 3
    report = find_artifact(catalog, "report")
    text = (catalog.local(report, report.outputs["report"].path) / "report.md").read_text()
    assert "eval: of 39 attempts, 15 failed by no doing of the policy and were made again, and 6 were given up" in text
    assert "teacher, sampled: 3 of 12 attempts" in text
    html = (catalog.local(report, report.outputs["report"].path) / "report.html").read_text()
    assert "and 6 were given up" in html


def test_what_a_killed_run_kept_is_appended_once_and_numbered_on(tmp_path: Path) -> None:
    context = Harness(tmp_path)._context("s")
    row = graded_row(trajectory_id=context.trajectory_id(7)).model_copy(update={"termination": Termination.ENV_ERROR})
    row = row.model_copy(update={"reward": None, "success": None, "episode_id": row.trajectory_id})
    FailedAttempts(context).__enter__()([row])  # killed: nobody leaves it
    assert context.row_ids(failed=True) == []
    with FailedAttempts(context) as kept:
        kept([row])
    with FailedAttempts(context) as kept:
        kept([row])
    assert context.row_ids(failed=True) == [f"{row.trajectory_id}~{number}" for number in (1, 2, 3)]
    assert context.row_ids() == []


def outcome(end: Termination, solved: bool) -> dict[str, Any]:
    return {"termination": end, "success": None if end in INFRASTRUCTURE else solved}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(list(Termination)), st.booleans()), max_size=60))
def test_denominators_are_the_attempts_of_the_policy(given_rows: list[tuple[int, Termination, bool]]) -> None:
    rows = [
        {"env": "e", "task_id": f"t{number}", "prompt": "p", **outcome(end, solved)}
        for number, end, solved in given_rows
    ]
    counts = counts_of(rows)
    of_policy = [row for row in rows if row["termination"] not in INFRASTRUCTURE]
    assert sum(attempts for attempts, _ in counts.values()) == len(of_policy)
    assert sum(solved for _, solved in counts.values()) == sum(row["success"] for row in of_policy)


def failed_row(name: str, end: Termination, **more: Any) -> Trajectory:
    row = graded_row(trajectory_id=name)
    return row.model_copy(update={"termination": end, "reward": None, "success": None, "episode_id": name, **more})


def test_scoring_again_gives_a_failed_attempt_nothing(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    rows = [
        graded_row(trajectory_id="fine"),
        failed_row("lost", Termination.INFRA_ERROR),
        failed_row("gone", Termination.ENV_ERROR),
    ]
    config = {"rewards": [{"type": "exact"}]}
    tasks = harness.tasks([TASK])
    made = harness.run(score, config, trajectories=[harness.trajectories(rows)], tasks=[tasks])
    scores = {row["trajectory_id"]: row for row in made["scores"].table().to_pylist()}
    assert scores["fine"]["reward"] is not None
    for name, end in (("lost", "infra_error"), ("gone", "env_error")):
        assert (scores[name]["reward"], scores[name]["success"], scores[name]["components"]) == (None, None, [])
        assert scores[name]["why"] == f"it ended by {end}, which is no doing of the policy"
    assert made.metrics["unscored"] == 2


def test_no_training_set_has_a_failed_attempt(tmp_path: Path) -> None:
    rows = [
        graded_row(trajectory_id="fine"),
        failed_row("lost", Termination.ENV_ERROR),
        failed_row("x", Termination.MAX_STEPS),
    ]
    with pytest.warns(UserWarning, match=r"^1 of 3 rows failed by no doing of the policy and are not trained on"):
        chosen = Selected([Harness(tmp_path).trajectories(rows)])
    assert chosen.scalars["trajectory_id"].to_pylist() == ["fine", "x"]


class FlakyExpert(Shop):
    """Fails where the number of attempts so far is below that in the task's prompt."""

    name = "flaky-expert"
    tried: ClassVar[Counter[str]] = Counter()

    def episode(self, task: Task) -> Any:
        self.tried[task.task_id] += 1
        if self.tried[task.task_id] <= int(task.prompt):
            raise OSError("the database is away")
        return super().episode(task)

    def demonstrate(self, task: Task, noise: float, random: Random) -> Iterator[Message]:
        yield Message(role=Role.ASSISTANT, content="done")


def test_demonstrations_are_begun_again(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    tasks = [task(str(fails), f"{__name__}:FlakyExpert", fails) for fails in (0, 1, 9)]
    config = {"retry": {"attempts": 2, "backoff_s": 0}}
    text = (
        r"^environments failed in demonstrations: 2 were begun again, and 1 tasks have none; the last: HostedError: OS"
    )
    with pytest.warns(UserWarning, match=text):
        made = harness.run(synthesize, config, tasks=harness.tasks(tasks))
    assert [row.prompt for row in made["trajectories"].read()] == ["0", "1"]
    assert (made.metrics["success"], made.metrics["retried"], made.metrics["env_errors"]) == (1.0, 2, 1)
    with pytest.raises(HostedError, match="the database is away"):
        harness.run(synthesize, config, tasks=harness.tasks(tasks[2:]))


def test_a_group_is_compared_without_its_failed_rollouts() -> None:
    """The mean and the spread of a group are those of the rollouts that were scored; the others are counted."""
    policy = tiny_policy([[Message(role=Role.USER, content="capital of France?")]], 0, TinySize(context=128))

    def rollout(number: int, reward: float | None) -> Trajectory:
        end = Termination.ANSWERED if reward is not None else Termination.ENV_ERROR
        row = graded_row(trajectory_id=f"r-{number}", reward=reward, success=reward and reward > 0, termination=end)
        tokens = {"input_ids": [1, 2], "action_mask": [False, True], "logprobs": [float("nan"), -1.0]}
        columns = {**tokens, "group_id": "g", "n_tokens": 2, "n_action_tokens": 1, "success": reward == 1.0}
        return row.model_copy(update=columns if reward is not None else {**columns, "success": None})

    learner = Learner(policy, GRPO(), OptimizerConfig(lr=1e-3), iterations=1, samples=4, seed=0)
    failed = learner.batch(0, [rollout(n, reward) for n, reward in enumerate((1.0, 0.0, 0.0, None))], [])
    alone = learner.batch(0, [rollout(n, reward) for n, reward in enumerate((1.0, 0.0, 0.0))], [])
    assert [record["advantage"] for record in failed.records] == [record["advantage"] for record in alone.records]
    assert sum(record["advantage"] for record in failed.records) == pytest.approx(0, abs=1e-5)
    assert (failed.metrics["success"], failed.metrics["excluded"], failed.metrics["unscored"]) == (1 / 3, 1.0, 1.0)
    assert "excluded" not in alone.metrics
