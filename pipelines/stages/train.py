"""Stages that train a policy on data at rest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pydantic import Field

from agentrl.chat import tokenize
from agentrl.objectives import DPO, SFT
from agentrl.optimizer import OptimizerConfig
from pipelines.handles import Model, Pairs, Table, Trajectories
from pipelines.stage import Context, StageConfig, stage
from pipelines.stages.policies import ModelConfig, load_policy, read_weighted, start_policy
from schemas.training import TrainingRow

if TYPE_CHECKING:
    from agentrl.policy import Policy


class Trained(NamedTuple):
    model: Model
    metrics: Table


class TrainConfig(StageConfig):
    steps: int = Field(100, ge=1, description="optimiser steps")
    batch: int = Field(32, ge=1, description="sequences, or pairs, in one optimiser step")
    optimizer: OptimizerConfig = OptimizerConfig()


class SFTConfig(TrainConfig):
    model: ModelConfig | None = Field(None, description="what to start from, where no model is wired to the input")


@stage("train.sft", version=1)
def sft(context: Context, config: SFTConfig, trajectories: list[Trajectories], model: Model | None = None) -> Trained:
    """Supervised fine-tuning on the action tokens of trajectories, each counting by its weight in the selection."""
    weighted = read_weighted(trajectories)
    policy = start_policy(model, config.model, [row for row, _ in weighted], context.seed)
    rows = []
    for number, (raw, weight) in enumerate(weighted):
        row = tokenize(raw, policy.codec, policy.tokenizer_fingerprint)
        _check_tokenizer(row.trajectory_id, row.tokenizer, policy)
        rows.append(
            TrainingRow(
                row_id=row.trajectory_id,
                unit=number,
                input_ids=row.input_ids,
                mask=row.action_mask,
                weights=[weight] * len(row.input_ids),
            )
        )
    return _fit(context, config, policy, SFT(), rows)


class DPOConfig(TrainConfig):
    beta: float = Field(0.1, gt=0, description="strength of the pull towards the reference policy")
    nll: float = Field(0.0, ge=0, description="weight of the chosen side's negative log-likelihood; 0 is plain DPO")


@stage("train.dpo", version=1)
def dpo(context: Context, config: DPOConfig, pairs: Pairs, model: Model) -> Trained:
    """Direct preference optimisation from ``model``, which is the reference too: its log-probabilities are computed
    once."""
    from agentrl.trainer import reference_logprobs

    policy = load_policy(model)
    rows = []
    for number, pair in enumerate(pairs.read()):
        _check_tokenizer(pair.pair_id, pair.tokenizer, policy)
        for label, ids, mask in ((1, pair.chosen_ids, pair.chosen_mask), (-1, pair.rejected_ids, pair.rejected_mask)):
            weights = [1.0] * len(ids)
            rows.append(
                TrainingRow(row_id=pair.pair_id, unit=number, label=label, input_ids=ids, mask=mask, weights=weights)
            )
    rows = reference_logprobs(policy, rows, config.optimizer.micro_tokens)
    return _fit(context, config, policy, DPO(beta=config.beta, nll=config.nll), rows)


def _check_tokenizer(row_id: str, tokenizer: str, policy: "Policy") -> None:
    if tokenizer != policy.tokenizer_fingerprint:
        raise ValueError(
            f"{row_id} was tokenised by {tokenizer or 'an unknown tokenizer'}, and the model {policy.name} uses "
            f"{policy.tokenizer_fingerprint}; train the model that sampled it, or drop its token columns"
        )


def _fit(
    context: Context, config: TrainConfig, policy: "Policy", objective: SFT | DPO, rows: Sequence[TrainingRow]
) -> Trained:
    from agentrl.trainer import Trainer, fit

    if not rows:
        raise ValueError("there is nothing to train on: the inputs hold no rows; look at what the stage before kept")
    trainer = Trainer(policy, objective, config.optimizer, config.steps)

    def report(metrics: dict[str, float]) -> None:
        context.progress(int(metrics["step"]) + 1, config.steps, loss=round(metrics["loss"], 4))

    history = fit(trainer, rows, config.batch, context.seed, context.scratch / "checkpoint.pt", report)
    context.metrics.update(rows=len(rows), first_loss=history[0]["loss"], last_loss=history[-1]["loss"])
    return Trained(context.model(policy.save), context.table(pa.Table.from_pylist(history), "metrics"))
