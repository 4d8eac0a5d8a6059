"""Stages that train a policy on stored data."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from agentrl.algorithms import PairAlgorithm, PolicyGradientAlgorithm
from agentrl.algorithms.base import Objective
from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.kto import KTO
from agentrl.algorithms.preference import Preference
from agentrl.algorithms.sft import SFT
from agentrl.rollouts.negatives import SOURCE as NEGATIVE
from agentrl.training.job import DeepSpeed
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.trackers import Tracker
from agentrl.training.weights import row_weights, template_weights
from pipelines.handles import Model, Pairs, Scores, Table, Trajectories
from pipelines.stage import Context, StageConfig, stage
from pipelines.stages.common import ModelConfig, load_policy, record_dialect, start_policy
from pipelines.stages.scores import ByScorer, under
from pipelines.stages.selected import OtherTemperatures, Selected, check_tokenizer
from pipelines.stages.token_credit import TokenCredit, credited_by_token
from pipelines.stages.training_rows import OUTCOME, acting, as_batch, credited, decode, trained_on
from schemas.training import TRAINING_SCHEMA, TrainingRow
from schemas.trajectory import UnscoredError

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.training.rows import TrainingRows


class Trained(NamedTuple):
    model: Model
    rows: Table
    metrics: Table


class TrainConfig(StageConfig):
    steps: int = Field(100, ge=1, description="optimiser steps")
    batch: int = Field(32, ge=1, description="sequences, or pairs, in one optimiser step")
    optimizer: OptimizerConfig = OptimizerConfig()
    deepspeed: DeepSpeed | None = Field(None, description="spread over processes; None trains in this one")
    track: list[Tracker] = Field([], description="also send metrics to these, if they are installed")


class SFTConfig(TrainConfig, ByScorer):
    model: ModelConfig | None = Field(None, description="what to start from if no model is wired to the input")
    template_weight: float = Field(
        1.0, ge=0, le=1, description="weight of the tokens that all tool calls have in common: braces, quotes, keys"
    )
    weighting: Literal["none", "reward", "advantage"] = Field(
        "none", description="what a trajectory counts, times its weight in the selection"
    )
    negatives: float = Field(
        0.0, ge=0, le=1, description="factor of negative weights, which make a row less likely; 0 leaves it out"
    )


@stage("train.sft", version=2)
def sft(
    context: Context,
    config: SFTConfig,
    trajectories: list[Trajectories],
    model: Model | None = None,
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
) -> Trained:
    """Supervised fine-tuning on the action tokens of trajectories, each counting by its weight in the selection."""
    chosen = Selected(under(trajectories, scores, config.scorer))
    policy = start_policy(model, config.model, chosen.conversations(), context.seed)
    record_dialect(context, policy)
    if pc.any(pc.equal(chosen.scalars["source"], NEGATIVE)).as_py() and not policy.codec.shows_tools():
        raise ValueError(
            "negative examples differ by the tools on offer, which this model's chat template does not show: "
            "use a template that renders tools, or leave the negatives out"
        )
    factors = row_weights(chosen.scalars, config.weighting)
    totals = chosen.weights * factors * np.where(factors < 0, config.negatives, 1.0)
    weigh = None
    if config.template_weight < 1:
        weigh = partial(template_weights, decode=partial(decode, policy), template=config.template_weight)
    batches = (
        trained_on(part, totals[part.positions], weigh=weigh) for part in chosen.tokens(policy, np.flatnonzero(totals))
    )
    return _fit(context, config, policy, SFT(), map(acting, batches))


class DPOConfig(TrainConfig):
    beta: float = Field(0.1, gt=0, description="strength of the pull towards the reference policy")
    nll: float = Field(0.0, ge=0, description="weight of the chosen side's negative log-likelihood; 0 is plain DPO")
    length_normalized: bool = Field(False, description="divide each side's log-ratio by its trained tokens")


@stage("train.dpo", version=2)
def dpo(context: Context, config: DPOConfig, pairs: Pairs, model: Model) -> Trained:
    """Direct preference optimisation from ``model``, which is the reference too: its log-probabilities are computed
    once."""
    objective = DPO(beta=config.beta, nll=config.nll, length_normalized=config.length_normalized)
    return _prefer(context, config, objective, pairs, model)


class PreferenceConfig(TrainConfig):
    objective: PairAlgorithm = Field(DPO(), description="the loss of a pair: dpo, ipo or simpo, and its settings")


@stage("train.preference", version=1)
def preference(context: Context, config: PreferenceConfig, pairs: Pairs, model: Model) -> Trained:
    """Training on preference pairs from ``model``, which is the reference too if the loss needs one."""
    return _prefer(context, config, config.objective, pairs, model)


def _prefer(context: Context, config: TrainConfig, objective: Preference, pairs: Pairs, model: Model) -> Trained:
    from agentrl.training.scoring import reference_logprobs

    policy = load_policy(model).prepare(config.optimizer.precision)
    batches = _pair_batches(pairs, policy)
    if objective.reference:
        batches = (reference_logprobs(policy, batch, config.optimizer.micro_tokens) for batch in batches)
    return _fit(context, config, policy, objective, batches)


PAIRS_AT_ONCE = 2048


def _pair_batches(pairs: Pairs, policy: "Policy") -> Iterator[pa.RecordBatch]:
    """Pairs as training rows: for each one the chosen side, then the rejected one."""
    from agentrl.training.rows import flat, nested

    first = 0
    with pq.ParquetFile(pairs.path) as file:
        for batch in file.iter_batches(PAIRS_AT_ONCE):
            for name, tokenizer in zip(
                *(batch.column(one).to_pylist() for one in ("pair_id", "tokenizer")), strict=True
            ):
                check_tokenizer(name, tokenizer, policy)
            size = batch.num_rows
            sides = pa.array(np.stack([np.arange(size), size + np.arange(size)], -1).ravel())
            ids, mask = (
                pa.concat_arrays([batch.column(f"{side}_{of}") for side in ("chosen", "rejected")]).take(sides)
                for of in ("ids", "mask")
            )
            pair = np.repeat(np.arange(size), 2)
            offsets, _ = flat(ids)
            weight = batch.column("weight").to_numpy()
            weights = nested(offsets, np.repeat(np.repeat(weight, 2), np.diff(offsets)), "weights")
            labels = np.tile([1, -1], size)
            yield as_batch(batch.column("pair_id").take(pa.array(pair)), first + pair, labels, ids, mask, weights)
            first += size


class KTOConfig(TrainConfig, ByScorer):
    objective: KTO = KTO()
    other_temperatures: OtherTemperatures = "refuse"


@stage("train.kto", version=1)
def kto(
    context: Context,
    config: KTOConfig,
    trajectories: list[Trajectories],
    model: Model,
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
) -> Trained:
    """Training on unpaired trajectories, successes against failures, from ``model``, which is the reference too."""
    from agentrl.training.scoring import reference_logprobs

    policy = load_policy(model).prepare(config.optimizer.precision)
    chosen = Selected(under(trajectories, scores, config.scorer)).at_temperature_1(config.other_temperatures)
    success = chosen.scalars["success"]
    if success.null_count:
        raise UnscoredError("success", chosen.scalars.filter(pc.is_null(success))["trajectory_id"].to_pylist())
    labels = np.where(success.to_numpy(), 1, -1)
    batches = (
        trained_on(part, chosen.weights[part.positions], labels[part.positions]) for part in chosen.tokens(policy)
    )
    scored = (reference_logprobs(policy, batch, config.optimizer.micro_tokens) for batch in batches)
    return _fit(context, config, policy, config.objective, scored)


class OfflineConfig(TrainConfig, ByScorer):
    algorithm: PolicyGradientAlgorithm = Field(
        GRPO(), description="how stored rollouts become a loss; those with a critic are online"
    )
    other_temperatures: OtherTemperatures = "refuse"

    @model_validator(mode="after")
    def _needs_stored_rollouts_alone(self) -> "OfflineConfig":
        if self.algorithm.needs_critic or self.algorithm.needs_greedy or self.algorithm.resample:
            raise ValueError(
                f"algorithm {self.algorithm.type} needs new rollouts (a critic, greedy ones or resampling); "
                "use the stage train.online, or resample: 0"
            )
        return self


@stage("train.offline", version=1)
def offline(
    context: Context,
    config: OfflineConfig,
    trajectories: list[Trajectories],
    model: Model,
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
) -> Trained:
    """Policy gradient on rollouts that the buffer holds, with ``model`` as the proximal policy and the reference.

    Groups are the rollouts of one ticket; rows that name none are grouped by task and by the policy that sampled them.
    ``algorithm.off_policy`` corrects for rollouts of other policies.
    """
    policy = load_policy(model).prepare(config.optimizer.precision)
    given = under(trajectories, scores, config.scorer)
    chosen = Selected(given, OUTCOME).at_temperature_1(config.other_temperatures)
    algorithm, micro_tokens = config.algorithm, config.optimizer.micro_tokens
    lr_scale = 1.0
    if algorithm.credits_whole_rows:
        metrics, batches = credited(chosen, algorithm, policy, micro_tokens)
    elif algorithm.credits_returns:
        metrics, lr_scale, batches = credited_by_token(chosen, algorithm, policy, micro_tokens, context.scratch)
    else:
        metrics, lr_scale, batches = _credited_at_once(chosen, algorithm, policy, micro_tokens)
    context.metrics.update(metrics)
    if lr_scale == 0:
        raise ValueError(f"effective sample size {metrics['ess']:.3f} is below min_ess; use fresher rollouts")
    scaled = config.optimizer.model_copy(update={"lr": config.optimizer.lr * lr_scale})
    return _fit(context, config.model_copy(update={"optimizer": scaled}), policy, algorithm, batches)


def _credited_at_once(
    chosen: Selected, algorithm: PolicyGradientAlgorithm, policy: "Policy", micro_tokens: int
) -> TokenCredit:
    """Training rows by advantages of the user's own, which may compare any token with any other: all rollouts are in
    memory."""
    from agentrl.online.credit import Extras, assign
    from agentrl.training.rows import TrainingRows
    from agentrl.training.scoring import batch_logprobs

    both = zip(chosen.trajectories(), chosen.weights.tolist(), strict=True)
    weighted = [(row, weight) for row, weight in both if any(row.action_mask)]
    made = [row for row, _ in weighted]
    for row in made:
        check_tokenizer(row.trajectory_id, row.tokenizer, policy)
    plain = [
        TrainingRow(
            row_id=row.trajectory_id, input_ids=row.input_ids, mask=row.action_mask, weights=[0.0] * row.n_tokens
        )
        for row in made
    ]
    version = max((row.policy_version for row in made), default=0)
    current = [one.tolist() for one in batch_logprobs(policy, TrainingRows.of(plain), micro_tokens)]
    credit = assign(
        algorithm, made, Extras(reference=current if algorithm.kl else None, proximal=current, version=version)
    )
    rows = [
        row.model_copy(update={"weights": [weighted[row.unit][1] * token for token in row.weights]})
        for row in credit.rows
    ]
    return TokenCredit(credit.metrics, credit.lr_scale, iter(TrainingRows.of(rows).batches))


def _fit(
    context: Context, config: TrainConfig, policy: "Policy", objective: Objective, batches: Iterable[pa.RecordBatch]
) -> Trained:
    """Write the rows as one file, as they come, and train on it."""
    from agentrl.training.loop import fit
    from agentrl.training.lora import merge_lora
    from agentrl.training.rows import TrainingRows, write_rows
    from agentrl.training.step import Trainer
    from agentrl.training.trackers import track

    job = context.scratch / "job"
    job.mkdir(exist_ok=True)
    rows = TrainingRows.open(write_rows(job / "rows.arrow", batches))
    if "codec" in vars(policy):  # written rows were encoded
        record_dialect(context, policy)
    if not len(rows):
        raise ValueError("there is nothing to train on: the inputs hold no rows; look at what the stage before kept")
    with track(config.track, f"{context.stage}-{context.fingerprint[:8]}", context.folder / "tracking") as send:
        last = time.perf_counter()

        def report(metrics: dict[str, float]) -> None:
            nonlocal last
            now = time.perf_counter()
            speed = f"{metrics['tokens'] / (now - last):,.0f}"
            last = now
            context.progress(
                int(metrics["step"]) + 1, config.steps, loss=round(metrics["loss"], 4), **{"tokens/s": speed}
            )
            send(metrics)

        if config.deepspeed:
            history = _launch(context, config, config.deepspeed, policy, objective, report)
            return _trained(
                context, rows, history, lambda path: shutil.copytree(job / "model", path, dirs_exist_ok=True)
            )
        trainer = Trainer(policy, objective, config.optimizer, config.steps, seed=context.seed)
        history = fit(trainer, rows, config.batch, context.seed, context.scratch / "checkpoint.pt", report)
    merge_lora(policy)
    return _trained(context, rows, history, policy.save)


def _launch(
    context: Context,
    config: TrainConfig,
    deepspeed: DeepSpeed,
    policy: "Policy",
    objective: Objective,
    report: Callable[[dict[str, float]], None],
) -> list[dict[str, float]]:
    """Train in processes of their own, through DeepSpeed. The job's folder outlives a kill, with its checkpoints."""
    from agentrl.training.job import TrainingJob
    from agentrl.training.launch import launch

    folder = context.scratch / "job"
    policy.save(folder / "start")
    job = TrainingJob.model_validate(
        {
            "objective": objective,
            "optimizer": config.optimizer,
            "deepspeed": deepspeed,
            "steps": config.steps,
            "batch": config.batch,
            "seed": context.seed,
        }
    )
    return launch(deepspeed, job.write(folder), report)


def _trained(
    context: Context, rows: "TrainingRows", history: list[dict[str, float]], save: Callable[[Path], object]
) -> Trained:
    context.metrics.update(rows=len(rows), first_loss=history[0]["loss"], last_loss=history[-1]["loss"])
    return Trained(
        context.model(save),
        context.table(pa.RecordBatchReader.from_batches(TRAINING_SCHEMA, rows.batches), "rows"),
        context.table(pa.Table.from_pylist(history), "metrics"),
    )
