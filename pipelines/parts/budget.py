"""How many tokens a rollout may have: what a config leaves out comes from the model, and what cannot work is refused
before anything is sampled."""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from agentrl.engines.base import Compress, Sampling
from agentrl.pipelines.stage import StageConfig
from agentrl.rollouts.rationalize import with_hint
from agentrl.schemas.annotations import ADDED

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.rollouts.openings import Opener
    from agentrl.rollouts.runner import RolloutRunner
    from agentrl.schemas.task import Task

ROOM = 16
"""Tokens after the prompt without which a rollout says nothing: about those of a short tool call."""

LOOKED_AT = 8
"""Tasks with the shortest prompts, and as many with the longest, that are rendered."""


class TokenLimits(StageConfig):
    """How long rollouts may become."""

    max_turn_tokens: int | None = Field(
        None,
        ge=1,
        description="sampled tokens in one turn; null: max_new_tokens of the model's generation config, if any",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="all tokens of a row, prompt and observations included; null: the model's context length",
    )

    def sampling(self, policy: "Policy | None", **settings: Any) -> Sampling:
        """These limits for a policy, with other ``settings`` of :class:`Sampling`. Without a policy, an endpoint
        samples, which knows its own context.

        Raises ValueError if the model has no context length and ``max_tokens`` is not set, or is beyond it; and if an
        endpoint is not told how long a turn may be.
        """
        if policy is None:
            if self.max_turn_tokens is None:
                raise ValueError("max_turn_tokens is not set, and an endpoint names no default: set it")
            return Sampling(max_turn_tokens=self.max_turn_tokens, max_tokens=self.max_tokens or 2**31 - 1, **settings)
        context = context_length(policy)
        if self.max_tokens is None and context is None:
            raise ValueError(f"the model {policy.name} names no context length: set max_tokens")
        if self.max_tokens is not None and context is not None and self.max_tokens > context:
            raise ValueError(
                f"max_tokens {self.max_tokens} is beyond the context of {context} tokens of the model {policy.name}; "
                "lower it, or leave it out"
            )
        total = self.max_tokens or context
        assert total is not None
        generation = getattr(policy.model, "generation_config", None)
        turn = self.max_turn_tokens or getattr(generation, "max_new_tokens", None) or total
        return Sampling(max_turn_tokens=turn, max_tokens=total, **settings)


class SamplingConfig(TokenLimits):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0, description="0 takes the most likely token")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens with this probability together")
    top_k: int = Field(0, ge=0, description="0 keeps all tokens")

    def of(self, policy: "Policy | None") -> Sampling:
        """See :meth:`TokenLimits.sampling`."""
        return self.sampling(policy, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


class Compressing(TokenLimits):
    """Limits of rollouts whose context may be compressed."""

    compress: Annotated[Compress | None, ADDED] = Field(
        None,
        description="{limit, keep_last, by, ...}: compress the context before a prompt has more tokens than limit, and "
        "go on with a new segment; null: an episode is one row",
    )

    def sampling(self, policy: "Policy | None", **settings: Any) -> Sampling:
        """See :meth:`TokenLimits.sampling`. Raises ValueError too if a turn after a prompt of ``compress.limit`` tokens
        does not fit into a row."""
        sampling = super().sampling(policy, **settings)
        if self.compress is None:
            return sampling
        turns = 2 if self.compress.by == "summary" else 1
        needed = self.compress.limit + turns * sampling.max_turn_tokens
        if needed > sampling.max_tokens:
            raise ValueError(
                f"compress.limit {self.compress.limit} leaves no room: with {turns} turns of max_turn_tokens "
                f"{sampling.max_turn_tokens} after it{', the last a summary,' * (turns - 1)} a row has {needed} "
                f"tokens, and max_tokens is {sampling.max_tokens}; set compress.limit to "
                f"{max(0, sampling.max_tokens - turns * sampling.max_turn_tokens)} or less, or lower max_turn_tokens"
            )
        return sampling.model_copy(update={"compress": self.compress})


class CompressingSampling(Compressing, SamplingConfig):
    """How tokens of rollouts are drawn whose context may be compressed, and which may keep apart."""

    diversity: Annotated[float, ADDED] = Field(
        0.0,
        ge=0,
        description="rollouts of a task keep apart: a token's logit is lowered by this for each rollout that took it "
        "at the same place; with temperature 0 it is diverse beam search with one beam a group. Of the embedded engine",
    )

    def of(self, policy: "Policy | None") -> Sampling:
        """See :meth:`TokenLimits.sampling`."""
        plain = super().of(policy)
        return plain.model_copy(update={"diversity": self.diversity}) if self.diversity else plain


def context_length(policy: "Policy") -> int | None:
    """Tokens that a model was made for; None if its config does not say."""
    return getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)


def check_room(
    policy: "Policy | None",
    runner: "RolloutRunner | Opener",
    tasks: "Sequence[Task]",
    hint: "Callable[[Task], str] | None" = None,
) -> None:
    """Compare prompts, as the model's chat template renders them with their tools, with the limit of tokens. They have
    the ``hint`` of their task, a template for :func:`agentrl.rollouts.rationalize.with_hint`.

    Raises ValueError if even the shortest prompt leaves less than :data:`ROOM` tokens. A warning names the longest if
    that leaves less.
    """
    if policy is None:
        return
    sampling = runner.sampling
    ordered = sorted(tasks, key=lambda task: len(task.prompt))
    chosen = {task.task_id: task for task in [*ordered[:LOOKED_AT], *ordered[-LOOKED_AT:]]}
    shown = zip(chosen.values(), runner.openings(list(chosen.values())), strict=True)
    sizes: dict[str, int] = {}
    for task, (opening, tools) in shown:
        if not opening:
            continue
        if hint and (template := hint(task)):
            opening = with_hint(opening, task, template)
        sizes[task.task_id] = len(policy.codec.opening(opening, tools))
    if not sizes:
        return
    room = min(ROOM, sampling.max_turn_tokens)
    shortest, longest = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
    what = "tokens, rendered with the model's chat template and tools"
    if (compress := sampling.compress) and sizes[shortest] + ROOM > compress.limit:
        raise ValueError(
            f"compress.limit {compress.limit} is that of a prompt, and the shortest one, of task {shortest}, has "
            f"{sizes[shortest]} {what}, the longest {sizes[longest]}; set compress.limit to "
            f"{sizes[longest] + 4 * ROOM} or more"
        )
    if sizes[shortest] + room > sampling.max_tokens:
        raise ValueError(
            f"max_tokens {sampling.max_tokens} leaves no room for a turn: the shortest prompt, of task {shortest}, has "
            f"{sizes[shortest]} {what}, the longest {sizes[longest]}; set max_tokens to {sizes[longest] + 4 * room} or "
            "more, or use a model with a longer context"
        )
    if sizes[longest] + room > sampling.max_tokens:
        warnings.warn(
            f"the prompt of task {longest} has {sizes[longest]} {what}: with max_tokens {sampling.max_tokens} its "
            "rollouts end before they say anything",
            stacklevel=2,
        )
