"""The settings of the stages that train online, and which of them go together."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from agentrl.algorithms import PolicyGradientAlgorithm
from agentrl.algorithms.grpo import GRPO
from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE, VLLMConfig
from agentrl.online.curriculum import CurriculumConfig
from agentrl.online.forest import ForestConfig
from agentrl.online.replay import ReplayConfig
from agentrl.online.starts import StartsConfig
from agentrl.online.tickets import check
from agentrl.pipelines.methods.distill.teaching import TeacherConfig
from agentrl.pipelines.methods.echo.observed import Observe
from agentrl.pipelines.parts.budget import Compressing
from agentrl.pipelines.parts.common import REWARDS
from agentrl.pipelines.stages.checkpoints import Checkpoints
from agentrl.rewards import Rewards
from agentrl.rollouts.exploring import Explore
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.team import Team
from agentrl.schemas.annotations import ADDED
from agentrl.training.job import DeepSpeed
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.trackers import Tracker


class OnlineConfig(Compressing, TeacherConfig):
    algorithm: PolicyGradientAlgorithm = Field(GRPO(), description="how rollouts update the policy")
    iterations: int = Field(25, ge=1, description="rounds of rollouts, each followed by its updates")
    tasks: int = Field(32, ge=1, description="tasks of one iteration")
    samples: int = Field(8, ge=2, description="rollouts of each task, which form its group")
    draw: Annotated[CurriculumConfig | None, ADDED] = Field(
        None, description="a curriculum over the levels of the tasks; None: every task in turn"
    )
    fork: Annotated[ForestConfig | None, ADDED] = Field(
        None, description="rollouts are trees: some are whole, others go on from turns of these; in place of samples"
    )
    starts: Annotated[StartsConfig | None, ADDED] = Field(
        None,
        description="a reverse curriculum: rollouts begin in states of the successes of inputs.starts, from the end "
        "backwards, and then with whole tasks; draw says when it goes on. None: all begin with their tasks",
    )
    team: Annotated[Team | None, ADDED] = Field(
        None,
        description="several agents in one episode: speakers say one thing each, and the actor acts; samples is how "
        "often the speakers speak. None: the policy acts alone",
    )
    replay: Annotated[ReplayConfig | None, ADDED] = Field(
        None, description="stored rollouts are trained on beside fresh ones in each step; None: fresh ones alone"
    )
    routes: Annotated[Literal["replay"] | None, ADDED] = Field(
        None,
        description="replay: passes of the policy send tokens to the experts that they were sampled with, of a mixture "
        "of experts; None: routers choose anew",
    )
    updates: int = Field(1, ge=1, description="optimiser steps of one iteration, each over its share of the rollouts")
    ahead: int = Field(
        0, ge=0, description="how many iterations after the next one have rollouts under way already; more waits less"
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="greatest age in versions of rollouts that are trained on: more than ahead, or 0 (synchronous)",
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6)
    deepspeed: DeepSpeed | None = Field(
        None, description="train on ranks, to which batches go as files, and from which weights come back; None: here"
    )
    track: list[Tracker] = Field([], description="also send metrics to these, if they are installed")
    observe: Observe = Field({})
    explore: Annotated[Explore, ADDED] = Field(Explore(), description="how rollouts explore beside sampling")
    rewards: Rewards = Field([], description=REWARDS)
    engine: TokenEngineChoice = Field(DEFAULT_ENGINE, description="what samples; it needs token ids and log-probs")
    limits: Limits = Limits()
    checkpoints: Checkpoints = Checkpoints()
    checkpoint_every: int = Field(5, ge=1, description="iterations between two points at which a killed run resumes")
    record_tokens: bool = Field(
        True, description="add to batches what each step saw of its tokens: train_logprobs and entropy, in float16"
    )

    @model_validator(mode="after")
    def _staleness_can_be_kept(self) -> "OnlineConfig":
        check(self.ahead, self.max_staleness)
        off_policy = self.algorithm.off_policy
        if off_policy and off_policy.max_staleness is not None and off_policy.max_staleness < self.max_staleness:
            raise ValueError(
                f"algorithm.off_policy.max_staleness: {off_policy.max_staleness} would drop rollouts that "
                f"max_staleness: {self.max_staleness} lets through; leave it out: the stage drops none"
            )
        if self.max_staleness and self.optimizer.precision != "float32" and not off_policy:
            raise ValueError(
                f"max_staleness: {self.max_staleness} with optimizer.precision: {self.optimizer.precision} needs "
                "algorithm.off_policy, such as {truncate: 2.0}: ratios are then to the training pass itself, and those "
                "to the older policy that sampled would be lost"
            )
        return self

    @model_validator(mode="after")
    def _is_sampled_as_it_is_trained(self) -> "OnlineConfig":
        precision = getattr(self.engine, "precision", None)
        if precision not in (None, self.optimizer.precision):
            raise ValueError(
                f"engine.precision: {precision} with optimizer.precision: {self.optimizer.precision}: a model is "
                "sampled here in the precision in which it is trained; leave engine.precision out"
            )
        return self

    @property
    def rollouts(self) -> int:
        """Rollouts of each task."""
        return self.team.rollouts(self.samples) if self.team else self.samples

    @model_validator(mode="before")
    @classmethod
    def _trees_say_how_many(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("fork") is None or "samples" in given:
            return given
        try:
            return {**given, "samples": ForestConfig.model_validate(given["fork"]).rows}
        except ValidationError:  # it is reported with its place when the field is validated
            return given

    @model_validator(mode="after")
    def _trees_can_be_compared(self) -> "OnlineConfig":
        if self.fork and self.samples != self.fork.rows:
            raise ValueError(
                f"samples: {self.samples} with fork: fork makes {self.fork.rows} rollouts of each task, trees x "
                "(1 + nodes x rounds); leave samples out"
            )
        if self.fork and not self.algorithm.credits_returns:
            raise ValueError(
                f"fork needs an algorithm that compares the rewards of a group, and algorithm: {self.algorithm.type}"
                f"{' with an estimator of your own' if self.algorithm.advantage else ''} does not; take grpo, dr_grpo, "
                "rloo, dapo, gspo, cispo, reinforce, reinforce++ or starpo_s"
            )
        return self

    @model_validator(mode="after")
    def _stored_rollouts_can_be_mixed_in(self) -> "OnlineConfig":
        if self.replay is None:
            return self
        algorithm, uncorrected = self.algorithm, self.replay.correction is None
        rounded = uncorrected and self.optimizer.precision != "float32" and self.replay.needs_logprobs(algorithm)
        wrong = {
            f"algorithm.type: {algorithm.type} fits a critic to returns of its own policy": algorithm.needs_critic,
            f"algorithm.type: {algorithm.type} compares with greedy rollouts of its own policy": algorithm.needs_greedy,
            f"algorithm.type: {algorithm.type} asks a teacher for each rollout that it draws": algorithm.needs_teacher,
            "fork credits rollouts by trees, which stored ones are not": self.fork is not None,
            f"{self.explore.changes_draws} takes turns that are no draws of the policy, so replay.correction: null "
            "would take ratios to other probabilities": uncorrected and bool(self.explore.changes_draws),
            f"optimizer.precision: {self.optimizer.precision} takes ratios to the training pass itself, so with "
            "replay.correction: null those to the policy that sampled would be lost": rounded,
        }
        _refuse("replay", wrong)
        return self

    @model_validator(mode="after")
    def _routes_are_recorded(self) -> "OnlineConfig":
        if self.routes:
            self.engine.with_routes()
            _refuse("routes", {"replay draws stored rollouts, whose routes are not kept": self.replay is not None})
        return self

    @model_validator(mode="after")
    def _starts_are_of_whole_rows(self) -> "OnlineConfig":
        wrong = {
            "fork makes trees of whole rollouts": self.fork is not None,
            "compress makes several rows of an episode, of which a start has one": self.compress is not None,
            f"algorithm.type: {self.algorithm.type} values the turns before a start too": self.algorithm.needs_critic,
        }
        if self.starts:
            _refuse("starts", wrong)
        return self

    @model_validator(mode="after")
    def _credit_needs_no_stored_values(self) -> "OnlineConfig":
        if self.algorithm.credit == "values":
            raise ValueError("credit: values is for stored rows; value them by steps.value and use train.offline")
        return self

    @model_validator(mode="after")
    def _ratios_are_of_draws(self) -> "OnlineConfig":
        if (setting := self.explore.changes_draws) and not self.algorithm.off_policy:
            raise ValueError(
                f"{setting} takes turns that are no draws of the policy, so the ratios of {self.algorithm.type} would "
                "be of other probabilities; set algorithm.off_policy, such as {truncate: 2.0}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _episodes_have_one_credit(self) -> "OnlineConfig":
        if self.compress is None:
            return self
        algorithm = self.algorithm
        wrong = {
            f"algorithm.type: {algorithm.type} values one row": algorithm.needs_critic,
            f"algorithm.credit: {algorithm.credit} compares whole rows": algorithm.credit != "whole",
            "algorithm.overlong punishes rows that come near max_tokens, which none does": algorithm.overlong,
            "fork goes on from turns of one row": self.fork,
        }
        if problems := [what for what, holds in wrong.items() if holds]:
            raise ValueError(
                f"compress makes several rows of an episode, and {problems[0]}; leave compress out, or use an "
                "algorithm that credits whole episodes (grpo, dapo, rloo, ...) with credit: whole"
            )
        return self

    @model_validator(mode="after")
    def _agents_of_a_team_are_credited(self) -> "OnlineConfig":
        if self.team is None:
            return self
        algorithm, several = self.algorithm, self.team.acts > 1
        credits = ("whole", "fork_turn") if several else ("whole", "joint")
        wrong = {
            "fork makes trees of one agent's turns": self.fork is not None,
            "starts are states of one agent": self.starts is not None,
            "replay draws stored rows, which are not those of whole teams": self.replay is not None,
            "compress makes several rows of an agent": self.compress is not None,
            f"algorithm.type: {algorithm.type} values the turns of one agent": algorithm.needs_critic,
            f"algorithm.type: {algorithm.type} asks a teacher about the turns of one agent": algorithm.needs_teacher,
            f"algorithm.type: {algorithm.type} compares with a greedy rollout, and with team.acts: {self.team.acts} a "
            "rollout has several outcomes": algorithm.needs_greedy and several,
            f"algorithm.credit: {algorithm.credit} with team.acts: {self.team.acts}, which goes with "
            f"{' or '.join(credits)}": algorithm.credit not in credits,
            "explore.tool takes the place of turns, and a speaker has no tools": self.explore.tool > 0,
        }
        _refuse("team", wrong)
        return self

    @model_validator(mode="after")
    def _teacher_is_asked(self) -> "OnlineConfig":
        self.check_teacher(self.algorithm)
        return self

    @model_validator(mode="after")
    def _critic_is_trained_whole(self) -> "OnlineConfig":
        if self.algorithm.needs_critic and self.optimizer.quantized:
            raise ValueError(
                f"algorithm {self.algorithm.type} trains a critic, all weights of a second model, and "
                "optimizer.lora.quantize: nf4 freezes them in 4 bits; leave quantize out, or use grpo, rloo, ..."
            )
        return self

    @model_validator(mode="after")
    def _ranks_give_weights_as_files(self) -> "OnlineConfig":
        if self.deepspeed:
            self.deepspeed.check(self.optimizer)
        if self.deepspeed and isinstance(self.engine, VLLMConfig) and self.engine.sync != "folders":
            raise ValueError(
                f"engine.sync: {self.engine.sync} takes weights from the stage's own process, and with deepspeed the "
                "ranks have them; use sync: folders"
            )
        return self


def _refuse(setting: str, wrong: Mapping[str, bool]) -> None:
    """Raise ValueError with the first of the reasons against a setting that hold."""
    for reason, holds in wrong.items():
        if holds:
            raise ValueError(f"{setting}: {reason}; leave {setting} out, or change that")
