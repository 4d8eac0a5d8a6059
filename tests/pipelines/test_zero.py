"""One policy that proposes tasks and solves them: what is asked, what becomes a task, and what a proposal is worth."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.propose import Propose, shown_by
from agentrl.pipelines.file.document import METHODS
from agentrl.pipelines.file.load import load
from agentrl.pipelines.handles import Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.zero.ask import from_proposals, made_by, to_propose
from agentrl.pipelines.methods.zero.judge import judge
from agentrl.pipelines.methods.zero.rewards import AbsoluteZero, RZero, distances, shares_of_clusters
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.stages.train import offline, sft
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Trajectory

ROOT = Path(__file__).parents[2]


@pytest.fixture
def harness(tmp_path: Any) -> Harness:
    return Harness(tmp_path)


def drawn(env: str = "words", train: int = 8) -> dict[str, list[Task]]:
    return load_environment(env).tasks({"train": train, "heldout": 4}, 0)


def saying(harness: Harness, asked: Task, texts: list[str]) -> list[Trajectory]:
    """Rollouts of one task of proposing, with these messages."""
    environment = load_environment(asked.env)
    rows = []
    for number, text in enumerate(texts):

        async def score(text: str = text) -> Any:
            episode = await environment.reset(asked)
            await episode.step(Message(role=Role.ASSISTANT, content=text))
            return await episode.score()

        outcome = blocking(score())
        row = demonstrate(environment, asked, 0.0, number, f"p-{number:03d}")
        messages = [*row.messages[:-1], Message(role=Role.ASSISTANT, content=text)]
        changes = {"success": outcome.success, "reward": outcome.reward, "final_state": json.dumps(outcome.state)}
        rows.append(row.model_copy(update={"messages": messages, **changes}))
    return rows


def solved(task: Task, outcomes: list[bool], answers: list[str] | None = None) -> list[Trajectory]:
    """Rollouts of a task with these outcomes, and these answers if they are given."""
    environment, rows = load_environment(task.env), []
    for number, success in enumerate(outcomes):
        row = demonstrate(environment, task, 0.0, number, f"{task.task_id}-{number}")
        answer = Message(role=Role.ASSISTANT, content=answers[number] if answers else row.messages[-1].content)
        changes = {"success": success, "reward": float(success), "messages": [*row.messages[:-1], answer]}
        rows.append(row.model_copy(update=changes))
    return rows


def asked_for(harness: Harness, given: list[Task], **config: int) -> list[Task]:
    tasks: list[Task] = harness.run(to_propose, config, tasks=[harness.tasks(given)])["tasks"].read()
    return tasks


def test_absolute_zero_rewards_what_is_seldom_solved_but_not_what_never_is() -> None:
    assert AbsoluteZero().of([0, 0.25, 0.5, 0.875, 1], [""] * 5) == [0, 0.75, 0.5, 0.125, 0]


def test_r_zero_rewards_uncertainty_less_the_share_of_proposals_that_are_alike() -> None:
    texts = ["a b c d", "a b c d", "p q r s", "v w x y"]
    rates = [0.5, 0.25, 0.75, 0.125]
    assert RZero(penalty=0).of(rates, texts) == [1, 0.5, 0.5, 0.25]
    assert RZero().of(rates, texts) == [1 - 0.5, 0.5 - 0.5, 0.5 - 0.25, 0]


def test_the_distance_of_two_texts_is_one_less_bleu() -> None:
    # words 3/4, pairs 2/3, triples 1/2, and none of four in a row: 0.1 of 1
    bleu = (3 / 4 * 2 / 3 * 1 / 2 * 0.1) ** 0.25
    shorter = (1 * 1 * 1 * 0.1) ** 0.25 * math.exp(1 - 4 / 3)  # "p q r" against "p q r s"
    other = (3 / 4 * 2 / 3 * 1 / 2 * 0.1) ** 0.25
    far = distances(["p q r s", "p q r t", "p q r", "x y z u"])
    assert far[0, 1] == pytest.approx(1 - bleu)
    assert far[0, 2] == pytest.approx(1 - (shorter + other) / 2)
    assert far[0, 3] == 1
    assert (far == far.T).all()


def test_clusters_merge_by_the_mean_distance_of_their_texts() -> None:
    texts = ["p q r s t u v w", "p q r s t u v x", "p q r s t u y x", "k l m n", "p q r s t u v w"]
    assert shares_of_clusters(texts, 0.5) == [0.8, 0.8, 0.8, 0.2, 0.8]
    assert shares_of_clusters(texts, 0.0) == [0.4, 0.2, 0.2, 0.2, 0.4], "equal texts are one"
    assert shares_of_clusters([], 0.5) == []


def test_each_task_of_proposing_shows_given_ones_in_turn(harness: Harness) -> None:
    given = drawn()["train"]
    asked = asked_for(harness, given, n=6, shown=2)
    shown = [[task.prompt for task in shown_by(each)] for each in asked]
    first = [prompt for prompts in shown[:4] for prompt in prompts]
    assert sorted(first) == sorted(task.prompt for task in given), "each once, before any comes again"
    assert asked[0].prompt == "\n".join(["Propose another task.", *shown[0]])
    assert (asked[0].env, asked[0].split, asked[0].tools) == ('propose{"env": "words"}', "train", "[]")
    others = asked_for(harness, given[1:], n=6, shown=2)
    assert len({each.task_id for each in [*asked, *others]}) == 12, "stages share no id, whatever they show"
    with pytest.raises(ValueError, match="is of split 'heldout': nothing is made from what is measured on"):
        asked_for(harness, drawn()["heldout"])
    with pytest.raises(ValueError, match=r"env 'office' takes no proposals; give it proposed\(text, like"):
        asked_for(harness, drawn("office")["train"])


def test_a_proposal_becomes_a_task_or_is_refused_for_one_reason(harness: Harness) -> None:
    splits = drawn("rooms")
    [asked] = asked_for(harness, splits["train"], n=1)
    [shown], held = shown_by(asked), splits["heldout"][0].prompt
    texts = ["attic to bath?", shown.prompt, held, "attic to bath?", "attic to nowhere?", ""]
    rows = saying(harness, asked, texts)
    assert [row.success for row in rows] == [True, True, True, True, False, False]
    failed = {"reward": None, "success": None, "final_state": "null", "termination": "env_error"}
    rows.append(rows[0].model_copy(update={"trajectory_id": "p-failed", **failed}))
    inputs = {"trajectories": [harness.trajectories(rows)], "heldout": [harness.tasks(splits["heldout"])]}
    made = harness.run(from_proposals, **inputs)
    [task] = made["tasks"].read()
    assert (task.prompt, task.env, task.split) == ("attic to bath?", "rooms", "train")
    refused = {"not_a_task": 2, "shown": 1, "heldout_prompt": 1, "doubled": 1, "env_error": 1}
    assert made.metrics == {"proposals": 7, "tasks": 1, **refused}
    inputs = {"proposals": inputs["trajectories"], "tasks": [made["tasks"]], "solutions": []}
    scores = harness.run(judge, **inputs)["scores"].table().to_pylist()
    assert [score["reward"] for score in scores] == [None, -1, -1, None, -1, -1, None], "nobody tried the task"
    solutions = harness.trajectories(solved(task, [True]))
    with pytest.raises(ValueError, match="is of env 'rooms' and proposes nothing; wire rollouts of tasks"):
        harness.run(from_proposals, trajectories=[solutions], heldout=[])


def judged(harness: Harness, config: dict[str, Any], outcomes: dict[str, list[bool]], texts: list[str]) -> Any:
    """The stage's result for these proposals and outcomes of their tasks, and the rewards of the proposals."""
    [asked] = asked_for(harness, drawn("rooms")["train"], n=1)
    proposals = harness.trajectories(saying(harness, asked, texts))
    tasks: Tasks = harness.run(from_proposals, trajectories=[proposals], heldout=[])["tasks"]
    rows = [row for task in tasks.read() for row in solved(task, outcomes[task.prompt])]
    solutions = harness.trajectories(rows)
    inputs = {"proposals": [proposals] * 2, "tasks": [tasks], "solutions": [solutions, solutions]}  # each row once
    made = harness.run(judge, {"scorer": "zero", **config}, **inputs)
    rewards = {score["trajectory_id"]: score["reward"] for score in made["scores"].table().to_pylist()}
    return made, [rewards[name] for name in proposals.ids()], {row.trajectory_id: row for row in rows}, rewards


TEXTS = ["attic to bath?", "attic to cave?", "attic to bath?", "nowhere", "cave to attic?"]
OUTCOMES = {
    "attic to bath?": [True, False, False, False],
    "attic to cave?": [True, True, True, True],
    "cave to attic?": [True, True, False, False],
}


def test_proposals_get_a_reward_by_the_rate_at_which_their_task_is_solved(harness: Harness) -> None:
    made, rewards, rows, scores = judged(harness, {}, OUTCOMES, TEXTS)
    assert rewards == [0.75, 0, 0.75, -1, 0.5]
    assert [scores[name] for name in rows] == [row.reward for row in rows.values()], "solutions keep theirs"
    assert len(made["proposals"].ids()) == 5
    assert made["solutions"].ids() == [*rows]
    counts = {"tasks": 3, "tasks_within": 3, "never": 0, "always": 1, "unscored": 0, "unscored_solutions": 0}
    assert counts.items() <= made.metrics.items()
    assert made.metrics["rate"] == pytest.approx((0.25 + 1 + 0.5) / 3)
    assert made.metrics["reward"] == pytest.approx(1 / 5)


def test_r_zero_keeps_solutions_of_tasks_in_the_band(harness: Harness) -> None:
    config = {"reward": {"type": "r_zero", "penalty": 0}, "invalid": 0, "within": 0.25}
    made, rewards, rows, _ = judged(harness, config, OUTCOMES, TEXTS)
    assert rewards == [0.5, 0, 0.5, 0, 1]
    assert [rows[name].prompt for name in made["solutions"].ids()] == ["attic to bath?"] * 4 + ["cave to attic?"] * 4
    assert made.metrics["tasks_within"] == 2


def test_without_a_verifier_the_answer_of_the_majority_is_right(harness: Harness) -> None:
    task = drawn("rooms")["train"][0]
    [asked] = asked_for(harness, [task], n=1)
    proposals = harness.trajectories(saying(harness, asked, ["attic to bath?"]))
    tasks = harness.run(from_proposals, trajectories=[proposals], heldout=[])["tasks"]
    rows = solved(tasks.read()[0], [False] * 4, ["Here.", "here", "there", ""])
    solutions = harness.trajectories(rows)
    inputs = {"proposals": [proposals] * 2, "tasks": [tasks], "solutions": [solutions, solutions]}  # each row once
    made = harness.run(judge, {"labels": "majority", "scorer": "zero"}, **inputs)
    scores = made["scores"].table().to_pylist()
    assert [score["reward"] for score in scores] == [0.5, 1, 1, 0, 0]
    assert [score["success"] for score in scores[1:]] == [True, True, False, False]


def test_a_proposal_that_nobody_tried_is_left_out_and_a_strange_solution_is_refused(harness: Harness) -> None:
    outcomes = {**OUTCOMES, "attic to cave?": []}
    made, rewards, _, _ = judged(harness, {}, outcomes, TEXTS)
    assert rewards == [0.75, None, 0.75, -1, 0.5]
    assert (made.metrics["unscored"], len(made["proposals"].ids())) == (1, 4)
    strange = solved(drawn("rooms")["train"][0], [True])
    inputs = {"proposals": [], "tasks": [], "solutions": [harness.trajectories(strange)]}
    with pytest.raises(ValueError, match="lack; wire the tasks that the solutions were sampled on"):
        harness.run(judge, **inputs)
    with pytest.raises(ValidationError, match="does not match any of the expected tags: 'absolute_zero', 'r_zero'"):
        judge.config.model_validate({"reward": {"type": "zero"}})


def test_a_function_is_a_task_if_its_solution_passes_in_the_sandbox(harness: Harness) -> None:
    [asked] = asked_for(harness, drawn("code")["train"], n=1)
    assert "\nReply with a JSON object" in asked.prompt
    tests = [[[[1, 2]], 5], [[[3]], 9], [[[]], 0], [[[-1, 1]], 2]]
    function = {
        "question": "Return the sum of the squares of the values.",
        "function": "squares",
        "parameters": ["values"],
        "solution": "def squares(values):\n    return sum(value * value for value in values)\n",
        "tests": tests,
    }
    environment = load_environment(asked.env)
    assert isinstance(environment, Propose)

    async def made(**changes: Any) -> Any:
        return await environment.made(json.dumps(function | changes), asked)

    right, wrong = blocking(made()), blocking(made(tests=[*tests[:3], [[[-1, 1]], 7]]))
    assert right.env == "code"
    assert right.prompt.startswith("In main.py, write squares(values)")
    assert wrong is None
    with pytest.raises(ValueError, match="makes no variants whose prompts are proposals"):
        demonstrate(environment, asked, 0.0, 0, "d")


def of_kind(kind: str, split: str = "train") -> Task:
    return load_environment(f'program_io{{"kinds": ["{kind}"], "levels": [1]}}').tasks({split: 1}, 0)[split][0]


@pytest.mark.parametrize("kind", ["deduction", "abduction"])
def test_a_program_with_an_input_becomes_a_task_or_is_refused_for_a_reason(harness: Harness, kind: str) -> None:
    program, held = "def f(values):\n    return values * 2", of_kind("induction", "heldout")
    theirs = json.loads(held.metadata)["program"].replace("values", "xs")
    refused = [
        "def f(n): return id([])\nf(1)",
        f"{program}\nf(1 + 1)",
        "f",
        theirs + "\nf({'a': 1, 'b': 2, 'c': 3, 'd': 4, 'e': 5})",
    ]
    [asked] = asked_for(harness, [of_kind(kind)], n=1)
    assert "\nReply with a Python function f" in asked.prompt
    rows = harness.trajectories(saying(harness, asked, [f"{program}\nf([1])", *refused]))
    made = harness.run(from_proposals, trajectories=[rows], heldout=[harness.tasks([held])])
    [task] = made["tasks"].read()
    assert task.prompt.startswith(f"{program}\nf({'[1]' if kind == 'deduction' else '?'}) == ")
    counts = {"not_a_task_form": 2, "not_a_task_not_deterministic": 1, "heldout_goal": 1}
    assert made.metrics == {"proposals": 5, "tasks": 1, **counts}
    environment = load_environment(asked.env)
    assert demonstrate(environment, asked, 0.0, 0, "d").success
    copied = demonstrate(environment, asked, 1.0, 0, "d").messages[-1].content
    assert copied.startswith(json.loads(shown_by(asked)[0].metadata)["program"])


def of_programs(folder: Path, changes: dict[str, Any]) -> Path:
    """The pipeline file of the page about programs, inputs and outputs, with changes of settings."""
    page = (METHODS / "zero/README.md").read_text().partition("## Programs, inputs and outputs")[2]
    stages = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    for stage, settings in changes.items():
        stages.setdefault(stage, {}).setdefault("with", {}).update(settings)
    file = folder / "programs.yaml"
    file.write_text(yaml.safe_dump({"name": "programs", "extends": "methods/zero", "stages": stages}))
    return file


def test_the_file_about_programs_is_planned_whole(tmp_path: Path) -> None:
    plan = make_plan(load(str(of_programs(tmp_path, {}))), Catalog(str(tmp_path / "store")), str(tmp_path / "store"))
    assert len(plan.to_run) == len(plan.steps) > 20


@pytest.mark.slow
def test_the_file_about_programs_runs_from_end_to_end(tmp_path: Path) -> None:
    small = {"tasks": {"train": 12, "dev": 4, "heldout": 4}, "begin": {"n": 12}, "warm": {"steps": 40, "batch": 8}}
    file, store = of_programs(tmp_path, small), str(tmp_path / "store")
    rounds = ["asked.with.n=4", "solutions.with.samples=2", "learned.with.steps=1", "learned.with.batch=8"]
    changes = [part for change in rounds for part in ("--set", f"stages.rounds.stages.{change}")]
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", str(file), "--no-prefect", "--store", store, "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *changes], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads(done.stdout)["stages"]
    proposed = next(stage["metrics"] for name, stage in stages.items() if name.startswith("proposed"))
    fates = {name: number for name, number in proposed.items() if name != "proposals"}
    assert sum(fates.values()) == proposed["proposals"] == 16, "each is a task, or refused for a reason"


@pytest.mark.slow
def test_a_policy_learns_to_propose_what_is_solved_sometimes(harness: Harness) -> None:
    """A tiny policy that was shown both roles, and a solver that solves half of what takes three calls, and nothing
    else: after one round of training it proposes such tasks more often."""
    given = harness.tasks(drawn(train=64)["train"])
    asked = harness.run(to_propose, {"n": 64}, tasks=[given])["tasks"]
    shown = [harness.run(synthesize, tasks=each)["trajectories"] for each in (given, asked)]
    model = {"init": "tiny", "size": {"context": 192, "vocabulary": 512}}
    warm = harness.run(sft, {"model": model, "steps": 150, "optimizer": {"lr": 5e-3}}, trajectories=shown)["model"]

    def proposals_of(model: Any) -> tuple[Any, Any, float]:
        rows = harness.run(sample, {"samples": 8}, model=model, tasks=asked)["trajectories"]
        tasks = [made_by(row) for row in rows.read()]
        share = sum(task is not None and task.level == 3 for task in tasks) / len(tasks)
        return rows, harness.run(from_proposals, trajectories=[rows], heldout=[])["tasks"], share

    proposals, tasks, before = proposals_of(warm)
    outcomes = [row for task in tasks.read() for row in solved(task, [task.level == 3, False])]
    inputs = {"proposals": [proposals], "tasks": [tasks], "solutions": [harness.trajectories(outcomes)]}
    result = harness.run(judge, {"scorer": "zero", "invalid": 0}, **inputs)
    steps = {"algorithm": {"type": "grpo"}, "scorer": "zero", "steps": 16, "batch": 64, "optimizer": {"lr": 1e-3}}
    rewarded = {"trajectories": [result["proposals"]], "scores": [result["scores"]]}
    _, _, after = proposals_of(harness.run(offline, steps, model=warm, **rewarded)["model"])
    assert after > before + 0.1, (before, after)
