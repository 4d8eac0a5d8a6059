"""The stage that trains a reward model, and measures it on tasks that it was not trained on."""

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import pyarrow as pa
from pydantic import Field, model_validator

from agentrl.datastore.storage.digest import digest
from agentrl.pipelines.handles import Model, RewardModel, Steps, Table, Trajectories
from agentrl.pipelines.methods.reward_model.labels import (
    Labels,
    balanced,
    check_differ,
    demonstrated,
    held_out,
    outcome_labels,
    step_labels,
    training_batches,
)
from agentrl.pipelines.methods.reward_model.measured import ScoredLabels, calibration_table, error, measures
from agentrl.pipelines.parts.common import policy_to_train
from agentrl.pipelines.parts.selected import Selected
from agentrl.pipelines.parts.values import values_by_one
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.annotations import ADDED
from agentrl.training.optimizer import OptimizerConfig

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.training.reward_model import RewardNet
    from agentrl.training.rows import TrainingRows


class RewardTrainConfig(StageConfig):
    kind: Literal["orm", "prm", "inverse"] = Field(
        description="orm: whether a row succeeds, at its last action token; prm: what each turn is worth, by "
        "inputs.values, at its last token; inverse: whether a turn is of inputs.demonstrations or of "
        "inputs.trajectories, by differences of a value at its last token"
    )
    steps: int = Field(100, ge=1, description="optimiser steps")
    batch: int = Field(32, ge=1, description="rows in one optimiser step")
    optimizer: OptimizerConfig = OptimizerConfig()
    holdout: float = Field(0.2, ge=0, lt=1, description="share of the tasks that are only measured on; 0 measures none")
    balance: Literal["none", "task"] = Field(
        "none",
        description="task, for kind orm: successes and failures of a task weigh the same, so that the model cannot win "
        "by telling easy tasks from hard ones; its scores are then no frequencies of success",
    )
    other_prover: bool = Field(
        False, description="for kind prm: values may be those of another policy than the one that sampled the rows"
    )

    gamma: Annotated[float, ADDED] = Field(
        0.0,
        ge=0,
        le=1,
        description="for kind inverse: discount of the value of the next turn; at 0 each turn is judged by itself",
    )

    @model_validator(mode="after")
    def _of_its_kind(self) -> "RewardTrainConfig":
        if self.kind != "orm" and self.balance == "task":
            raise ValueError("balance: task is for kind: orm, whose labels are successes; leave it out")
        if self.kind != "inverse" and self.gamma:
            raise ValueError(f"gamma is for kind: inverse, and kind: {self.kind} has no next turn; leave it out")
        if self.optimizer.quantized:
            raise ValueError(
                "optimizer.lora.quantize: nf4 is not supported here: the folder of a reward model has whole weights; "
                "leave it out"
            )
        return self


class TrainedReward(NamedTuple):
    reward_model: RewardModel
    calibration: Table
    metrics: Table


@stage("rewards.train", version=1)
def train(
    context: Context,
    config: RewardTrainConfig,
    model: Model,
    trajectories: list[Trajectories],
    values: list[Steps] = [],  # noqa: B006  (an input that may be left out)
    demonstrations: list[Trajectories] = [],  # noqa: B006  (an input that may be left out)
) -> TrainedReward:
    """Train a reward model that begins as ``model``: on the outcomes of rows (``orm``), on the values of their turns
    (``prm``), or on what tells turns of ``demonstrations`` from those of ``trajectories``, whatever their outcomes
    (``inverse``). A share of the tasks, with all their rows, is measured on afterwards.

    Raises ValueError if the inputs do not match the kind, if labels do not differ, or if rows are of another
    tokenizer, and UnscoredError if outcomes are not known.
    """
    from agentrl.training.reward_model import RewardCard

    _check_inputs(config.kind, values, demonstrations)
    policy = policy_to_train(model, config.optimizer)
    shown = {name for selection in demonstrations for name in selection.ids()}
    chosen = Selected([*demonstrations, *trajectories], ["env", "n_action_tokens", "n_steps", "policy"]).merged()
    tasks = _tasks(chosen)
    labels, prover = _labels(config, chosen, values, shown)
    held = held_out([tasks[position] for position in labels], config.holdout, context.seed)
    learned = {position: row for position, row in labels.items() if tasks[position] not in held}
    check_differ(learned, config.kind)
    if config.balance == "task":
        learned = balanced(learned, tasks)
    net, history = _fit(context, config, policy, _rows(context, "rows", chosen, learned, policy))
    kept = {position: row for position, row in labels.items() if tasks[position] in held}
    scored = (
        _scored(net, config, _rows(context, "held", chosen, kept, policy), tasks) if kept else ScoredLabels([], [], [])
    )
    context.metrics.update(
        rows=len(learned),
        left_out=len(chosen) - len(labels),
        unbalanced=len(labels) - len(kept) - len(learned),
        tasks=len({tasks[position] for position in learned}),
        heldout_rows=len(kept),
        heldout_tasks=len(held),
        first_loss=history[0]["loss"],
        last_loss=history[-1]["loss"],
        **measures(scored),
    )
    about = RewardCard(
        kind=config.kind,
        base=model.name,
        base_digest=digest(model.path),
        tokenizer=policy.tokenizer_fingerprint,
        prover=prover,
        precision=config.optimizer.precision,
        error=error(scored),
        gamma=config.gamma if config.kind == "inverse" else None,
    )
    files = context.files(lambda path: net.save(path, about), "reward_model")
    return TrainedReward(
        RewardModel(**vars(files)),
        context.table(calibration_table(scored), "calibration"),
        context.table(pa.Table.from_pylist(history), "metrics"),
    )


def _tasks(chosen: Selected) -> list[str]:
    """The task of each row, by a name that no other environment's has."""
    names = (chosen.scalars[name].to_pylist() for name in ("env", "task_id"))
    return [f"{env} {task}" for env, task in zip(*names, strict=True)]


def _check_inputs(kind: str, values: Sequence[Steps], demonstrations: Sequence[Trajectories]) -> None:
    needs = {"prm": "values", "inverse": "demonstrations"}
    known = {"values": bool(values), "demonstrations": bool(demonstrations)}
    usual = {"values": "those of steps.value", "demonstrations": "an expert's"}
    for name, wired in known.items():
        if wired and needs.get(kind) != name:
            fitting = next(other for other, needed in needs.items() if needed == name)
            raise ValueError(f"inputs.{name} are for kind: {fitting}, not {kind}; set that kind, or leave them out")
        if not wired and needs.get(kind) == name:
            raise ValueError(f"kind: {kind} needs inputs.{name}, such as {usual[name]}")


def _labels(config: RewardTrainConfig, chosen: Selected, values: list[Steps], shown: Set[str]) -> tuple[Labels, str]:
    """The labels of rows, and the prover whose values they are."""
    if config.kind == "inverse":
        return demonstrated(chosen, shown), ""
    if config.kind == "orm":
        return outcome_labels(chosen), ""
    names = (chosen.scalars[name].to_pylist() for name in ("trajectory_id", "policy"))
    by_turn = values_by_one(values, dict(zip(*names, strict=True)), config.other_prover)
    return step_labels(chosen, by_turn), next((step.policy for step in by_turn.values()), "")


def _rows(context: Context, name: str, chosen: Selected, labels: Labels, policy: "Policy") -> "TrainingRows":
    """The labelled rows as a file, of which a step reads its own."""
    from agentrl.training.rows import TrainingRows, write_rows

    batches = training_batches(chosen, labels, sorted(labels), policy)
    return TrainingRows.open(write_rows(context.scratch / f"{name}.arrow", batches))


def _fit(
    context: Context, config: RewardTrainConfig, policy: "Policy", rows: "TrainingRows"
) -> "tuple[RewardNet, list[dict[str, float]]]":
    """The reward model after training, and the metrics of each step. A killed run goes on from its checkpoint."""
    from agentrl.training.loop import fit
    from agentrl.training.lora import merge_lora
    from agentrl.training.reward_model import Inverse, RewardNet, SoftLabels
    from agentrl.training.step import Trainer

    context.keep_tokenizer(policy)
    net = RewardNet(policy)
    objective = Inverse(gamma=config.gamma) if config.kind == "inverse" else SoftLabels()
    trainer = Trainer(policy, objective, config.optimizer, config.steps, seed=context.seed, scorer=net)
    with context.live() as live:

        def report(metrics: dict[str, float]) -> None:
            live(metrics)
            context.progress(int(metrics["step"]) + 1, config.steps, loss=round(metrics["loss"], 4))

        history = fit(trainer, rows, config.batch, context.seed, context.scratch / "checkpoint.pt", report)
    if config.optimizer.lora:
        merge_lora(policy)
    return net, history


def _scored(net: "RewardNet", config: RewardTrainConfig, rows: "TrainingRows", tasks: Sequence[str]) -> ScoredLabels:
    """What the model says of labelled rows, whose units are positions in ``tasks``."""
    scored = ScoredLabels([], [], [])
    every = rows.take(range(len(rows)))
    gamma = config.gamma if config.kind == "inverse" else None
    for number, scores in enumerate(net.scores(every, config.optimizer.micro_tokens, gamma)):
        labels = every.values("logprobs", number)[every.values("mask", number)]
        scored.scores.extend(scores.tolist())
        scored.labels.extend(labels.tolist())
        scored.tasks.extend([tasks[int(every.scalars("unit")[number])]] * len(labels))
    return scored
