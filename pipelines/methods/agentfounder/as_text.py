"""The stage that writes stored rows as texts for continued pre-training."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Literal

from pydantic import Field

from agentrl.advantages.turns import acting, own_turns
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.methods.agentfounder.texts import Decisions, plan, reason
from agentrl.pipelines.parts.common import count, refuse_measured, written_about
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, Termination, Trajectory

SOURCE = "text"


class TextConfig(StageConfig):
    kinds: list[Literal["plan", "reason", "decide"]] = Field(
        ["plan", "reason", "decide"],
        min_length=1,
        description="plan: the calls of a success, before any is made; reason: the answer of a success, from what "
        "tools answered; decide: a row with what other rows did in its states, and what became of it",
    )
    options: int = Field(4, ge=2, description="turns that decide shows of a state at most, the row's own among them")


@stage("trajectories.as_text", version=1)
def as_text(context: Context, config: TextConfig, trajectories: list[Trajectories]) -> Trajectories:
    """Plain texts for continued pre-training by ``train.sft`` (AgentFounder: Su et al. 2025, arXiv 2509.13310): first-
    order action synthesis (``plan``, ``reason``) and higher-order (``decide``). All that a text says was executed:
    plans and conclusions are those of rows that succeeded, and alternatives are turns that rows took in the same state,
    such as those of ``trajectories.fork``, each with how many of these rows succeeded. Continuations give alternatives
    and no texts of their own. An equal text comes once.

    Raises ValueError if a row is not of the train split.
    """
    rows, left = _rows(trajectories)
    whole = [row for row in rows if own_turns(row)[0] == 0]
    decisions, random = Decisions(), Random(stream(context.seed, "options"))
    for row in rows:
        decisions.add(row)
    texts: dict[str, tuple[str, Trajectory]] = {}
    for row in whole:
        for kind in dict.fromkeys(config.kinds):
            if kind == "decide":
                text = decisions.text(row, config.options, random)
                left["no_alternatives"] += text is None
            else:
                text = (plan if kind == "plan" else reason)(row) if row.success else None
            if text:
                left["doubled"] += text in texts
                texts.setdefault(text, (kind, row))
    made = [
        _row(row, context.trajectory_id(number), kind, text) for number, (text, (kind, row)) in enumerate(texts.items())
    ]
    context.append(made)
    kinds = Counter(kind for kind, _ in texts.values())
    count(context, {"rows": len(rows), "whole": len(whole), "texts": len(made), **kinds, **left})
    if not made:
        raise ValueError(
            f"no text is made of {len(rows)} rows: plans and conclusions need successes, and decisions need rows that "
            "did different things in one state; give several rollouts of each task, or continuations"
        )
    return context.select()


def _rows(trajectories: Sequence[Trajectories]) -> tuple[list[Trajectory], Counter[str]]:
    """Scored rows with turns, each once, and how many others were left out, by reason."""
    rows = list(rows_of(trajectories))
    refuse_measured({row.trajectory_id: row.split for row in rows})
    left, kept = Counter[str](), list[Trajectory]()
    for row in rows:
        if NOT_TRAINED in row.tags:
            left["not_trained"] += 1
        elif row.success is None:
            left["unscored"] += 1
        elif row.segment or row.agent != "main":
            left["part_of_episode"] += 1
        elif not acting(row.messages) or not own_turns(row):
            left["no_turns"] += 1
        else:
            kept.append(row)
    return kept, left


def _row(row: Trajectory, name: str, kind: str, text: str) -> Trajectory:
    return written_about(
        row,
        name,
        SOURCE,
        prompt=row.prompt,
        termination=Termination.UNKNOWN,
        tags=[kind],
        n_steps=1,
        messages=[Message(role=Role.ASSISTANT, content=text)],
    )
