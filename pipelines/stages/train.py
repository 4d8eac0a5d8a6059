"""Stages that train a policy on stored data."""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from agentrl.algorithms import PairAlgorithm, PolicyGradientAlgorithm
from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.kto import KTO
from agentrl.algorithms.preference import Preference
from agentrl.algorithms.sft import SFT
from agentrl.pipelines.handles import Model, NoteTable, Pairs, Scores, Steps, Trajectories
from agentrl.pipelines.methods.distill.teaching import TeacherConfig, Teaching, teaching
from agentrl.pipelines.methods.echo.observed import Observe, observing, weighing
from agentrl.pipelines.parts.common import ModelConfig, count, outside, policy_to_train, start_policy
from agentrl.pipelines.parts.scores import ByScorer, under
from agentrl.pipelines.parts.selected import OtherTemperatures, Selected, check_tokenizer
from agentrl.pipelines.parts.stored_tasks import KnownTasks
from agentrl.pipelines.parts.training_rows import OUTCOME, acting, as_batch, credited, decode, reweighted, trained_on
from agentrl.pipelines.parts.values import check_wired, values_by_row
from agentrl.pipelines.stage import Context, stage
from agentrl.pipelines.stages.token_credit import TokenCredit, credited_by_token
from agentrl.pipelines.stages.training import NO_ROWS, TrainConfig, Trained, Training, meanwhile
from agentrl.rollouts.negatives import SOURCE as NEGATIVE
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.trajectory import Message, UnscoredError
from agentrl.training.weights import row_weights, template_weights, without_losses

if TYPE_CHECKING:
    from agentrl.models.policy import Policy, Speaker
    from agentrl.online.teacher import Teacher


OTHER_PROVER = "for credit: values: the values may be those of another policy than the one that sampled the rows"


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
    credit: Annotated[Literal["whole", "values"], ADDED] = Field(
        "whole", description="values: turns that lost value, by inputs.steps, are not trained on"
    )
    other_prover: Annotated[bool, ADDED] = Field(False, description=OTHER_PROVER)
    prefixes: Annotated[Literal["context", "trained"], ADDED] = Field(
        "context",
        description="what comes before a continuation's own turns; trained: the turns that its parents sampled there "
        "are learned too, as often as rows that begin with them are selected",
    )
    tokens: Annotated[Literal["stored", "again"], ADDED] = Field(
        "stored",
        description="again: rows of another tokenizer, as of a teacher of another family, are tokenised from their "
        "messages; stored: they are refused",
    )

    @model_validator(mode="after")
    def _tokens_are_those_of_parents_and_steps(self) -> "SFTConfig":
        if self.tokens == "again" and (self.prefixes == "trained" or self.credit == "values"):
            raise ValueError(
                "tokens: again makes other tokens than those that prefixes: trained and credit: values point into; "
                "leave these out, or train the model that sampled the rows"
            )
        return self


@stage("train.sft", version=2)
def sft(
    context: Context,
    config: SFTConfig,
    trajectories: list[Trajectories],
    model: Model | None = None,
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
    steps: list[Steps] = [],  # noqa: B006  (an input that may be left out)
) -> Trained:
    """Supervised fine-tuning on the action tokens of trajectories, each counting by its weight in the selection."""
    check_wired(config.credit, steps)
    with Training(context, config) as training:
        start = _start_of_ranks(config, model)
        fresh = config.model is not None and config.model.init is not None
        loading = None if fresh else meanwhile(partial(_speaker, model, config, (), context.seed, start))
        chosen = Selected(under(trajectories, scores, config.scorer), ["policy"] if steps else [])
        if config.prefixes == "trained":
            chosen = chosen.with_prefixes()
        if config.tokens == "again":
            chosen = chosen.with_tokens_of_policy()
        if loading is None:
            loading = meanwhile(partial(_speaker, None, config, chosen.conversations(), context.seed, start))
            loading.result()  # it reads the rows
        if pc.any(pc.equal(chosen.scalars["source"], NEGATIVE)).as_py() and not loading.result().codec.shows_tools():
            raise ValueError(
                "negative examples differ by the tools on offer, which this model's chat template does not show: "
                "use a template that renders tools, or leave the negatives out"
            )
        factors = row_weights(chosen.scalars, config.weighting)
        totals = chosen.weights * factors * np.where(factors < 0, config.negatives, 1.0)
        weigh = None
        if config.template_weight < 1:
            weigh = partial(template_weights, decode=partial(decode, loading.result), template=config.template_weight)
        kept = np.flatnonzero(totals)
        # ranks load the tokenizer anyway, and here it takes seconds of imports: they compare it
        made_by = chosen.one_tokenizer(kept) if start and config.tokens == "stored" else None
        batches = (
            trained_on(part, totals[part.positions], weigh=weigh)
            for part in chosen.tokens(loading.result, kept, check=made_by is None)
        )
        if steps:
            values = values_by_row(steps, chosen.scalars, config.other_prover)
            batches = (reweighted(rows, values, without_losses) for rows in batches)
        trained = training.fit(loading.result, SFT(), map(acting, batches), start=start, made_by=made_by)
    if config.tokens == "again":
        context.metrics.update(tokenised_again=chosen.tokenised_again)
    return trained


def _start_of_ranks(config: SFTConfig, model: Model | None) -> str | None:
    """The model folder or name that ranks can load by themselves, so that it need not fit this process."""
    if config.deepspeed is None or (config.model and (config.model.path is None or config.model.dialect)):
        return None
    if config.model and config.model.path:
        return str(outside(config.model.path))
    return str(model.path) if model else None


def _speaker(
    model: Model | None,
    config: SFTConfig,
    conversations: Iterable[Sequence[Message]],
    seed: int,
    start: str | None,
) -> "Speaker":
    """What rows are tokenised by: the policy that training starts from, or its tokenizer if ranks load it.

    Raises ValueError if no dialect fits the policy.
    """
    from agentrl.models.policy import Tokenizing

    if start is not None and not (model and config.model):
        return Tokenizing(start, model.name if model else None)
    policy = start_policy(model, config.model, conversations, seed, config.optimizer.quantized)
    importlib.import_module("agentrl.training.loop")
    _ = policy.codec
    return policy


class DPOConfig(TrainConfig):
    beta: float = Field(0.1, gt=0, description="strength of the pull towards the reference policy")
    nll: float = Field(0.0, ge=0, description="weight of the chosen side's negative log-likelihood; 0 is plain DPO")
    length_normalized: bool = Field(False, description="divide each side's log-ratio by its trained tokens")


@stage("train.dpo", version=2)
def dpo(context: Context, config: DPOConfig, pairs: list[Pairs], model: Model) -> Trained:
    """Direct preference optimisation from ``model``, which is the reference too: its log-probabilities are computed
    once."""
    objective = DPO(beta=config.beta, nll=config.nll, length_normalized=config.length_normalized)
    return _prefer(context, config, objective, pairs, model)


class PreferenceConfig(TrainConfig):
    objective: PairAlgorithm = Field(DPO(), description="the loss of a pair: dpo, ipo or simpo, and its settings")


@stage("train.preference", version=1)
def preference(context: Context, config: PreferenceConfig, pairs: list[Pairs], model: Model) -> Trained:
    """Training on preference pairs from ``model``, which is the reference too if the loss needs one."""
    return _prefer(context, config, config.objective, pairs, model)


def _prefer(context: Context, config: TrainConfig, objective: Preference, pairs: list[Pairs], model: Model) -> Trained:
    from agentrl.training.scoring import reference_logprobs

    with Training(context, config) as training:
        policy = policy_to_train(model, config.optimizer)
        batches = _pair_batches(pairs, policy)
        if objective.reference:
            batches = (reference_logprobs(policy, batch, config.optimizer.micro_tokens) for batch in batches)
        return training.fit(lambda: policy, objective, batches)


PAIRS_AT_ONCE = 2048


def _pair_batches(pairs: Sequence[Pairs], policy: "Policy") -> Iterator[pa.RecordBatch]:
    """Pairs as training rows: for each one the chosen side, then the rejected one."""
    first = 0
    for pair_table in pairs:
        with pq.ParquetFile(pair_table.path) as file:
            for batch in file.iter_batches(PAIRS_AT_ONCE):
                yield _pair_batch(batch, first, policy)
                first += batch.num_rows


def _pair_batch(batch: pa.RecordBatch, first: int, policy: "Policy") -> pa.RecordBatch:
    """Training rows of some pairs, which are numbered from ``first`` on."""
    from agentrl.training.rows import flat, nested

    for name, tokenizer in zip(*(batch.column(column).to_pylist() for column in ("pair_id", "tokenizer")), strict=True):
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
    return as_batch(batch.column("pair_id").take(pa.array(pair)), first + pair, labels, ids, mask, weights)


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

    with Training(context, config) as training:
        policy = policy_to_train(model, config.optimizer)
        chosen = Selected(under(trajectories, scores, config.scorer)).at_temperature_1(config.other_temperatures)
        success = chosen.scalars["success"]
        if success.null_count:
            raise UnscoredError("success", chosen.scalars.filter(pc.is_null(success))["trajectory_id"].to_pylist())
        chosen.check_tokenizers(policy, np.arange(len(chosen)))
        labels = np.where(success.to_numpy(), 1, -1)
        batches = (
            trained_on(part, chosen.weights[part.positions], labels[part.positions])
            for part in chosen.tokens(lambda: policy)
        )
        scored = (reference_logprobs(policy, batch, config.optimizer.micro_tokens) for batch in batches)
        return training.fit(lambda: policy, config.objective, scored)


class OfflineConfig(TrainConfig, ByScorer, TeacherConfig):
    other_prover: Annotated[bool, ADDED] = Field(False, description=OTHER_PROVER)
    algorithm: PolicyGradientAlgorithm = Field(
        GRPO(), description="how stored rollouts become a loss; those with a critic are online"
    )
    observe: Observe = Field({})
    other_temperatures: OtherTemperatures = "refuse"

    @model_validator(mode="after")
    def _needs_stored_rollouts_alone(self) -> "OfflineConfig":
        if self.algorithm.needs_critic or self.algorithm.needs_greedy or self.algorithm.resample:
            raise ValueError(
                f"algorithm {self.algorithm.type} needs new rollouts (a critic, greedy ones or resampling); "
                "use the stage train.online, or resample: 0"
            )
        self.check_teacher(self.algorithm)
        return self


@stage("train.offline", version=1)
def offline(
    context: Context,
    config: OfflineConfig,
    trajectories: list[Trajectories],
    model: Model,
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
    steps: list[Steps] = [],  # noqa: B006  (an input that may be left out)
    teacher: Model | None = None,
    notes: NoteTable | None = None,
) -> Trained:
    """Policy gradient on rollouts that the buffer holds, with ``model`` as the proximal policy and the reference.
    ``teacher`` is that of ``algorithm: {type: distill}``, which may see ``notes``.

    Groups are the rollouts of one ticket; rows that name none are grouped by task and by the policy that sampled them.
    ``algorithm.off_policy`` corrects for rollouts of other policies. ``steps`` are for ``credit: values``.
    """
    check_wired(config.algorithm.credit, steps)
    algorithm = config.algorithm
    with Training(context, config) as training:
        policy = policy_to_train(model, config.optimizer)
        given = under(trajectories, scores, config.scorer)
        chosen = stored_rollouts(config, given, policy)
        models, tokens = Teaching(teacher, notes), config.optimizer.micro_tokens
        with teaching(config, algorithm, model, models, policy, KnownTasks(given).of, tokens) as taught:
            metrics, lr_scale, batches = stored_credit(config, chosen, policy, steps, context.scratch, taught)
        context.metrics.update(metrics)
        if lr_scale == 0:
            raise ValueError(f"effective sample size {metrics['ess']:.3f} is below min_ess; use fresher rollouts")
        if observe := weighing(config.observe):
            batches = observing(partial(count, context), chosen, policy, observe, batches, algorithm)
        equal = (
            f"{metrics['degenerate_rows']:.0f} of {len(chosen)} rows are in groups whose rewards are all equal, and no "
            "other has an advantage; sample more of each task, or take tasks that are solved sometimes"
        )
        empty = equal if len(chosen) else NO_ROWS
        return training.fit(lambda: policy, algorithm, batches, lr_scale=lr_scale, empty=empty)


def stored_rollouts(config: OfflineConfig, given: list[Trajectories], policy: "Policy") -> Selected:
    """The rollouts that :func:`offline` learns from. Raises ValueError if they are of another tokenizer, or lack what
    the algorithm needs of them."""
    chosen = Selected(given, OUTCOME).merged().at_temperature_1(config.other_temperatures)
    chosen.check_tokenizers(policy, np.flatnonzero(chosen.scalars["n_action_tokens"].to_numpy()))
    if not config.algorithm.off_policy:
        chosen.check_drawn()
    return chosen


def stored_credit(
    config: OfflineConfig,
    chosen: Selected,
    policy: "Policy",
    steps: Sequence[Steps],
    folder: Path,
    teacher: "Teacher | None",
) -> TokenCredit:
    """The training rows of :func:`offline`, with their advantages as weights. Files of theirs lie in ``folder``."""
    algorithm, micro_tokens = config.algorithm, config.optimizer.micro_tokens
    if algorithm.credits_whole_rows:
        metrics, batches = credited(chosen, algorithm, policy, micro_tokens)
        return TokenCredit(metrics, 1.0, batches)
    values = values_by_row(steps, chosen.scalars, config.other_prover) if steps else {}
    return credited_by_token(chosen, algorithm, policy, micro_tokens, folder, values, teacher)
