"""Pairs and credit by what turns are worth."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from forked import LIMITS, TRAIN, by_id, harness, model, rollouts, tabular, tasks
from pydantic import ValidationError

from agentrl.advantages.turns import turn_spans
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.agentq.pairs import agentq
from agentrl.pipelines.methods.eto.outcome import outcome
from agentrl.pipelines.methods.fork.fork import fork
from agentrl.pipelines.methods.slicing.steps import value
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.pipelines.stages.train import offline, sft
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.trajectory import Role

__all__ = ["harness", "model", "rollouts", "tabular", "tasks"]


@pytest.mark.slow
def test_pairs_by_value_prefer_the_better_step(harness: Harness, model: Model, tasks: Tasks) -> None:
    rows = harness.run(sample, {"samples": 6, **LIMITS}, model=model, tasks=tasks)["trajectories"]
    plain = harness.run(agentq, trajectories=[rows])["pairs"]
    steps = harness.run(value, {"where": "all", "k": 8, **LIMITS}, trajectories=[rows], model=model)["steps"]
    pairs = harness.run(agentq, {"margin": 0.25}, trajectories=[rows], values=[steps])["pairs"].read()
    worth = {(step.trajectory_id, step.token_end): step for step in steps.read()}
    assert pairs
    assert [pair.pair_id for pair in pairs] != [pair.pair_id for pair in plain.read()]
    for pair in pairs:
        better = worth[pair.chosen_id, len(pair.chosen_ids)]
        worse = worth[pair.rejected_id, len(pair.rejected_ids)]
        assert pair.chosen_reward - pair.rejected_reward >= 0.25
        assert better.low > worse.high
        assert better.q > worse.q
    with pytest.raises(ValueError, match=r"inputs.values are those of steps; set kind: step"):
        harness.run(agentq, {"kind": "trajectory"}, trajectories=[rows], values=[steps])


def test_continuations_make_step_pairs_at_their_fork(harness: Harness, model: Model, rollouts: Trajectories) -> None:
    """Pairs from a few forks: the loss covers a turn that was sampled in the row itself."""
    forked = harness.run(fork, {"at": "failed", "k": 4, **LIMITS}, trajectories=[rollouts], model=model)["trajectories"]
    rows, pairs = by_id(forked), harness.run(agentq, trajectories=[forked])["pairs"].read()
    assert pairs
    for pair in pairs:
        for side in ("chosen", "rejected"):
            row, mask = rows[getattr(pair, f"{side}_id")], getattr(pair, f"{side}_mask")
            assert any(mask)
            assert mask.index(True) >= row.fork_at


def test_outcome_pairs_cut_failures_to_the_length_of_the_success(
    harness: Harness, model: Model, tasks: Tasks, rollouts: Trajectories
) -> None:
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    with pytest.raises(ValueError, match=r"is text; wire inputs\.model"):
        harness.run(outcome, trajectories=[expert, rollouts])
    done = harness.run(outcome, {"cut": 1, "per_task": 2}, trajectories=[expert, rollouts], model=model)
    pairs, rows = done["pairs"].read(), by_id(expert, rollouts)
    assert pairs
    assert len(pairs) == done.metrics["pairs"]
    cut = 0
    for pair in pairs:
        success, failure = rows[pair.chosen_id], rows[pair.rejected_id]
        assert (success.success, failure.success, pair.method) == (True, False, "eto")
        spans = turn_spans(failure.messages, failure.action_mask)
        most = sum(message.role is Role.ASSISTANT for message in success.messages) + 1
        assert sum(end <= len(pair.rejected_ids) for _, end in spans) == min(most, len(spans))
        assert pair.rejected_ids == failure.input_ids[: len(pair.rejected_ids)]
        cut += len(pair.rejected_ids) < failure.n_tokens
    assert cut


def test_values_of_several_provers_or_of_a_stranger_make_no_pairs(
    harness: Harness, model: Model, rollouts: Trajectories
) -> None:
    ids = rollouts.ids()
    told = {"token_start": 0, "token_end": 1, "v": 0.5, "n": 4, "low": 0.0, "high": 1.0, "by": "continuation"}

    def steps(*provers: str) -> Any:
        of = zip(ids, provers, strict=False)
        return harness.steps([StepValue(trajectory_id=item, turn=0, q=0.5, policy=by, **told) for item, by in of])

    own = rollouts.read()[0].policy
    assert harness.run(agentq, trajectories=[rollouts], values=[steps(own, own)]).metrics["pairs"] == 0
    with pytest.raises(ValueError, match=r"of 2 provers \(.*star.*\): what one can make .* wire the values of one"):
        harness.run(agentq, trajectories=[rollouts], values=[steps(own, "star/12345678")])
    stranger: dict[str, Any] = {"trajectories": [rollouts], "values": [steps("star/12345678")]}
    with pytest.raises(ValueError, match=r"those of star/12345678, which sampled none .*set other_prover: true"):
        harness.run(agentq, **stranger)
    harness.run(agentq, {"other_prover": True}, **stranger)


def test_credit_by_values(harness: Harness, model: Model, rollouts: Trajectories, monkeypatch: Any) -> None:
    """The weights of the tokens are what the turns added, and whole-row advantages in rows without values."""
    from agentrl.pipelines.stages import train

    steps = harness.run(value, {"where": "failed", "k": 4, **LIMITS}, trajectories=[rollouts], model=model)["steps"]
    seen: dict[str, np.ndarray] = {}

    def spy(made: Any) -> Any:
        def credited(*arguments: Any) -> Any:
            result = made(*arguments)
            return result._replace(batches=_noted(result.batches, seen))

        return credited

    monkeypatch.setattr(train, "credited_by_token", spy(train.credited_by_token))
    config = {**TRAIN, "algorithm": {"type": "grpo", "credit": "values"}}
    harness.run(offline, config, trajectories=[rollouts], model=model, steps=[steps])
    worth: dict[str, list[StepValue]] = {}
    for step in steps.read():
        worth.setdefault(step.trajectory_id, []).append(step)
    scales = set()
    for name, of in worth.items():
        added = np.zeros(len(by_id(rollouts)[name].input_ids))
        for step in of:
            added[step.token_start : step.token_end] = step.progress
        if name in seen:
            scales |= {round(float(entry), 4) for entry in seen[name][added != 0] / added[added != 0]}
            assert not seen[name][added == 0].any()
        else:
            assert not added.any()
    assert len(scales) == 1, "one factor, of the rows that do not teach"
    with pytest.raises(ValueError, match=r"needs inputs\.steps"):
        harness.run(offline, config, trajectories=[rollouts], model=model)
    with pytest.raises(ValueError, match="credit is not values"):
        harness.run(offline, TRAIN, trajectories=[rollouts], model=model, steps=[steps])
    with pytest.raises(ValidationError, match="is for stored rows"):
        OnlineConfig.model_validate({"algorithm": {"type": "grpo", "credit": "values"}})


def _noted(batches: Any, seen: dict[str, np.ndarray]) -> Iterator[Any]:
    for batch in batches:
        for row in batch.to_pylist():
            seen[row["row_id"]] = np.array(row["weights"])
        yield batch


@pytest.mark.slow
def test_values_of_another_prover_are_refused_unless_said(
    harness: Harness, model: Model, rollouts: Trajectories
) -> None:
    steps = harness.run(value, {"where": "failed", "k": 2, **LIMITS}, trajectories=[rollouts], model=model)["steps"]
    other = harness.steps([step.model_copy(update={"policy": "star/12345678"}) for step in steps.read()])
    config = {**TRAIN, "algorithm": {"type": "grpo", "credit": "values"}}
    wired: dict[str, Any] = {"trajectories": [rollouts], "model": model, "steps": [other]}
    with pytest.raises(ValueError, match=r"are those of star/12345678, and .* sampled it.*set other_prover: true"):
        harness.run(offline, config, **wired)
    harness.run(offline, {**config, "other_prover": True}, **wired)
    harness.run(sft, {**TRAIN, "credit": "values", "other_prover": True}, **wired)
    elsewhere = harness.steps([steps.read()[0].model_copy(update={"trajectory_id": "elsewhere"})])
    with pytest.raises(ValueError, match="value no turn of the rows"):
        harness.run(offline, config, **{**wired, "steps": [elsewhere]})
