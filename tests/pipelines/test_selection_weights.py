"""Every training stage trains on the weights of a selection: a row of weight 2 counts as the row twice."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from small_models import small_policy

from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.kto import KTO
from agentrl.algorithms.sft import SFT
from agentrl.algorithms.simpo import SimPO
from agentrl.pipelines.handles import Model, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.agentq.pairs import agentq
from agentrl.pipelines.methods.eto.outcome import outcome
from agentrl.pipelines.stages.curate import curate
from agentrl.pipelines.stages.select import select
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import dpo, kto, offline, preference, sft
from agentrl.pipelines.stages.trajectories import reject, sample, synthesize
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Trajectory
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer


def rows_of(weights: list[float], side: int) -> list[TrainingRow]:
    """A row, or a pair of rows if ``side`` is 2, for each weight."""
    made = []
    for unit, weight in enumerate(weights):
        for label in (1, -1)[:side]:
            ids = [5 + unit, 9, 11 + unit + label, 3]
            made.append(
                TrainingRow(
                    row_id=f"{unit}", unit=unit, label=label, input_ids=ids, mask=[False, True, True, True],
                    weights=[weight] * 4, ref_logprobs=[0.0, -2.0, -3.0, -1.0],
                )
            )  # fmt: skip
    return made


@pytest.mark.parametrize(("objective", "side"), [(SFT(), 1), (KTO(), 1), (DPO(nll=0.3), 2), (SimPO(), 2)], ids=str)
def test_a_row_of_weight_two_is_the_row_twice(objective: Any, side: int) -> None:
    matches = []
    once, twice = rows_of([2.0, 1.0], side), rows_of([1.0, 1.0], side)
    again = [row.model_copy(update={"unit": 7}) for row in twice if row.unit == 0]
    for rows in (once, [*twice, *again], twice):
        policy = small_policy()
        metrics = Trainer(policy, objective, OptimizerConfig(clip_norm=1e9), 1).gradients(TrainingRows.of(rows))
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
        matches.append((metrics["loss"], gradient))
    assert matches[0][0] == pytest.approx(matches[1][0], rel=1e-4)
    torch.testing.assert_close(matches[0][1], matches[1][1], atol=1e-5, rtol=1e-3)
    assert not torch.allclose(matches[0][1], matches[2][1], atol=1e-5, rtol=1e-3), "weights do nothing"


@pytest.fixture
def harness(tmp_path: Any) -> Harness:
    return Harness(tmp_path)


def weighted(harness: Harness, rows: Trajectories, weights: list[float]) -> Trajectories:
    return harness._context("weighted").select(rows.ids(), weights)


def test_each_stage_hands_the_weights_on(harness: Harness) -> None:
    tasks = harness.run(generate, {"env": "lookup", "train": 4, "dev": 1, "heldout": 1})["train"]
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    config: dict[str, Any] = {"steps": 1, "batch": 4}
    weights = [0.25, 0.5, 1.0, 2.0]
    warm = harness.run(
        sft, config | {"model": {"init": "tiny"}}, trajectories=[weighted(harness, expert, weights)]
    )  # fmt: skip
    assert of_rows(warm) == dict(zip(expert.ids(), weights, strict=True))
    model = warm["model"]
    limits = {"max_turn_tokens": 8, "max_tokens": 120}
    sampled = harness.run(sample, {"samples": 2, "sampling": limits}, model=model, tasks=tasks)["trajectories"]
    scored = [
        row.model_copy(update={"trajectory_id": f"{row.trajectory_id}x", "reward": float(n % 2), "success": n % 2 == 1})
        for n, row in enumerate(sampled.read())
    ]
    given = harness.trajectories(scored)
    weights = [0.5 + number // 2 / 4 for number in range(len(scored))]  # equal within a group
    chosen, plain = weighted(harness, given, weights), weighted(harness, given, [1.0] * len(scored))
    by_id = dict(zip(given.ids(), weights, strict=True))
    assert of_rows(harness.run(kto, config, trajectories=[chosen], model=model)) == by_id
    advantages = of_rows(harness.run(offline, config, trajectories=[plain], model=model))
    assert of_rows(harness.run(offline, config, trajectories=[chosen], model=model)) == pytest.approx(
        {name: advantage * by_id[name] for name, advantage in advantages.items()}, rel=1e-5
    )
    pairs = harness.run(agentq, {"kind": "trajectory"}, trajectories=[chosen])["pairs"]
    expected = {pair.pair_id: by_id[pair.chosen_id] * by_id[pair.rejected_id] for pair in pairs.read()}
    assert expected
    for stage in (dpo, preference):
        assert of_rows(harness.run(stage, config, pairs=[pairs], model=model)) == pytest.approx(expected)
        both = harness.run(stage, config, pairs=[pairs, pairs], model=model)["rows"].table()
        assert both.num_rows == 2 * 2 * len(expected)
        assert both["unit"].to_pylist() == [number for number in range(2 * len(expected)) for _ in (0, 1)]


def weights(selection: Trajectories) -> dict[str, float]:
    ids, of_rows = selection.selection().to_pydict().values()
    assert len(set(ids)) == len(ids), "each row once"
    return dict(zip(ids, of_rows, strict=True))


def test_stages_that_choose_rows_keep_their_weights(harness: Harness) -> None:
    tasks = harness.run(generate, {"env": "lookup", "train": 4, "dev": 1, "heldout": 1})["train"]
    given = harness.run(synthesize, tasks=tasks)["trajectories"]
    chosen = weighted(harness, given, [0.5, 1.5, 2.0, 0.25])
    solved = {"rules": [{"rule": "filter", "where": "success"}]}
    drawn = {"version": harness.buffer.version, "draw": {"n": 4}}
    for stage, config in ((curate, solved), (reject, {}), (select, drawn | solved), (select, drawn | {"rules": []})):
        made = harness.run(stage, config, trajectories=[chosen])["trajectories"]
        assert weights(made) == weights(chosen), stage.name
        made = harness.run(stage, config, trajectories=[given, chosen])["trajectories"]
        assert list(weights(made).values()).count(1.0) == 2, "a row of two selections has the larger weight"


def test_a_row_that_was_drawn_twice_is_chosen_once_and_counts_twice(harness: Harness) -> None:
    tasks = harness.run(generate, {"env": "lookup", "train": 2, "dev": 1, "heldout": 1})["train"]
    given = harness.run(synthesize, tasks=tasks)["trajectories"]
    [first, other] = given.ids()
    drawn = harness._context("drawn").select([first, other, first])
    for stage, config in ((curate, {"rules": []}), (reject, {}), (select, {"version": harness.buffer.version})):
        assert weights(harness.run(stage, config, trajectories=[drawn])["trajectories"]) == {first: 2.0, other: 1.0}
    rejected = harness.run(reject, {"agree": 2}, trajectories=[given, given])
    assert not rejected["trajectories"].ids(), "a row does not agree with itself"


def in_groups_of_four(harness: Harness, successes: list[int]) -> tuple[Model, Trajectories]:
    """A model, and four rollouts of it for each task, of which so many are successes."""
    tasks = harness.run(generate, {"env": "lookup", "train": len(successes), "dev": 1, "heldout": 1})["train"]
    [shown] = [harness.run(synthesize, tasks=tasks)["trajectories"]]
    warm = harness.run(sft, {"model": {"init": "tiny"}, "steps": 1, "batch": 2}, trajectories=[shown])["model"]
    limits = {"max_turn_tokens": 8, "max_tokens": 120}
    sampled = harness.run(sample, {"samples": 4, "sampling": limits}, model=warm, tasks=tasks)["trajectories"]
    solved = [n % 4 < successes[n // 4] for n in range(4 * len(successes))]
    return warm, harness.trajectories(
        row.model_copy(update={"trajectory_id": f"p-{n:02d}", "reward": float(won), "success": won})
        for n, (row, won) in enumerate(zip(sampled.read(), solved, strict=True))
    )


def test_a_row_of_two_selections_is_paired_once(harness: Harness) -> None:
    _, given = in_groups_of_four(harness, [2])
    solved = harness.run(reject, {"keep": 4}, trajectories=[given])["trajectories"]
    pairs = [
        harness.run(outcome, {"cut": None}, trajectories=selections)["pairs"].read()
        for selections in ([given], [given, solved])
    ]
    assert len(pairs[0]) == 2
    assert pairs[0] == pairs[1]


def test_another_question_under_the_same_id_is_another_task(harness: Harness) -> None:
    _, given = in_groups_of_four(harness, [2])
    rows = given.read()

    def under(name: str, rows: list[Trajectory], **changed: Any) -> Trajectories:
        ids = [f"{name}-{number}" for number in range(len(rows))]
        return harness.trajectories(
            row.model_copy(update={**changed, "trajectory_id": own, "episode_id": own})
            for row, own in zip(rows, ids, strict=True)
        )

    solved = under("solved", [row for row in rows if row.success])
    failed = under("failed", [row for row in rows if not row.success], prompt="another question")
    assert len(harness.run(outcome, trajectories=[given])["pairs"].read()) == 2
    assert not harness.run(outcome, trajectories=[solved, failed])["pairs"].read()
    won = under("won", rows[:1], prompt="another question", success=True, reward=1.0)
    assert len(harness.run(reject, trajectories=[solved, won])["trajectories"].ids()) == 2


def test_groups_that_are_drawn_by_priority_have_the_advantages_of_all_rows(harness: Harness) -> None:
    """A row that is drawn twice counts twice, and groups whose rewards spread less are drawn less, and weigh more."""
    warm, given = in_groups_of_four(harness, [1, 2, 3, 2])
    draw = {"strategy": "prioritized", "n": 4, "priority": "surprise", "alpha": 1.0, "beta": 1.0, "of": "groups"}
    config = {"version": harness.buffer.version, "draw": draw}
    plain = of_rows(harness.run(offline, {"steps": 1, "batch": 4}, trajectories=[given], model=warm))
    chosen = harness.run(select, config, trajectories=[given])["trajectories"]
    ids = chosen.ids()
    times = [ids.count(f"p-{4 * group:02d}") for group in range(4)]
    assert [ids.count(name) for name in given.ids()] == [times[n // 4] for n in range(16)], "groups are whole"
    assert sum(times) == 4
    assert max(times) > 1, "with replacement"
    # |reward - mean| is 3/8 on average with one success or three, and 1/2 with two
    weigh = [1.0 if group in (0, 2) else 3 / 4 for group in range(4)]
    weigh = [weight / max(w for w, drawn in zip(weigh, times, strict=True) if drawn) for weight in weigh]
    result = of_rows(harness.run(offline, {"steps": 1, "batch": 4}, trajectories=[chosen], model=warm))
    expected = {name: value * times[int(name[2:]) // 4] * weigh[int(name[2:]) // 4] for name, value in plain.items()}
    assert result == pytest.approx({name: value for name, value in expected.items() if value}, rel=1e-4)


def test_rows_of_one_group_that_have_several_weights_are_not_compared(harness: Harness) -> None:
    warm, given = in_groups_of_four(harness, [1])
    torn = weighted(harness, given, [1.0, 1.0, 0.5, 0.5])
    with pytest.raises(ValueError, match=r"have the weights 1 and 0.5, .* draw whole groups .*of: groups"):
        harness.run(offline, {"steps": 1, "batch": 4}, trajectories=[torn], model=warm)
    twice = weighted(harness, harness._context("some").select([given.ids()[0], *given.ids()]), [1.0] * 5)
    with pytest.raises(ValueError, match="have the weights 2 and 1"):
        harness.run(offline, {"steps": 1, "batch": 4}, trajectories=[twice], model=warm)


@pytest.mark.slow
def test_rows_that_are_drawn_by_priority_are_trained_on_with_their_importance_weights(harness: Harness) -> None:
    """Of three successes and nine failures in groups of four, drawn by surprise with replacement."""
    warm, given = in_groups_of_four(harness, [1, 1, 1])
    draw = {"strategy": "prioritized", "n": 12, "priority": "surprise", "alpha": 1.0, "beta": 1.0}
    config = {"version": harness.buffer.version, "draw": draw}
    chosen = harness.run(select, config, trajectories=[given])["trajectories"]
    ids = chosen.ids()
    drawn = {name: ids.count(name) for name in set(ids)}
    assert len(ids) == 12 > len(drawn), "with replacement"
    # P is 3/4 : 1/4, so a success weighs a third of a failure, and both kinds count as often as they occur
    expected = {name: 1 / 3 if int(name[-2:]) % 4 == 0 else 1.0 for name in drawn}
    made = harness.run(sft, {"steps": 1, "batch": 4}, trajectories=[chosen], model=warm)
    assert of_rows(made) == pytest.approx(expected, rel=1e-4)
    assert made.metrics["rows"] == 12


def test_settings_of_a_strategy_are_refused_with_another_one() -> None:
    with pytest.raises(ValidationError, match="beta does nothing with strategy: uniform; it is for prioritized"):
        select.config.model_validate({"version": 1, "draw": {"n": 3, "beta": 1.0}})


def of_rows(result: Any) -> dict[str, float]:
    """Weight of the last token of each row that was trained on."""
    return {row["row_id"]: row["weights"][-1] for row in result["rows"].table().to_pylist()}
