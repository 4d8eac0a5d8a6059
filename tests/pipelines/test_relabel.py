"""Hindsight: failed rows become rows of the tasks that they do solve, and never of held-out ones."""

import json
import math
from collections import Counter
from typing import Any

import pytest
from judge_server import judging
from pydantic import ValidationError

from agentrl.chat.codec import tokenize
from agentrl.environments import load_environment
from agentrl.environments.rooms.environment import Rooms, RoomsEpisode
from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.hindsight.relabel import relabel
from agentrl.pipelines.stages.train import offline, sft
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.reopen import opening_of
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Trajectory


@pytest.fixture
def harness(tmp_path: Any) -> Harness:
    return Harness(tmp_path)


def walks(env: str, number: int = 60, noise: float = 0.7) -> tuple[list[Task], list[Trajectory]]:
    """Tasks, and a row of each that errs often."""
    environment = load_environment(env)
    tasks = environment.tasks({"train": number, "heldout": number}, 0)["train"]
    return tasks, [demonstrate(environment, task, noise, 3, f"w-{n:03d}") for n, task in enumerate(tasks)]


def heldout(harness: Harness, env: str = "rooms", *more: Task) -> list[Tasks]:
    return [harness.tasks([*load_environment(env).tasks({"train": 60, "heldout": 60}, 0)["heldout"], *more])]


def of_tokens(harness: Harness, rows: list[Trajectory]) -> tuple[Trajectories, Model]:
    policy = tiny_policy([row.messages for row in rows], 0)
    written = [tokenize(row, policy.codec, policy.tokenizer_fingerprint) for row in rows]
    sampled = [
        row.model_copy(update={"logprobs": [-0.5 if acted else math.nan for acted in row.action_mask]})
        for row in written
    ]
    return harness.trajectories(sampled), harness.model(policy.save)


@pytest.mark.parametrize("env", ["rooms", "lookup"])
def test_what_a_failed_row_did_achieve_is_a_task_that_it_solves(harness: Harness, env: str) -> None:
    tasks, rows = walks(env, 60)
    given, model = of_tokens(harness, rows)
    made = harness.run(
        relabel, trajectories=[given], tasks=[harness.tasks(tasks)], heldout=heldout(harness, env), model=model
    )
    new = made["trajectories"].read()
    failed = [row for row in rows if not row.success and row.termination == "answered"]
    assert len(new) >= 8
    assert made.metrics["failed"] == len(failed)
    assert made.metrics["successes"] == sum(row.success for row in rows)
    assert made.metrics["relabelled"] == len(new) == len({row.parent_id for row in new}), "the last goal alone"
    assert made.metrics["environment_calls"] >= sum(row.n_tool_calls for row in new) > 0, "calls made again to verify"
    solved = {task.task_id: task for task in made["tasks"].read()}
    parents = {row.trajectory_id: row for row in given.read()}
    for row in new:
        old = parents[row.parent_id]
        at, was = (entry.messages[len(opening_of(entry))].token_start for entry in (row, old))
        assert row.input_ids[at:] == old.input_ids[was:]
        assert row.action_mask[at:] == old.action_mask[was:]
        assert all(map(math.isnan, row.logprobs))
        assert (row.source, row.success, row.split) == ("relabelled", True, "train")
        assert row.prompt == solved[row.task_id].prompt == row.messages[0].content != old.prompt
        assert row.reward == 1.0
    shifts = Counter((parents[row.parent_id].level, row.level) for row in new)
    assert made["levels"].table().to_pylist() == [
        {"asked": old, "achieved": level, "rows": count} for (old, level), count in sorted(shifts.items())
    ]


@pytest.mark.slow
def test_relabelled_rows_are_for_supervised_training_alone(harness: Harness) -> None:
    tasks, rows = walks("rooms")
    given, model = of_tokens(harness, rows)
    made = harness.run(relabel, trajectories=[given], tasks=[harness.tasks(tasks)], heldout=[], model=model)
    config: dict[str, Any] = {"steps": 1, "batch": 2}
    trained = harness.run(sft, config, trajectories=[made["trajectories"]], model=model)
    assert trained.metrics["rows"] == made.metrics["relabelled"] > 8
    config["algorithm"] = {"type": "reinforce++"}
    with pytest.raises(Exception, match="logprobs not finite"):
        harness.run(offline, config, trajectories=[made["trajectories"], given], model=model)


def test_held_out_tasks_are_never_made_by_prompt_or_by_goal(harness: Harness) -> None:
    tasks, rows = walks("rooms")
    given, wired = harness.trajectories(rows), [harness.tasks(tasks)]
    plain = harness.run(relabel, trajectories=[given], tasks=wired, heldout=heldout(harness))
    first, second = plain["tasks"].read()[:2]
    signs = 'rooms{"signs": true}'
    signed = second.model_copy(update={"env": signs, "prompt": f"{second.prompt} You are in a room with signs."})
    forbidden = [first.model_copy(update={"split": "heldout"}), signed]
    made = harness.run(relabel, trajectories=[given], tasks=wired, heldout=heldout(harness, "rooms", *forbidden))
    assert {goal(first), goal(second)}.isdisjoint(goal(task) for task in made["tasks"].read())
    assert made.metrics["heldout_prompt"] > plain.metrics.get("heldout_prompt", 0)
    assert made.metrics["heldout_goal"] > plain.metrics.get("heldout_goal", 0)
    others = Harness(harness.folder / "others")
    mixed = [others.trajectories([rows[0].model_copy(update={"split": "dev"}), *rows[1:]])]
    with pytest.raises(ValueError, match=r"1 of 60 rows are not of the train split, w-000 is of 'dev': nothing is"):
        others.run(relabel, trajectories=mixed, tasks=wired, heldout=[])


def goal(task: Task) -> str:
    return Rooms().goal(task)


def test_a_cap_keeps_easy_goals_from_flooding_and_a_weight_is_given_on(harness: Harness) -> None:
    tasks, rows = walks("rooms", 70)
    wired = {"trajectories": [harness.trajectories(rows)], "tasks": [harness.tasks(tasks)], "heldout": heldout(harness)}
    plain, capped = (harness.run(relabel, config, **wired) for config in ({}, {"cap": 2, "weight": 0.5}))
    levels = Counter(row.level for row in plain["trajectories"].read())
    assert max(levels.values()) > 2
    assert Counter(row.level for row in capped["trajectories"].read()) == {
        level: min(2, n) for level, n in levels.items()
    }
    solved = [item.metrics["relabelled"] + item.metrics.get("doubled", 0) for item in (plain, capped)]
    assert capped.metrics["over_cap"] == solved[0] - solved[1] > 10
    assert set(capped["trajectories"].selection()["weight"].to_pylist()) == {0.5}


def test_future_goals_are_several_of_one_row(harness: Harness) -> None:
    tasks, rows = walks("lookup", 60)
    wired = {"trajectories": [harness.trajectories(rows)], "tasks": [harness.tasks(tasks)], "heldout": []}
    made = harness.run(relabel, {"goals": "future", "k": 4}, **wired)["trajectories"].read()
    goals = Counter(row.parent_id for row in made)
    assert max(goals.values()) > 1
    assert len(made) > len(harness.run(relabel, **wired)["trajectories"].ids())


def test_turns_that_do_not_lead_to_the_new_goal_are_not_trained_on(harness: Harness) -> None:
    tasks, rows = walks("rooms")
    given, model = of_tokens(harness, rows)
    inputs = {"trajectories": [given], "tasks": [harness.tasks(tasks)], "heldout": heldout(harness), "model": model}
    kept = harness.run(relabel, **inputs)
    whole = {row.parent_id: row for row in kept["trajectories"].read()}
    asked = {task.task_id: json.loads(task.metadata) for task in kept["tasks"].read()}
    house, masked = Rooms().house, 0
    for row in harness.run(relabel, {"detours": "masked"}, **inputs)["trajectories"].read():
        where = asked[row.task_id]
        ahead = house.distances(house.numbers[where["goal"]])
        room, turns = (
            house.numbers[where["start"]],
            [message for message in row.messages if message.role is Role.ASSISTANT],
        )
        assert row.input_ids == whole[row.parent_id].input_ids
        for turn, answer in zip(
            turns, [message for message in row.messages if message.role is Role.TOOL], strict=False
        ):
            there = house.numbers[answer.content]
            trained = row.action_mask[turn.token_start : turn.token_end]
            assert trained == [ahead[there] < ahead[room]] * len(trained)
            masked, room = masked + (not any(trained)), there
        assert all(row.action_mask[turns[-1].token_start : turns[-1].token_end])
        assert row.n_action_tokens == sum(row.action_mask)
    assert masked > 0
    text = {
        **inputs,
        "trajectories": [
            harness.trajectories(row.model_copy(update={"trajectory_id": f"t-{n}"}) for n, row in enumerate(rows))
        ],
    }
    with pytest.raises(ValueError, match="has no tokens to mask; set detours: kept"):
        harness.run(relabel, {"detours": "masked"}, **text)
    with pytest.raises(ValidationError, match="needs the rewards of an episode"):
        harness.run(relabel, {"by": "judge", "detours": "masked"}, **inputs)


def test_an_environment_that_fails_while_it_verifies_is_shown(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, rows = walks("rooms", 20)
    given = {"trajectories": [harness.trajectories(rows)], "tasks": [harness.tasks(tasks)], "heldout": []}

    def broken(episode: RoomsEpisode) -> None:
        raise RuntimeError("the house is on fire")

    monkeypatch.setattr(RoomsEpisode, "outcome", broken)
    with pytest.warns(UserWarning, match=r"(?s)the first of them:.*the house is on fire"):
        made = harness.run(relabel, **given)
    assert made.metrics["env_error"] > 1
    assert made.metrics["relabelled"] == 0


def test_what_cannot_be_relabelled_is_said(harness: Harness) -> None:
    slip = 'rooms{"slip": 0.5}'
    [task] = load_environment("rooms").tasks({"train": 1}, 0)["train"]
    row = demonstrate(load_environment("rooms"), task, 1.0, 0, "t").model_copy(update={"env": slip, "success": False})
    rows, tasks = [harness.trajectories([row])], [harness.tasks([task.model_copy(update={"env": slip})])]
    with pytest.raises(ValueError, match="cannot make an episode again, so no verifier could score the new tasks"):
        harness.run(relabel, trajectories=rows, tasks=tasks, heldout=[])
    service = [harness.tasks([task.model_copy(update={"env": "service"})])]
    with pytest.raises(ValueError, match=r"env 'service' does not say what a row has achieved; give it achieved"):
        harness.run(relabel, trajectories=rows, tasks=service, heldout=[])
    with pytest.raises(ValidationError, match="by: judge asks two models: set describe"):
        harness.run(relabel, {"by": "judge"}, trajectories=rows, tasks=tasks, heldout=[])


def reply(request: dict[str, Any]) -> str:
    """Describes a run by its first call; one without a call is not described for sure, and one of `Ann` is no failure.
    Judges that nothing about a boss was done."""
    text = request["messages"][-1]["content"]
    shown = json.loads(text.split("\n\n")[1])
    if "Which request" not in text:
        return json.dumps({"reason": "so", "score": 0 if "boss" in shown["task"] else 4})
    calls = [call for turn in shown["transcript"] for call in turn.get("calls", [])]
    if not calls:
        return json.dumps({"request": "say nothing", "confidence": 0.2, "severity": 0.9})
    asked = json.loads(calls[0]["arguments"])
    severity = 0.1 if asked["who"] == "Ann" else 0.6
    return json.dumps(
        {"request": f"look up the {asked['rel']} of {asked['who']}", "confidence": 0.8, "severity": severity}
    )


def test_a_model_describes_what_was_done_and_another_one_judges_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    tasks, rows = walks("lookup", 40)
    given, model = of_tokens(harness, rows)
    with judging(reply) as server:
        config = {"by": "judge", "describe": {"engines": [server.engine]}, "verify": {"engines": [server.engine]}}
        made = harness.run(relabel, config, trajectories=[given], tasks=[harness.tasks(tasks)], heldout=[], model=model)
    new = made["trajectories"].read()
    parents = {row.trajectory_id: row for row in given.read()}
    for row in new:
        first = next(message for message in row.messages if message.role is Role.ASSISTANT)
        asked = first.tool_calls[0].parsed()
        assert row.prompt == row.messages[0].content == f"look up the {asked['rel']} of {asked['who']}"
        assert asked["who"] != "Ann"
        assert asked["rel"] != "boss"
        assert row.success
        assert (
            row.input_ids[first.token_start :]
            == parents[row.parent_id].input_ids[-len(row.input_ids) + first.token_start :]
        )
    metrics = made.metrics
    assert new
    assert metrics["not_solved"] > 0
    assert metrics["below_thresholds"] > 0
    assert (
        len(new) + metrics["not_solved"] + metrics["below_thresholds"] + metrics.get("doubled", 0) == metrics["failed"]
    )
    assert all(task.verifier == "judge" and json.loads(task.ground_truth) is None for task in made["tasks"].read())
