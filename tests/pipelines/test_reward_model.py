"""Reward models: trained on planted rules, measured on tasks that they have not seen, and used to score and to pick."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from agentrl.chat.codec import encode
from agentrl.models.policy import Policy
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.pipelines.handles import Model, Trajectories
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.methods.reward_model.labels import Labelled, balanced, held_out
from agentrl.pipelines.methods.reward_model.picked import ScoredAttempt, best_rows, by_task, picked, picks
from agentrl.pipelines.methods.reward_model.score import score
from agentrl.pipelines.methods.reward_model.train import RewardTrainConfig, train
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import reject
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory, UnscoredError
from agentrl.training.batch import collate
from agentrl.training.reward_model import Inverse, RewardNet, SoftLabels
from agentrl.training.rows import TrainingRows

WORDS = ("apple", "berry", "cherry", "damson", "elder")
SIZE = TinySize(context=64, width=32, layers=1)
FIT: dict[str, Any] = {"steps": 60, "batch": 32, "optimizer": {"lr": 1e-2, "schedule": "linear"}, "holdout": 0.25}


def row(task: int, number: int, words: list[str], success: bool | None) -> Trajectory:
    """Two turns; each says a word."""
    turns = [Message(role=Role.USER, content=f"task {task}")]
    for word in words:
        turns += [Message(role=Role.ASSISTANT, content=word), Message(role=Role.USER, content="more")]
    return Trajectory(
        trajectory_id=f"r-{task}-{number}",
        episode_id=f"r-{task}-{number}",
        task_id=f"t{task}",
        sample_index=number,
        source="sampled",
        env="lookup",
        split="train",
        prompt=f"task {task}",
        reward=None if success is None else float(success),
        success=success,
        termination=Termination.ANSWERED,
        messages=turns[:-1],
        n_steps=len(words),
        n_action_tokens=2,
        policy="teller/1",
    )


@cache
def planted() -> list[Trajectory]:
    """Attempts that succeed if, and only if, a turn says "cherry"."""
    draw = random.Random(0)
    rows = []
    for task in range(24):
        for number in range(6):
            words = [draw.choice(WORDS), draw.choice(WORDS)]
            rows.append(row(task, number, words, "cherry" in words))
    return rows


@cache
def small() -> Policy:
    return tiny_policy([each.messages for each in planted()], 0, SIZE)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def model(harness: Harness) -> Model:
    return harness.model(small().save)


@pytest.fixture(scope="module")
def rows(harness: Harness) -> Trajectories:
    return harness.trajectories(planted())


@pytest.fixture(scope="module")
def orm(harness: Harness, model: Model, rows: Trajectories) -> Result:
    return harness.run(train, {"kind": "orm", **FIT}, model=model, trajectories=[rows])


@pytest.fixture(scope="module")
def steps(harness: Harness, rows: Trajectories) -> Any:
    """Values by hand: a state is worth 1 once a turn said "cherry", else what a last word is worth, 1 in 5."""
    return harness.steps(_values(small(), "teller/1"))


def _values(policy: Policy, prover: str) -> list[StepValue]:
    values = []
    for each in planted():
        messages = encode(policy.codec, each.messages, each.tools)[2]
        turns = [message for message in messages if message.role is Role.ASSISTANT]
        worth = [0.36]
        for turn in range(len(turns)):
            rose = any("cherry" in before.content for before in turns[: turn + 1])
            worth.append(1.0 if rose else (0.2, 0.0)[turn])
        for turn, message in enumerate(turns):
            told = {"token_start": message.token_start, "token_end": message.token_end, "by": "hand", "policy": prover}
            v, q = worth[turn : turn + 2]
            values.append(StepValue(trajectory_id=each.trajectory_id, turn=turn, v=v, q=q, n=8, low=q, high=q, **told))
    return values


def test_the_loss_is_the_cross_entropy_with_soft_labels() -> None:
    """Two tokens: a logit of 0.4 for a label of 0.7 that counts twice, and of -1 for one of 0."""
    made = [
        TrainingRow(row_id="a", input_ids=[5, 6, 7], mask=[False, True, True], weights=[0, 2, 1], logprobs=[0, 0.7, 0])
    ]
    batch = collate(TrainingRows.of(made))
    loss, _ = SoftLabels().loss(torch.tensor([[9.0, 0.4, -1.0]]), torch.zeros(1, 3), batch)
    sigmoid = 1 / (1 + np.exp(-np.array([0.4, -1.0])))
    by_hand = -2 * (0.7 * np.log(sigmoid[0]) + 0.3 * np.log(1 - sigmoid[0])) - np.log(1 - sigmoid[1])
    assert loss.item() == pytest.approx(by_hand)
    assert SoftLabels().count(batch) == 3


def test_a_planted_rule_is_learned_on_tasks_that_were_held_out(orm: Result) -> None:
    measured = orm.metrics
    assert (measured["tasks"], measured["heldout_tasks"], measured["heldout_rows"]) == (18, 6, 36)
    assert float(measured["auc_within"] or 0) > 0.95
    assert float(measured["auc"] or 0) > 0.95
    assert float(measured["brier"] or 1) < 0.5 * float(measured["brier_base"] or 0)
    assert sum(orm["calibration"].table()["rows"].to_pylist()) == 36
    assert orm["metrics"].table().num_rows == FIT["steps"]


def test_scores_do_not_depend_on_the_batch_nor_on_the_disk(orm: Result, tmp_path: Path) -> None:
    net, about = RewardNet.load(orm["reward_model"].path, "orm")
    made = []
    for each in planted()[:12]:
        ids, mask, _ = encode(net.policy.codec, each.messages, each.tools)
        made.append(TrainingRow(row_id=each.trajectory_id, input_ids=ids, mask=mask, weights=[0.0] * len(ids)))
    made[3] = made[3].model_copy(update={name: getattr(made[3], name) * 2 for name in ("input_ids", "mask", "weights")})
    together = net.scores(TrainingRows.of(made), 8192)
    alone = [net.scores(TrainingRows.of([each]), 8192)[0] for each in made]
    batch = collate(TrainingRows.of(made))
    with torch.no_grad():
        padded = net.logits(batch).sigmoid().numpy()
    for number, (all_at_once, by_itself) in enumerate(zip(together, alone, strict=True)):
        assert all_at_once == pytest.approx(by_itself, abs=1e-6)
        assert padded[number][batch.mask[number].numpy()] == pytest.approx(by_itself, abs=1e-6)
    assert np.ptp(np.concatenate(together)) > 0.5
    net.save(tmp_path, about)
    again, said_of_it = RewardNet.load(tmp_path, "again")
    assert said_of_it == about
    assert all(map(np.array_equal, again.scores(TrainingRows.of(made), 8192), together))


def test_scores_are_a_table_that_stages_read_and_success_stays(
    harness: Harness, model: Model, rows: Trajectories, orm: Result
) -> None:
    done = harness.run(
        score, {"scorer": "orm", "weight": 0.25}, reward_model=orm["reward_model"], trajectories=[rows, rows]
    )
    table = done["scores"].table().to_pylist()
    by_id = {each.trajectory_id: each for each in planted()}
    assert [entry["trajectory_id"] for entry in table] == [*by_id]
    for entry in table:
        stored = by_id[entry["trajectory_id"]]
        outcome, given = entry["components"]
        assert entry["success"] == stored.success
        assert (outcome["name"], outcome["value"], given["name"]) == ("environment", stored.reward, "orm")
        assert entry["reward"] == pytest.approx(float(stored.reward or 0) + 0.25 * given["value"])
    assert done["steps"].read() == []
    assert done.metrics["best_of_n"] == done.metrics["oracle"] > done.metrics["random"]  # type: ignore[operator]
    assert len(done["best"].ids()) == 24
    inputs = {"trajectories": [rows], "scores": [done["scores"]]}
    best = {
        by_id[name].task_id: name for name in harness.run(reject, {"scorer": "orm"}, **inputs)["trajectories"].ids()
    }
    rewards = {entry["trajectory_id"]: entry["reward"] for entry in table}
    for task, name in best.items():
        assert rewards[name] == max(rewards[other.trajectory_id] for other in by_id.values() if other.task_id == task)


def test_a_prm_learns_what_turns_are_worth(harness: Harness, model: Model, rows: Trajectories, steps: Any) -> None:
    made = harness.run(train, {"kind": "prm", **FIT}, model=model, trajectories=[rows], values=[steps])
    assert float(made.metrics["brier"] or 1) < 0.3 * float(made.metrics["brier_base"] or 0)
    done = harness.run(score, reward_model=made["reward_model"], trajectories=[rows])
    given = {(step.trajectory_id, step.turn): step for step in done["steps"].read()}
    wanted = {(step.trajectory_id, step.turn): step for step in steps.read()}
    assert given.keys() == wanted.keys()
    off = [abs(given[name].q - step.q) for name, step in wanted.items()]
    assert np.mean(off) < 0.1
    for name, step in given.items():
        assert (step.token_end, step.policy, step.by) == (wanted[name].token_end, "teller/1", "reward_model")
        assert 0 <= step.low <= step.q <= step.high <= 1
        if step.turn:
            assert step.v == given[name[0], step.turn - 1].q
    [first] = [entry for entry in done["scores"].table().to_pylist() if entry["trajectory_id"] == "r-0-0"]
    turns = [given["r-0-0", turn].q for turn in range(2)]
    assert first["components"][1]["value"] == pytest.approx(min(turns))
    config = {"steps": 1, "batch": 4, "credit": "values", "other_prover": False}
    harness.run(sft, config, trajectories=[rows], model=model, steps=[done["steps"]])


def test_the_inverse_loss_compares_differences_of_the_value() -> None:
    """A demonstrator's row with Q of 1 and 0.4 after its turns, which weighs 2, and a learner's with Q of -0.5 after
    one, under a discount of 0.5: rewards 1 - 0.2, 0.4, and -0.5."""
    masks = {"a": [False, True, False, True], "b": [False, False, True, False]}
    made = [
        TrainingRow(row_id=name, input_ids=[5, 6, 7, 8], mask=mask, weights=[weight] * 4, logprobs=[label] * 4)
        for (name, mask), weight, label in zip(masks.items(), (2, 1), (1, 0), strict=True)
    ]
    batch = collate(TrainingRows.of(made))
    loss, _ = Inverse(gamma=0.5).loss(torch.tensor([[9.0, 1, 9, 0.4], [9, 9, -0.5, 9]]), torch.zeros(2, 4), batch)
    sigmoid = 1 / (1 + np.exp(-np.array([0.8, 0.4, -0.5])))
    assert loss.item() == pytest.approx(-2 * np.log(sigmoid[:2]).sum() - np.log(1 - sigmoid[2]))


def test_an_inverse_prm_learns_what_a_demonstrator_does(harness: Harness, model: Model, rows: Trajectories) -> None:
    """The demonstrator says "cherry" alone, which the learner says in one of five turns. No outcome is known."""
    text = {"source": "expert", "n_action_tokens": 0}
    speeches = [row(task, 6, ["cherry", "cherry"], None).model_copy(update=text) for task in range(24)]
    shown = harness.trajectories(speeches)
    made = harness.run(train, {"kind": "inverse", **FIT}, model=model, trajectories=[rows], demonstrations=[shown])
    assert float(made.metrics["auc_within"] or 0) > 0.85
    done = harness.run(score, reward_model=made["reward_model"], trajectories=[rows])
    words = {each.trajectory_id: [m.content for m in each.messages if m.role is Role.ASSISTANT] for each in planted()}
    by_word: dict[bool, list[float]] = {True: [], False: []}
    for step in done["steps"].read():
        by_word[words[step.trajectory_id][step.turn] == "cherry"].append(step.progress)
        assert step.v == 0.5
    assert np.mean(by_word[False]) < -0.3 < 0 < np.mean(by_word[True])
    with pytest.raises(ValueError, match=r"kind: inverse needs inputs.demonstrations, such as an expert's"):
        harness.run(train, {"kind": "inverse", **FIT}, model=model, trajectories=[rows])
    with pytest.raises(ValueError, match=r"inputs.demonstrations are for kind: inverse, not orm"):
        harness.run(train, {"kind": "orm", **FIT}, model=model, trajectories=[rows], demonstrations=[shown])
    with pytest.raises(ValidationError, match="gamma is for kind: inverse"):
        RewardTrainConfig(kind="orm", gamma=0.9)


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (lambda each: {"success": None}, UnscoredError, r"r-0-0.* have no success: unscored is not failed"),
        (lambda each: {"success": True}, ValueError, r"all 108 rows succeeded of the tasks to train on.*wire more"),
        (lambda each: {"task_id": "t"}, ValueError, r"holdout: 0.25 of 1 tasks leaves none to train on; wire rows of"),
    ],
)
def test_rows_that_nothing_can_be_learned_from_are_refused(
    tmp_path: Path, change: Any, error: type[Exception], why: str
) -> None:
    own = Harness(tmp_path)
    given = own.trajectories([each.model_copy(update=change(each)) for each in planted()])
    with pytest.raises(error, match=why):
        own.run(train, {"kind": "orm", **FIT}, model=own.model(small().save), trajectories=[given])


def test_inputs_must_match_the_kind_and_the_tokenizer(
    harness: Harness, model: Model, rows: Trajectories, steps: Any, orm: Result, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"model": model, "trajectories": [rows]}
    with pytest.raises(ValueError, match=r"kind: prm needs inputs.values, such as those of steps.value"):
        harness.run(train, {"kind": "prm", **FIT}, **given)
    with pytest.raises(ValueError, match=r"inputs.values are for kind: prm, not orm; set that kind, or leave them out"):
        harness.run(train, {"kind": "orm", **FIT}, **given, values=[steps])
    with pytest.raises(ValidationError, match="balance: task is for kind: orm"):
        RewardTrainConfig(kind="prm", balance="task")
    with pytest.raises(ValidationError, match="weight"):
        score.config.model_validate({"weight": 1.5})
    stranger = harness.steps(_values(small(), "stranger/1"))
    with pytest.raises(ValueError, match=r"those of stranger/1, which sampled none of the rows.*other_prover: true"):
        harness.run(train, {"kind": "prm", **FIT}, **given, values=[stranger])
    foreign = planted()[0].model_copy(
        update={"trajectory_id": "foreign", "tokenizer": "another", "input_ids": [9, 8, 7, 6], "n_tokens": 4}
        | {"action_mask": [False, False, True, True], "logprobs": [float("nan")] * 2 + [-0.1] * 2}
        | {"messages": [Message(role=Role.USER, content="x"), Message(role=Role.ASSISTANT, content="y")]}
    )
    other = harness.trajectories([foreign])
    why = "foreign was tokenised by another, and the model .* uses"
    with pytest.raises(ValueError, match=why):
        harness.run(train, {"kind": "orm", **FIT, "holdout": 0}, model=model, trajectories=[rows, other])
    with pytest.raises(ValueError, match=why):
        harness.run(score, reward_model=orm["reward_model"], trajectories=[other])


def test_balanced_labels_weigh_both_outcomes_of_a_task_alike() -> None:
    labels = {number: Labelled("last", [float(won)]) for number, won in enumerate([True, False, False, False, True])}
    weighed = balanced(labels, ["a", "a", "a", "a", "b"])
    assert {number: each.weight for number, each in weighed.items()} == pytest.approx(
        {0: 2.0, 1: 2 / 3, 2: 2 / 3, 3: 2 / 3}
    )
    with pytest.raises(ValueError, match="balance: task, and no task has both a success and a failure"):
        balanced({4: labels[4]}, ["a", "a", "a", "a", "b"])


def test_tasks_are_held_out_whole_and_by_the_seed() -> None:
    tasks = [f"t{number % 10}" for number in range(40)]
    first = held_out(tasks, 0.3, 1)
    assert len(first) == 3
    assert held_out(tasks[::-1], 0.3, 1) == first
    assert any(held_out(tasks, 0.3, seed) != first for seed in range(2, 6))
    assert held_out(tasks, 0, 1) == set()


def test_what_is_picked_by_hand() -> None:
    rows = [(0.2, True, "a"), (0.9, False, "B."), (0.9, True, "c"), (0.1, False, "b")]
    task = [ScoredAttempt("t", [str(number)], *values) for number, values in enumerate(rows)]
    assert picks(task) == {"best_of_n": 0.5, "first": 1.0, "majority": 0.0, "random": 0.5, "oracle": 1.0}
    silent = [ScoredAttempt("u", ["u0"], 0.5, False, None), ScoredAttempt("u", ["u1"], 0.4, True, None)]
    assert picks(silent)["majority"] == 0.5
    unknown = [ScoredAttempt("v", ["v0"], 0.5, None, None), ScoredAttempt("v", ["v1"], 0.4, True, None)]
    alone = [ScoredAttempt("w", ["w0"], 0.5, True, "a")]
    tasks = by_task([*task, *silent, *unknown, *alone])
    assert best_rows(tasks) == ["1", "u0", "v0", "w0"]
    measured = picked(tasks)
    assert (measured["reranked_tasks"], measured["best_of_n"], measured["oracle"]) == (2, 0.25, 1.0)


def test_rows_without_an_outcome_are_scored_and_have_no_reward(tmp_path: Path, orm: Result) -> None:
    own = Harness(tmp_path)
    bare = row(0, 0, ["cherry", "apple"], None)
    broken = row(0, 1, ["cherry", "apple"], None).model_copy(update={"termination": Termination.INFRA_ERROR})
    done = own.run(score, reward_model=orm["reward_model"], trajectories=[own.trajectories([bare, broken])])
    first, second = done["scores"].table().to_pylist()
    assert (first["reward"], first["why"]) == (None, "the row has no outcome")
    assert first["components"][0]["value"] > 0.5
    assert (second["reward"], second["components"]) == (None, [])
    assert "no doing of the policy" in second["why"]
    assert (done.metrics["without_outcome"], done.metrics["unscored"], done.metrics["auc"]) == (1, 1, None)
