"""Searches that models guide: judges of states, notes of failures, continuations that are cut."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import LIMITS, harness, model, tabular, tasks
from judge_server import JudgeServer, judging
from pydantic import ValidationError

from agentrl.environments.rooms.environment import Rooms
from agentrl.environments.rooms.house import house
from agentrl.models.policy import Policy
from agentrl.pipelines.handles import Model, RewardModel, Tasks
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.methods.lats.grow import TreeSearchConfig
from agentrl.pipelines.methods.lats.search import tree
from agentrl.pipelines.methods.lats.valuing import Valuing
from agentrl.pipelines.methods.reward_model.score import score
from agentrl.pipelines.stages.evaluate import evaluate
from agentrl.rollouts.reopen import opening_of
from agentrl.schemas.trajectory import Termination, Trajectory
from agentrl.training.reward_model import RewardCard, RewardNet

__all__ = ["harness", "model", "tabular", "tasks"]

SMALL: dict[str, Any] = {"branch": 2, "rounds": 4, **LIMITS}
HOME = house(48)


def near(asked: dict[str, Any]) -> str:
    """Says of a walk how near to the goal it has come, or that a note would help."""
    prompt = asked["messages"][-1]["content"]
    shown = json.loads(prompt.split("\n\n")[1])
    start, goal = shown["task"].split("?")[0].split(" to ")
    heard = [turn["content"] for turn in shown["transcript"] if turn["role"] == "tool"]
    far = HOME.distances(HOME.numbers[goal])[HOME.numbers[(heard or [start])[-1]]]
    if "what to do otherwise" in prompt:
        return json.dumps({"note": f"it was {far} away"})
    return json.dumps({"reason": "so", "value": 1 - far / 8})


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with judging(near) as server:
        yield server


@pytest.fixture(scope="module")
def few(harness: Harness, tasks: Tasks) -> Tasks:
    return harness.tasks(tasks.read()[:2])


def asks(judge: JudgeServer) -> dict[str, Any]:
    return {"engines": [judge.engine]}


def check_tree(done: Result) -> dict[str, Trajectory]:
    """The rows of a search. Visits are a node's own and those of its children, and the budget is that of the rows."""
    rows = {row.trajectory_id: row for row in done["trajectories"].read()}
    nodes = done["nodes"].table().to_pylist()
    for node in nodes:
        children = [other["visits"] for other in nodes if other["parent_node"] == node["node_id"]]
        assert node["visits"] == node["own"] + sum(children)
    assert done.metrics["sampled_tokens"] == sum(row.n_action_tokens for row in rows.values())
    return rows


@pytest.mark.parametrize("select", ["uct", "agentq"])
def test_a_judge_values_every_state_of_a_tree(
    harness: Harness, model: Model, few: Tasks, judge: JudgeServer, select: str
) -> None:
    config = {**SMALL, "select": select, "judge": asks(judge)}
    done = harness.run(tree, config, tasks=few, model=model)
    rows, nodes = check_tree(done), done["nodes"].table().to_pylist()
    for node in nodes:
        if node["parent_node"] is None:
            assert node["judge"] is None
            continue
        row = rows[node["trajectory_id"]]
        heard = [m.content for m in row.messages if m.role == "tool" and (m.token_end or 0) <= _end(row, node)]
        start, goal = row.prompt.rstrip("?").split(" to ")
        far = HOME.distances(HOME.numbers[goal])[HOME.numbers[(heard or [start])[-1]]]
        assert node["judge"] == pytest.approx(1 - far / 8)
    assert done.metrics["judged"] == len([node for node in nodes if node["parent_node"]])
    assert not any("reward" in prompt for prompt in judge.prompts())
    again = harness.run(tree, config, tasks=few, model=model)
    assert [row.input_ids for row in again["trajectories"].read()] == [row.input_ids for row in rows.values()]
    blind = harness.run(tree, {**SMALL, "select": select}, tasks=few, model=model)
    assert [row.input_ids for row in blind["trajectories"].read()] != [row.input_ids for row in rows.values()]


def _end(row: Trajectory, node: dict[str, Any]) -> int:
    """Where the observation ends that follows the turn of a node."""
    after = [m.token_start for m in row.messages if m.role == "assistant" and (m.token_start or 0) >= node["token_end"]]
    return min(filter(None, after), default=row.n_tokens)


def test_simulations_are_cut_and_go_on_from_there(
    harness: Harness, model: Model, few: Tasks, judge: JudgeServer
) -> None:
    config = {**SMALL, "rounds": 6, "judge": asks(judge), "simulate": 1}
    rows = check_tree(done := harness.run(tree, config, tasks=few, model=model))
    assert {row.n_steps for row in rows.values()} == {1}
    cut = {name: row for name, row in rows.items() if row.termination is Termination.CANCELLED}
    assert all((row.reward, row.success) == (None, None) for row in cut.values())
    further = [row for row in rows.values() if row.parent_id in cut]
    assert further
    for row in further:
        parent = cut[row.parent_id or ""]
        assert row.fork_at == parent.n_tokens
        assert row.input_ids[: row.fork_at] == parent.input_ids
    assert not done.metrics.get("diverged")
    assert done.metrics["deepest"] > 1


@pytest.mark.parametrize("by", ["env", "model"])
def test_failures_leave_notes_that_new_attempts_see(
    harness: Harness, model: Model, few: Tasks, judge: JudgeServer, by: str
) -> None:
    guided: dict[str, Any] = (
        {"oracle": True, "reflect": "env"}
        if by == "env"
        else {"judge": {**asks(judge), "fails": 0.9}, "reflect": asks(judge)}
    )
    done = harness.run(tree, {**SMALL, "rounds": 6, **guided}, tasks=few, model=model)
    rows = check_tree(done)
    noted = [row for row in rows.values() if "Notes: " in opening_of(row)[-1].content]
    assert noted
    assert not done.metrics.get("diverged")
    for row in noted:
        notes = opening_of(row)[-1].content.partition("Notes: ")[2].split("; ")
        assert 1 <= len(notes) <= 3
        if not row.fork_at:
            assert row.tags == [f"note:{row.task_id}-{position}" for position in range(len(notes))]
    assert done.metrics["notes"] <= 3 * len(few.read())
    assert any(row.fork_at for row in noted) or by == "env", "attempts that saw notes are continued"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"simulate": 4}, "simulate needs a judge: a continuation that is cut has no end"),
        ({"alpha": 0.7}, "alpha needs a judge"),
        ({"reflect": "env"}, "reflect: env tells the search what the verifier knows; set oracle: true"),
        ({"reflect": {"engines": ["ENGINE"]}}, "reflect needs to know which attempts failed"),
        ({"alpha": 1.5, "judge": {"engines": ["ENGINE"]}}, "less than or equal to 1"),
    ],
)
def test_a_guide_that_knows_nothing_is_refused(config: dict[str, Any], message: str, judge: JudgeServer) -> None:
    for item in config.values():
        if isinstance(item, dict):
            item["engines"] = [judge.engine]
    with pytest.raises(ValidationError, match=message):
        TreeSearchConfig.model_validate(config)


def test_settings_are_written_and_read_again() -> None:
    """Stages that run in workers get their settings whole, defaults included."""
    for config in (tree.config(), evaluate.config(best_of=[{"type": "self_consistency"}], samples=2, search={})):
        assert type(config).model_validate(config.model_dump()) == config


def test_an_environment_that_writes_no_notes_is_refused_by_name(
    harness: Harness, model: Model, few: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Rooms, "reflect")
    with pytest.raises(ValueError, match=r"reflect: env, but environment 'rooms' has no reflect\(row, task\); give"):
        harness.run(tree, {**SMALL, "oracle": True, "reflect": "env"}, tasks=few, model=model)


def test_an_evaluation_searches_beside_the_best_of_several(harness: Harness, model: Model, few: Tasks) -> None:
    scorer = [{"type": "self_consistency"}]
    plain = {"samples": 4, "best_of": scorer, "max_tokens": 240}
    config = {**plain, "search": {"branch": 2, "rounds": 3}}
    before = harness.run(evaluate, plain, model=model, tasks=few)
    done = harness.run(evaluate, config, model=model, tasks=few)
    for name in ("success", "best_of_n", "greedy"):
        assert done.metrics[name] == before.metrics[name]
    assert 0 <= done.metrics["best_of_search"] <= 1
    assert done.metrics["search_tokens"] == done.metrics["sampled_tokens"] / len(few.read())
    assert "pass@budget with feedback" not in done.metrics
    assert len(done["trajectories"].ids()) == 5 * len(few.read()), "the search's rows are no attempts"
    overall = [row for row in done["results"].table().to_pylist() if row["level"] == -1]
    assert [row["best_of_search"] is None for row in overall] == [False, True], "of what is sampled, not of greedy rows"


def test_a_search_that_sees_rewards_is_no_success(harness: Harness, model: Model, tasks: Tasks) -> None:
    config = {"max_tokens": 240, "search": {"branch": 2, "rounds": 3, "oracle": True}}
    done = harness.run(evaluate, config, model=model, tasks=tasks)
    plain = harness.run(evaluate, {"max_tokens": 240}, model=model, tasks=tasks)
    assert done.metrics["success"] == plain.metrics["success"]
    assert done.metrics["pass@budget with feedback"] >= 0.25
    assert "best_of_search" not in done.metrics
    with pytest.raises(ValidationError, match="search gives many rows of a task, and nothing picks one: set best_of"):
        evaluate.config.model_validate({"search": {}})


def test_a_reward_model_values_every_state_of_a_tree(
    harness: Harness, model: Model, few: Tasks, tmp_path: Path
) -> None:
    """What rewards.score says of the same turns."""
    net = RewardNet(Policy.load(model.path))
    torch.manual_seed(0)
    torch.nn.init.normal_(net.head.weight)
    about = RewardCard(kind="prm", base="m", base_digest="", tokenizer=net.policy.tokenizer_fingerprint, error=0.1)
    net.save(tmp_path / "prm", about)
    given = RewardModel(tmp_path / "prm", "prm", "reward_model", "0" * 32)
    done = harness.run(tree, {**SMALL, "judge": "reward_model"}, tasks=few, model=model, reward_model=given)
    rows = check_tree(done)
    scored = harness.run(score, reward_model=given, trajectories=[done["trajectories"]])
    values = {(step.trajectory_id, step.turn): step.q for step in scored["steps"].read()}
    nodes = [node for node in done["nodes"].table().to_pylist() if node["parent_node"]]
    assert done.metrics["judged"] == len(nodes) > len(rows) / 2
    assert len({round(node["judge"], 3) for node in nodes}) > 1
    for node in nodes:
        assert node["judge"] == pytest.approx(values[node["trajectory_id"], node["depth"] - 1], abs=1e-5)
    with pytest.raises(ValueError, match=r"judge: reward_model needs inputs\.reward_model"):
        harness.run(tree, {**SMALL, "judge": "reward_model"}, tasks=few, model=model)
    with pytest.raises(ValueError, match=r"inputs\.reward_model is wired, and judge is another"):
        harness.run(tree, SMALL, tasks=few, model=model, reward_model=given)
    with pytest.raises(ValidationError, match=r"search\.judge: reward_model is an input of search\.tree"):
        evaluate.config.model_validate({"search": {"judge": "reward_model"}, "samples": 2, "best_of": [{"type": "f1"}]})
    net.save(tmp_path / "orm", about.model_copy(update={"kind": "orm"}))
    with pytest.raises(ValueError, match=r"is of kind: orm, which says nothing of states in the middle"):
        Valuing(RewardModel(tmp_path / "orm", "orm", "reward_model", "0" * 32))
