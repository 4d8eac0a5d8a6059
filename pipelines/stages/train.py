"""Stages that train a policy on stored data."""

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field, model_validator

from agentrl.algorithms import PairAlgorithm, PolicyGradientAlgorithm
from agentrl.algorithms.base import Objective
from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.kto import KTO
from agentrl.algorithms.preference import Preference
from agentrl.algorithms.sft import SFT
from agentrl.chat.codec import tokenize
from agentrl.rollouts.negatives import SOURCE as NEGATIVE
from agentrl.training.job import DeepSpeed
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.trackers import Tracker
from agentrl.training.weights import row_weights, template_weights
from pipelines.handles import Model, Pairs, Table, Trajectories
from pipelines.stage import Context, StageConfig, stage
from pipelines.stages.common import ModelConfig, load_policy, read_weighted, start_policy
from schemas.training import TrainingRow
from schemas.trajectory import Trajectory, UnscoredError

if TYPE_CHECKING:
    from agentrl.models.policy import Policy


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


class SFTConfig(TrainConfig):
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
def sft(context: Context, config: SFTConfig, trajectories: list[Trajectories], model: Model | None = None) -> Trained:
    """Supervised fine-tuning on the action tokens of trajectories, each counting by its weight in the selection."""
    weighted = read_weighted(trajectories)
    policy = start_policy(model, config.model, [row for row, _ in weighted], context.seed)
    if any(row.source == NEGATIVE for row, _ in weighted) and not policy.codec.shows_tools():
        raise ValueError(
            "negative examples differ by the tools on offer, which this model's chat template does not show: "
            "use a template that renders tools, or leave the negatives out"
        )
    factors = row_weights([row for row, _ in weighted], config.weighting)
    rows = []
    for number, ((raw, weight), factor) in enumerate(zip(weighted, factors, strict=True)):
        total = weight * factor * (config.negatives if factor < 0 else 1.0)
        row = _tokens(raw, policy)
        if total == 0 or not any(row.action_mask):
            continue
        tokens = [1.0] * len(row.input_ids)
        if config.template_weight < 1:
            tokens = template_weights(row.input_ids, row.action_mask, partial(_decode, policy), config.template_weight)
        rows.append(_training_row(row, number, [total * token for token in tokens]))
    return _fit(context, config, policy, SFT(), rows)


def _decode(policy: "Policy", ids: list[int]) -> str:
    return str(policy.tokenizer.decode(ids))


def _tokens(raw: Trajectory, policy: "Policy") -> Trajectory:
    row = tokenize(raw, policy.codec, policy.tokenizer_fingerprint)
    _check_tokenizer(row.trajectory_id, row.tokenizer, policy)
    return row


def _training_row(row: Trajectory, unit: int, weights: list[float], label: int = 0) -> TrainingRow:
    return TrainingRow(
        row_id=row.trajectory_id,
        unit=unit,
        label=label,
        input_ids=row.input_ids,
        mask=row.action_mask,
        weights=weights,
    )


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

    policy = load_policy(model)
    rows = []
    for number, pair in enumerate(pairs.read()):
        _check_tokenizer(pair.pair_id, pair.tokenizer, policy)
        for label, ids, mask in ((1, pair.chosen_ids, pair.chosen_mask), (-1, pair.rejected_ids, pair.rejected_mask)):
            weights = [1.0] * len(ids)
            rows.append(
                TrainingRow(row_id=pair.pair_id, unit=number, label=label, input_ids=ids, mask=mask, weights=weights)
            )
    if objective.reference:
        rows = reference_logprobs(policy, rows, config.optimizer.micro_tokens)
    return _fit(context, config, policy, objective, rows)


class KTOConfig(TrainConfig):
    objective: KTO = KTO()


@stage("train.kto", version=1)
def kto(context: Context, config: KTOConfig, trajectories: list[Trajectories], model: Model) -> Trained:
    """Training on unpaired trajectories, successes against failures, from ``model``, which is the reference too."""
    from agentrl.training.scoring import reference_logprobs

    policy = load_policy(model)
    rows = []
    weighted = read_weighted(trajectories)
    if unscored := [row.trajectory_id for row, _ in weighted if row.success is None]:
        raise UnscoredError("success", unscored)
    for number, (raw, _) in enumerate(weighted):
        row = _tokens(raw, policy)
        rows.append(_training_row(row, number, [1.0] * len(row.input_ids), label=1 if row.scored_success() else -1))
    rows = reference_logprobs(policy, rows, config.optimizer.micro_tokens)
    return _fit(context, config, policy, config.objective, rows)


class OfflineConfig(TrainConfig):
    algorithm: PolicyGradientAlgorithm = Field(
        GRPO(), description="how stored rollouts become a loss; those with a critic are online"
    )

    @model_validator(mode="after")
    def _needs_stored_rollouts_alone(self) -> "OfflineConfig":
        if self.algorithm.needs_critic or self.algorithm.needs_greedy or self.algorithm.resample:
            raise ValueError(
                f"algorithm {self.algorithm.type} needs new rollouts (a critic, greedy ones or resampling); "
                "use the stage train.online, or resample: 0"
            )
        return self


@stage("train.offline", version=1)
def offline(context: Context, config: OfflineConfig, trajectories: list[Trajectories], model: Model) -> Trained:
    """Policy gradient on rollouts that the buffer holds, with ``model`` as the proximal policy and the reference.

    Groups are the rollouts of one task. ``algorithm.off_policy`` corrects for rollouts of other policies.
    """
    from agentrl.online.credit import Extras, assign
    from agentrl.training.scoring import batch_logprobs

    policy = load_policy(model)
    made = [row for row, _ in read_weighted(trajectories) if any(row.action_mask)]
    plain = [_training_row(_tokens(row, policy), number, [0.0] * row.n_tokens) for number, row in enumerate(made)]
    version = max((row.policy_version for row in made), default=0)
    current = batch_logprobs(policy, plain, config.optimizer.micro_tokens) if made else []
    extras = Extras(reference=current if config.algorithm.kl else None, proximal=current, version=version)
    credit = assign(config.algorithm, made, extras)
    context.metrics.update(credit.metrics)
    if credit.lr_scale == 0:
        raise ValueError(f"effective sample size {credit.metrics['ess']:.3f} is below min_ess; use fresher rollouts")
    scaled = config.optimizer.model_copy(update={"lr": config.optimizer.lr * credit.lr_scale})
    return _fit(context, config.model_copy(update={"optimizer": scaled}), policy, config.algorithm, credit.rows)


def _check_tokenizer(row_id: str, tokenizer: str, policy: "Policy") -> None:
    if tokenizer != policy.tokenizer_fingerprint:
        raise ValueError(
            f"{row_id} was tokenised by {tokenizer or 'an unknown tokenizer'}, and the model {policy.name} uses "
            f"{policy.tokenizer_fingerprint}; train the model that sampled it, or drop its token columns"
        )


def _fit(
    context: Context, config: TrainConfig, policy: "Policy", objective: Objective, rows: Sequence[TrainingRow]
) -> Trained:
    from agentrl.training.loop import fit
    from agentrl.training.lora import merge_lora
    from agentrl.training.step import Trainer
    from agentrl.training.trackers import track

    if not rows:
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
            return _launch(context, config, config.deepspeed, policy, objective, rows, report)
        trainer = Trainer(policy, objective, config.optimizer, config.steps)
        history = fit(trainer, rows, config.batch, context.seed, context.scratch / "checkpoint.pt", report)
    merge_lora(policy)
    return _trained(context, rows, history, policy.save)


def _launch(
    context: Context,
    config: TrainConfig,
    deepspeed: DeepSpeed,
    policy: "Policy",
    objective: Objective,
    rows: Sequence[TrainingRow],
    report: Callable[[dict[str, float]], None],
) -> Trained:
    """Train in processes of their own, through DeepSpeed. The job's folder outlives a kill, with its checkpoints."""
    from agentrl.training.job import TrainingJob
    from agentrl.training.launch import launch
    from agentrl.training.tables import save_rows

    folder = context.scratch / "job"
    folder.mkdir(exist_ok=True)
    policy.save(folder / "start")
    save_rows(folder / "rows.parquet", rows)
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
    history = launch(deepspeed, job.write(folder), report)
    return _trained(context, rows, history, lambda path: shutil.copytree(folder / "model", path, dirs_exist_ok=True))


def _trained(
    context: Context,
    rows: Sequence[TrainingRow],
    history: list[dict[str, float]],
    save: Callable[[Path], object],
) -> Trained:
    from agentrl.training.tables import row_table

    context.metrics.update(rows=len(rows), first_loss=history[0]["loss"], last_loss=history[-1]["loss"])
    return Trained(
        context.model(save),
        context.table(row_table(rows), "rows"),
        context.table(pa.Table.from_pylist(history), "metrics"),
    )
