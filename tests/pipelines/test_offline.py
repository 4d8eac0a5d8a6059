"""Which stored rollouts train.offline and KTO take, and which of them are compared with each other."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.policy_gradient import (
    KL,
    AdvantageEstimator,
    Advantages,
    Experience,
    OffPolicy,
    PolicyGradient,
)
from agentrl.algorithms.rloo import RLOO
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy
from agentrl.online.credit import Extras, assign
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.parts.selected import Selected
from agentrl.pipelines.stages import token_credit, train
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.token_credit import TokenCredit
from agentrl.pipelines.stages.train import kto, offline, sft
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Message, Role
from agentrl.training.batch import TrainingError
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs

CONFIG: dict[str, Any] = {"steps": 1, "batch": 4}
LIMITS = {"max_turn_tokens": 8, "max_tokens": 120}
TWO_OF_EACH = {"samples": 2, "sampling": LIMITS}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("offline"))


@pytest.fixture(scope="module")
def tasks(harness: Harness) -> Tasks:
    return harness.run(generate, {"env": "lookup", "train": 2, "dev": 1, "heldout": 1})["train"]


@pytest.fixture(scope="module")
def model(harness: Harness, tasks: Tasks) -> Model:
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    return harness.run(sft, CONFIG | {"model": {"init": "tiny"}}, trajectories=[expert])["model"]


@pytest.fixture(scope="module")
def sampled(harness: Harness, tasks: Tasks, model: Model) -> Callable[[str], Trajectories]:
    """Rows that the policy samples with a config, as JSON; each config samples once."""
    return cache(lambda config: harness.run(sample, json.loads(config), model=model, tasks=tasks)["trajectories"])


@pytest.fixture(scope="module")
def of_others(harness: Harness, tasks: Tasks, model: Model) -> Trajectories:
    """Rows of other weights than those that are trained, so that ratios are not 1."""
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    other = harness.run(sft, CONFIG | {"optimizer": {"lr": 0.01}}, trajectories=[expert], model=model)
    return harness.run(sample, TWO_OF_EACH | {"samples": 4}, model=other["model"], tasks=tasks)["trajectories"]


def scored(harness: Harness, given: Trajectories, rewards: list[float], **changes: Any) -> Trajectories:
    """Copies of rows with these rewards."""
    rows = [
        row.model_copy(
            update={"trajectory_id": f"{row.trajectory_id}-{harness._count}", "reward": reward, "success": reward > 0}
        )
        for row, reward in zip(given.read(), rewards, strict=True)
    ]
    return harness.trajectories([row.model_copy(update=changes) for row in rows])


@pytest.mark.parametrize("credit", ["whole", "fork_turn"])
def test_groups_of_equal_rewards_are_named_if_they_are_all(
    harness: Harness, tasks: Tasks, model: Model, credit: str
) -> None:
    made = harness.run(sample, TWO_OF_EACH, model=model, tasks=tasks)["trajectories"]
    config = CONFIG | {"algorithm": {"type": "rloo", "credit": credit}}
    with pytest.raises(ValueError, match="4 of 4 rows are in groups whose rewards are all equal"):
        harness.run(offline, config, trajectories=[scored(harness, made, [1, 1, 0, 0])], model=model)
    with pytest.raises(ValueError, match="the inputs hold no rows"):
        harness.run(offline, config, trajectories=[harness.trajectories([])], model=model)


@pytest.mark.parametrize("stage", [offline, kto], ids=lambda stage: stage.name)
@pytest.mark.parametrize("shift", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
def test_rows_that_are_no_samples_of_the_policy_are_refused(
    harness: Harness, sampled: Callable[[str], Trajectories], model: Model, stage: Any, shift: dict[str, float]
) -> None:
    plain, other = (
        scored(harness, sampled(json.dumps(config)), [0.0, 1.0, 1.0, 0.0])
        for config in (TWO_OF_EACH, {"samples": 2, "sampling": {**LIMITS, **shift}})
    )
    with pytest.raises(ValueError, match=rf"4 of 8 rows were not sampled at temperature 1 .*{other.ids()[0]}"):
        harness.run(stage, CONFIG, trajectories=[plain, other], model=model)
    with pytest.warns(UserWarning, match="4 of 8 rows .* are left out"):
        left = harness.run(
            stage, CONFIG | {"other_temperatures": "leave_out"}, trajectories=[plain, other], model=model
        )
    assert left.metrics["rows"] == 4
    kept = harness.run(stage, CONFIG | {"other_temperatures": "keep"}, trajectories=[plain, other], model=model)
    assert kept.metrics["rows"] == 8


def test_rows_with_turns_that_were_sampled_again_are_refused(harness: Harness, tasks: Tasks, model: Model) -> None:
    """Their log-probs are not the probabilities of their tokens. With off_policy they are taken."""
    config = {**TWO_OF_EACH, "explore": {"resample": {"eta": 99.0, "tries": 1}}}
    done = harness.run(sample, config, model=model, tasks=tasks)
    rows = scored(harness, done["trajectories"], [1.0, 0.0, 1.0, 0.0], tags=["resampled:1", "resampled_tokens:9"])
    with pytest.raises(ValueError, match=r"4 of 4 rows are tagged 'resampled'.* set algorithm\.off_policy"):
        harness.run(offline, CONFIG, trajectories=[rows], model=model)
    off_policy = {"algorithm": {"type": "grpo", "off_policy": {"truncate": 2.0}}}
    assert harness.run(offline, CONFIG | off_policy, trajectories=[rows], model=model).metrics["rows"] == 4


@pytest.mark.parametrize("named", [True, False], ids=["ticket", "task"])
def test_rollouts_are_compared_with_those_of_their_own_policy_and_ticket(
    harness: Harness, tasks: Tasks, model: Model, named: bool
) -> None:
    """One policy solves everything and another nothing: among its own, no rollout is better than the others."""
    made = [harness.run(sample, TWO_OF_EACH, model=model, tasks=tasks)["trajectories"] for _ in range(2)]
    changes = [{} if named else {"group_id": None, "policy": policy} for policy in ("one", "other")]
    given = [
        scored(harness, rows, [reward] * 4, **change)
        for rows, reward, change in zip(made, (1.0, 0.0), changes, strict=True)
    ]
    config = CONFIG | {"algorithm": {"type": "rloo", "entropy": 0.1}}
    rows = harness.run(offline, config, trajectories=given, model=model)["rows"].table()
    assert len(rows) == 8
    assert {weight for row in rows["weights"].to_pylist() for weight in row} == {0.0}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "grpo"},
        {"type": "dapo", "resample": 0, "overlong": {"limit": 60, "buffer": 50}, "degenerate": "drop"},
        {"type": "rloo", "entropy": 0.1, "per_level": True},
        {"type": "dr_grpo", "kl": {"coef": 0.1}, "aggregate": "constant"},
        {"type": "starpo_s", "keep_uncertain": 0.5},
        {"type": "reinforce++", "aggregate": "token"},
    ],
    ids=lambda algorithm: algorithm["type"],
)
def test_rows_are_credited_in_columns_as_by_their_tokens(
    harness: Harness,
    sampled: Callable[[str], Trajectories],
    model: Model,
    algorithm: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No rollout is read whole, and the rows are those of the way that looks at every token."""
    made, more = (sampled(json.dumps(TWO_OF_EACH | {"samples": number})) for number in (2, 3))
    given = [scored(harness, made, [0.0, 1.0, 1.0, 1.0]), scored(harness, more, [0.2, 0.7, 0.1, 0.5, 0.5, 0.5])]
    config = CONFIG | {"algorithm": algorithm}

    def whole(self: Selected) -> None:
        raise AssertionError("rollouts are read whole")

    with monkeypatch.context() as patch:
        patch.setattr(Selected, "trajectories", whole)
        columns = harness.run(offline, config, trajectories=given, model=model)
    monkeypatch.setattr(PolicyGradient, "credits_whole_rows", False)
    tokens = harness.run(offline, config, trajectories=given, model=model)
    assert columns.metrics["degenerate_rows"] == tokens.metrics["degenerate_rows"]
    ours, theirs = (sorted(item["rows"].table().to_pylist(), key=lambda row: row["unit"]) for item in (columns, tokens))
    assert [len(row["input_ids"]) for row in ours]
    for row, other in zip(ours, theirs, strict=True):
        for name in ("weights", "logprobs", "ref_logprobs"):
            assert row.pop(name) == pytest.approx(other.pop(name), rel=1e-6, abs=1e-6, nan_ok=True)
        assert row == other


class Surprise(AdvantageEstimator):
    """Looks at tokens, at log-probs, at penalties and at other rollouts."""

    def advantages(self, step: Experience) -> Advantages:
        assert step.proximal is not None
        mean = np.mean(step.returns())
        tokens = []
        for row, current, taken, reward in zip(step.rollouts, step.proximal, step.penalties, step.rewards, strict=True):
            gap = np.nan_to_num(np.asarray(current) - np.array(row.logprobs))
            tokens.append((reward - mean) * np.exp(-gap) - np.asarray(taken) + 0.001 * np.array(row.input_ids))
        return Advantages(tokens)


class Forgetful(AdvantageEstimator):
    def advantages(self, step: Experience) -> Advantages:
        return Advantages([[0.0] for _ in step.rollouts])


def at_once(
    chosen: Selected, algorithm: PolicyGradient, policy: Policy, micro_tokens: int, folder: Path, *_: Any
) -> TokenCredit:
    """What ``credited_by_token`` gives, by the way that online training goes: all rollouts are in memory."""
    both = zip(chosen.trajectories(), chosen.weights.tolist(), strict=True)
    weighted = [(row, weight) for row, weight in both if any(row.action_mask)]
    made = [row for row, _ in weighted]
    plain = [
        TrainingRow(
            row_id=row.trajectory_id, input_ids=row.input_ids, mask=row.action_mask, weights=[0.0] * row.n_tokens
        )
        for row in made
    ]
    version = max(row.policy_version for row in made)
    current = [logprob.tolist() for logprob in batch_logprobs(policy, TrainingRows.of(plain), micro_tokens)]
    extras = Extras(reference=current if algorithm.kl else None, proximal=current, version=version)
    credit = assign(algorithm, made, extras)
    rows = [
        row.model_copy(update={"weights": [weighted[row.unit][1] * token for token in row.weights]})
        for row in credit.rows
    ]
    return TokenCredit(credit.metrics, credit.lr_scale, iter(TrainingRows.of(rows).batches))


SURPRISE = {"type": f"{__name__}:Surprise"}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "grpo", "credit": "first_divergence"},
        {"type": "grpo", "advantage": SURPRISE},
        {"type": "rloo", "advantage": SURPRISE, "kl": {"coef": 0.1, "where": "reward"}, "degenerate": "drop"},
        {"type": "grpo", "advantage": SURPRISE, "off_policy": {"truncate": 2.0}, "credit": "first_divergence"},
        {"type": "dr_grpo", "credit": "subgoal", "kl": {"coef": 0.1}},
        {"type": "rloo", "off_policy": {"truncate": 2.0, "band": [0.9, 1.1]}},
        {"type": "reinforce++", "kl": {"coef": 0.1, "where": "reward"}, "degenerate": "drop"},
        {"type": "grpo", "off_policy": {"truncate_sequence": 1.5, "max_staleness": 0, "min_ess": 0.99}, "entropy": 0.1},
    ],
    ids=str,
)
def test_rows_are_credited_in_parts_as_at_once(
    harness: Harness, of_others: Trajectories, model: Model, algorithm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [scored(harness, of_others, [0.0, 1.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.2])]
    config = CONFIG | {"algorithm": algorithm}
    monkeypatch.setattr(token_credit, "PART_TOKENS", 200)
    parts = harness.run(offline, config, trajectories=given, model=model)
    with monkeypatch.context() as patch:
        patch.setattr(train, "credited_by_token", at_once)
        whole = harness.run(offline, config, trajectories=given, model=model)
    for name in ("degenerate_rows", "ess", "lr_scale", "staleness", "max_staleness", "mean_importance", "masked_share"):
        assert parts.metrics.get(name, 0) == pytest.approx(whole.metrics.get(name, 0), rel=1e-5), name
    ours, theirs = (sorted(item["rows"].table().to_pylist(), key=lambda row: row["unit"]) for item in (parts, whole))
    assert ours
    for row, expected in zip(ours, theirs, strict=True):
        for name in ("weights", "logprobs", "ref_logprobs"):
            assert row.pop(name) == pytest.approx(expected.pop(name), rel=1e-5, abs=1e-5, nan_ok=True), name
        assert row == expected


GAMES = {"shared": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], "own": [1.0, 0.0, 0.5, 0.5, 0.0, 0.5, 0.5, 1.0]}


@pytest.mark.parametrize(
    ("credit", "rewards", "message"),
    [
        ("whole", "shared", ""),
        ("joint", "shared", ""),
        ("agent", "own", ""),
        ("whole", "own", "several rewards in one group, 1.0 and 0.0"),
        ("joint", "own", "several rewards in one group, 1.0 and 0.0"),
    ],
)
def test_agents_of_an_episode_count_alike_stored_and_online(
    harness: Harness, tasks: Tasks, model: Model, credit: str, rewards: str, message: str
) -> None:
    made = harness.run(sample, {"samples": 4, "sampling": LIMITS}, model=model, tasks=tasks)["trajectories"]
    rows = [
        row.model_copy(
            update={"episode_id": f"game-{position // 2}", "segment": position % 2, "agent": f"a{position % 2}"}
        )
        for position, row in enumerate(scored(harness, made, GAMES[rewards]).read())
    ]
    named = [{"trajectory_id": f"{harness._count}-{position}", "group_id": "games"} for position in range(len(rows))]
    rows = [row.model_copy(update=new) for row, new in zip(rows, named, strict=True)]
    algorithm = {"type": "rloo", "credit": credit}
    config, given = CONFIG | {"algorithm": algorithm}, [harness.trajectories(rows)]
    if message:
        with pytest.raises(ValueError, match=message):
            assign(RLOO(credit=credit), rows)
        with pytest.raises(ValueError, match=message):
            harness.run(offline, config, trajectories=given, model=model)
        return
    stored = harness.run(offline, config, trajectories=given, model=model)["rows"].table().to_pylist()
    online = {row.row_id: row for row in assign(RLOO(credit=credit), rows).rows}
    assert online
    assert {row["row_id"]: row["unit"] for row in stored} == {name: row.unit for name, row in online.items()}
    for row in stored:
        assert row["weights"] == pytest.approx(online[row["row_id"]].weights)


def test_advantages_that_miss_a_token_are_refused(harness: Harness, tasks: Tasks, model: Model) -> None:
    rows = harness.run(sample, TWO_OF_EACH, model=model, tasks=tasks)["trajectories"]
    config = CONFIG | {"algorithm": {"type": "grpo", "advantage": {"type": f"{__name__}:Forgetful"}}}
    with pytest.raises(TrainingError, match=rf"Forgetful gave 1 advantages for the \d+ tokens of {rows.ids()[0]};"):
        harness.run(offline, config, trajectories=[rows], model=model)


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"credit": "first_divergence"}, {"advantage": SURPRISE}], ids=["credit", "own"])
def test_credit_by_token_holds_no_more_than_a_part(
    harness: Harness, tasks: Tasks, model: Model, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]
) -> None:
    monkeypatch.setattr(token_credit, "PART_TOKENS", 4_000)
    monkeypatch.setattr(token_credit, "TEXT_ROWS", 4)
    row = harness.run(sample, TWO_OF_EACH, model=model, tasks=tasks)["trajectories"].read()[0]
    ids = [1, 2] * 1_000
    changes = {"messages": [], "spans": [], "input_ids": ids, "action_mask": [False, True] * 1_000}
    changes |= {"logprobs": [float("nan"), -1.0] * 1_000, "n_tokens": len(ids), "n_action_tokens": 1_000}

    def peak(groups: int) -> int:
        rows = [
            row.model_copy(
                update={
                    **changes,
                    "trajectory_id": f"long-{next(iter(own))}-{groups}-{n}",
                    "group_id": str(n // 2),
                    "reward": float(n % 2),
                    "success": n % 2 == 1,
                }
            )
            for n in range(2 * groups)
        ]
        given = harness.trajectories(rows)
        config = CONFIG | {"algorithm": {"type": "grpo", **own}}
        tracemalloc.start()
        try:
            assert harness.run(offline, config, trajectories=[given], model=model).metrics["rows"] == len(rows)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(8)
    assert peak(64) < peak(16) + 4_000_000  # 192,000 more tokens, at 200 bytes in Python, are 38 MB


def test_an_algorithm_of_ones_own_may_look_at_tokens() -> None:
    class Own(GRPO):
        def advantages(self, step: Experience) -> Advantages:
            return super().advantages(step)

    assert GRPO().credits_whole_rows
    assert GRPO(credit="first_divergence").credits_returns
    assert not Own().credits_returns
    assert not Own().credits_whole_rows
    assert not GRPO(kl=KL(where="reward")).credits_whole_rows
    assert not GRPO(credit="first_divergence").credits_whole_rows
    assert not GRPO(off_policy=OffPolicy()).credits_whole_rows


def test_the_tokenizer_of_a_fresh_model_is_trained_on_a_stream() -> None:
    held: list[int] = []

    def conversations() -> Iterator[list[Message]]:
        for number in range(200):
            held.append(tracemalloc.get_traced_memory()[0])
            yield [Message(role=Role.USER, content=f"{number} " * 2_000)]

    tracemalloc.start()
    try:
        tiny_policy(conversations(), seed=0)
    finally:
        tracemalloc.stop()
    assert max(held) - held[0] < 300_000  # all of it would be 1.6 MB
