"""Stages that make trajectories, or choose among them."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow.compute as pc
from pydantic import Field, model_validator

from agentrl.datastore.read.lookup import id_array
from agentrl.datastore.search.experience import estimate_tokens
from agentrl.engines import EngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.pipelines.handles import Model, NoteTable, Scores, Tasks, Trajectories
from agentrl.pipelines.parts.budget import CompressingSampling
from agentrl.pipelines.parts.common import REWARDS, count, environment, policy_of, refuse_measured
from agentrl.pipelines.parts.distinct import weights_in
from agentrl.pipelines.parts.in_context import InContext, Showing
from agentrl.pipelines.parts.outcomes import (
    FEW,
    out_of_context,
    record_excluded,
    record_failures,
    warn_of_demonstrations,
    warn_of_ends,
)
from agentrl.pipelines.parts.retries import Tried, retried, to_retry, tried
from agentrl.pipelines.parts.sampled_shards import RolloutSetup, divides, policy_to_divide, sample_divided, sample_here
from agentrl.pipelines.parts.scores import ByScorer, under
from agentrl.pipelines.parts.shards import Shards
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rewards import Rewards
from agentrl.rollouts.demonstrations import Demonstrations
from agentrl.rollouts.exploring import Explore
from agentrl.rollouts.limits import Limits, Retry
from agentrl.rollouts.negatives import REFUSAL, calls_tools, with_unneeded_tools, without_tools
from agentrl.rollouts.rationalize import HINT
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.trajectory import NOT_TRAINED, Trajectory

if TYPE_CHECKING:
    from agentrl.rollouts.runner import Attempt
    from agentrl.schemas.task import Task


class SynthesizeConfig(StageConfig):
    coverage: float = Field(1.0, gt=0, le=1, description="share of the tasks that the expert attempts")
    noise: float = Field(0.0, ge=0, le=1, description="probability of an error at each of the expert's turns")
    hinted: float = Field(
        0.0, ge=0, le=1, description="share of attempts that show the answer as a hint in the opening"
    )
    hint: str = Field(HINT, description="appended to the opening; {answer} stands for the ground truth")
    context: InContext = Field([])
    retry: Annotated[Retry, ADDED] = Field(
        Retry(), description="how often a demonstration is begun again whose environment failed"
    )


@stage("trajectories.synthesize", version=1)
def synthesize(
    context: Context,
    config: SynthesizeConfig,
    tasks: Tasks,
    notes: NoteTable | None = None,
    experience: list[Trajectories] = [],  # noqa: B006  (an input that may be left out)
) -> Trajectories:
    """Attempts of the environment's scripted expert. They carry text and no tokens.

    ``hinted`` attempts teach a policy without other training what a hint is, so that it can rationalise later; those
    that show ``context`` teach it what notes are.
    """
    showing = Showing(config.context, notes, estimate_tokens, experience)
    random = Random(f"coverage-{context.seed}")
    covered = [task for task in tasks.read() if random.random() < config.coverage]
    rows, expert = [], Demonstrations(config.retry, context.seed, config.noise)
    for number, task in enumerate(covered):
        hint = config.hint if random.random() < config.hinted else ""
        name, shown = context.trajectory_id(number), showing(task)
        both = " ".join(filter(None, [hint, shown.template]))
        if (row := expert.of(environment(context, task.env), task, name, both)) is not None:
            rows.append(row.model_copy(update={"tags": [*row.tags, *shown.tags]}))
    if expert.error is not None and not rows:
        raise expert.error
    context.append(rows)
    count(context, showing.counts + expert.counts)
    successes = sum(row.scored_success() for row in rows)
    context.metrics.update(rows=len(rows), success=successes / max(1, len(rows)))
    warn_of_demonstrations(rows, successes, expert)
    return context.select()


class SampleConfig(StageConfig):
    samples: int = Field(8, ge=1, description="rollouts of each task")
    sampling: CompressingSampling = CompressingSampling()
    rewards: Rewards = Field([], description=REWARDS)
    shard_tasks: int = Field(128, ge=1, description="tasks between two points at which a killed run resumes")
    engine: EngineChoice = DEFAULT_ENGINE
    limits: Limits = Limits()
    context: InContext = Field([])
    explore: Annotated[Explore, ADDED] = Field(Explore(), description="how rollouts explore beside sampling")
    retries: Annotated[int, ADDED] = Field(
        0,
        ge=0,
        description="in place of samples: attempts at each task that the rows of the input trajectories attempted and "
        "none of them solved; 0 samples every task",
    )

    @model_validator(mode="after")
    def _samples_or_retries(self) -> "SampleConfig":
        if self.retries and "samples" in self.model_fields_set:
            raise ValueError("set samples, for every task, or retries, for those that were not solved; not both")
        if self.explore.temperature:
            raise ValueError(
                "explore.temperature follows iterations, which are train.online's; set sampling.temperature"
            )
        if (self.explore.resample or self.explore.tool or self.explore.thinking) and not self.engine.exact:
            raise ValueError(
                f"explore needs the tokens of turns and their log-probs, and engine {self.engine.type} gives none; use "
                "an engine with token ids, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _has_others_to_keep_apart_from(self) -> "SampleConfig":
        if self.sampling.diversity and self.engine.type != "transformers":
            raise ValueError(
                f"sampling.diversity changes what is drawn at each token, which engine {self.engine.type} does not let "
                "us; use the embedded engine (type: transformers), or leave it out"
            )
        if self.sampling.diversity and (self.retries or self.samples) == 1:
            raise ValueError(
                "sampling.diversity does nothing to one rollout of a task; sample several, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _counts_tokens(self) -> "SampleConfig":
        if self.sampling.compress and not self.engine.exact:
            raise ValueError(
                f"sampling.compress counts tokens, which engine {self.engine.type} does not give; leave it out"
            )
        return self


@stage("trajectories.sample", version=1)
def sample(
    context: Context,
    config: SampleConfig,
    tasks: Tasks,
    model: Model | None = None,
    notes: NoteTable | None = None,
    trajectories: list[Trajectories] = [],  # noqa: B006  (an input that may be left out)
    experience: list[Trajectories] = [],  # noqa: B006
) -> Trajectories:
    """Rollouts of a policy, ``samples`` for each task, in the environments that the tasks name. The policy is the
    model, or if the engine is an endpoint, what is behind it.

    With ``retries``, only the tasks that ``trajectories`` did not solve are tried again. Such rows have the source
    ``reflected``, the last attempt before them as parent, and the tag ``trial:n``.
    """
    rows, before = _wanted(context, config, tasks, trajectories)
    if config.retries and not rows:
        return context.select()
    divided = divides(context.engine, config.engine)
    policy = (policy_to_divide if divided else policy_of)(model, config.engine)
    sampling = config.sampling.of(policy)
    showing = Showing(config.context, notes, policy.codec.count if policy else estimate_tokens, experience)
    finish, shards = _finishing(showing, before), Shards(context)
    missing = _missing(context, config, rows, shards, showing)

    def keep(shard: int, made: Sequence[Trajectory]) -> None:
        shards.append([finish(row, missing[shard][row.episode_id].task) for row in made], shard)

    copied = (model.path, model.name) if model else None
    setup = RolloutSetup(copied, config.engine, sampling, config.limits, tuple(config.rewards), config.explore)
    make = sample_divided if divided else sample_here
    record_failures(context, make(context, setup, policy, missing, keep))
    count(context, showing.counts)
    shards.finish(len(range(0, len(rows), config.shard_tasks)))
    chosen = context.select()
    _report(context, config, chosen, len(rows))
    return chosen


def _report(context: Context, config: SampleConfig, chosen: Trajectories, tasks: int) -> None:
    """Metrics of the rollouts, and warnings of how they ended."""
    made = chosen.table(["task_id", "success", "termination", "segment"])
    outcome = made.filter(pc.equal(made["segment"], 0))
    if config.sampling.compress:
        context.metrics.update(segments=made.num_rows, out_of_context=out_of_context(outcome))
    warn_of_ends(outcome)
    record_excluded(context, outcome)
    unscored = outcome["success"].null_count
    count(context, {"unscored": unscored} if unscored else {})
    solved = set(outcome.filter(outcome["success"])["task_id"].to_pylist())
    context.metrics.update(
        rows=outcome.num_rows,
        success=sum(filter(None, outcome["success"].to_pylist())) / max(1, outcome.num_rows - unscored),
        solved_tasks=len(solved),
        tasks=tasks,
    )


def _wanted(
    context: Context, config: SampleConfig, tasks: Tasks, trajectories: list[Trajectories]
) -> "tuple[list[Task], dict[str, Tried]]":
    """The tasks to sample, and what was tried before at those that are tried again."""
    rows = tasks.read()
    if not config.retries:
        if trajectories:
            raise ValueError("inputs.trajectories is wired, which only retries look at; set retries, or leave it out")
        return rows, {}
    if not trajectories:
        raise ValueError("retries needs the attempts before them; wire inputs.trajectories")
    before = tried(trajectories)
    chosen = to_retry(rows, before)
    context.metrics.update(unsolved=len(chosen))
    if not chosen:
        warnings.warn(f"nothing is tried again: no given row failed at one of the {len(rows)} tasks", stacklevel=3)
    return chosen, before


def _finishing(showing: Showing, before: "Mapping[str, Tried]") -> "Callable[[Trajectory, Task], Trajectory]":
    """What a row is called: what it was shown, and of a retry what was tried before."""

    def finish(row: Trajectory, task: "Task") -> Trajectory:
        if tags := showing.of(task).tags:
            row = row.model_copy(update={"tags": [*tags, *row.tags]})
        return retried(row, before[task.task_id]) if before else row

    return finish


def _missing(
    context: Context, config: SampleConfig, tasks: "Sequence[Task]", shards: Shards, showing: Showing
) -> "dict[int, dict[str, Attempt]]":
    """The attempts of each shard that the buffer lacks, by their ids, numbered as in the whole shard."""
    from agentrl.rollouts.runner import tickets

    missing = {}
    samples = config.retries or config.samples
    for shard, start in enumerate(range(0, len(tasks), config.shard_tasks)):
        part = tasks[start : start + config.shard_tasks]
        every = tickets(part, samples, context.trajectory_id, start * samples)
        numbers = {name: number for number, name in enumerate(every)}
        if attempts := shards.missing(every):
            missing[shard] = {
                name: replace(attempt, hint=showing(attempt.task).template, number=numbers[name])
                for name, attempt in attempts.items()
            }
    return missing


FEW_KEPT = 0.15
"""Share of the tasks below which rejection sampling warns."""


class RejectConfig(ByScorer):
    keep: int = Field(1, ge=1, description="at most this many successes of each task")
    agree: int = Field(1, ge=1, description="identical successes that a task needs of a run for the run to be kept")


@stage("trajectories.reject", version=2)
def reject(
    context: Context,
    config: RejectConfig,
    trajectories: list[Trajectories],
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
) -> Trajectories:
    """Rejection sampling: successes only, of each task the ``keep`` best and, among equals, those that were made most
    often, then those of fewest steps, then of fewest tokens. Identical runs of one task count once. A run that other
    runs repeat is more seldom right by luck. The segments of an episode are one run, and are kept together. Unscored
    rows, and rows that are tagged as not trained on, are left out and counted. Rows keep their weights, and one that is
    given several times is one run."""
    columns = [
        "trajectory_id",
        "episode_id",
        "segment",
        "task_id",
        "prompt",
        "success",
        "reward",
        "n_steps",
        "n_tokens",
    ]
    columns += ["tags", "input_ids"]
    tables = [selection.table(columns) for selection in under(trajectories, scores, config.scorer)]
    read = list({row["trajectory_id"]: row for table in tables for row in table.to_pylist()}.values())
    trained = [row for row in read if NOT_TRAINED not in row["tags"]]
    rows = [row for row in trained if row["success"] is not None and row["reward"] is not None]
    for row in rows:  # other settings of an environment may have drawn another question under the same id
        row["task_id"] = (row["task_id"], row["prompt"])
    same: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in map(_run, _episodes(filter(itemgetter("success"), rows))):
        same.setdefault((run["task_id"], run["tokens"] or run["trajectory_id"]), []).append(run)
    runs = [
        (
            -run["reward"],
            -len(equals),
            run["n_steps"],
            run["n_tokens"],
            run["trajectory_id"],
            run["ids"],
            run["task_id"],
        )
        for equals in same.values()
        for run in [min(equals, key=lambda run: (-run["reward"], run["trajectory_id"]))]
        if len(equals) >= config.agree
    ]
    kept: dict[tuple[str, str], list[list[str]]] = {}
    for *_, ids, task_id in sorted(runs):
        kept_of_task = kept.setdefault(task_id, [])
        if len(kept_of_task) < config.keep:
            kept_of_task.append(ids)
    chosen = sorted(name for ids_of_task in kept.values() for ids in ids_of_task for name in ids)
    context.metrics.update(
        before=len(read),
        unscored=len(trained) - len(rows),
        not_trained=len(read) - len(trained),
        after=len(chosen),
        tasks_solved=len({task for task, *_ in same}),
        tasks_kept=len(kept),
    )
    _warn_of_few(len(kept), len({row["task_id"] for row in rows}), config.agree)
    return context.select(chosen, weights_in(trajectories, id_array(chosen)))


def _episodes(rows: "Iterable[dict[str, Any]]") -> list[list[dict[str, Any]]]:
    """Rows by episode, each in the order of its segments. Rows with other rewards are not of one episode."""
    by_episode: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["task_id"], row["episode_id"] or row["trajectory_id"], row["reward"])
        by_episode.setdefault(key, []).append(row)
    return [sorted(each, key=lambda row: (row["segment"], row["trajectory_id"])) for each in by_episode.values()]


def _run(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """An episode, with the sums of its rows."""
    sums = {name: sum(row[name] for row in rows) for name in ("n_steps", "n_tokens")}
    tokens = tuple(tuple(row["input_ids"]) for row in rows)
    return {**rows[0], **sums, "tokens": tokens if any(tokens) else (), "ids": [row["trajectory_id"] for row in rows]}


def _warn_of_few(kept: int, tasks: int, agree: int) -> None:
    if tasks >= FEW and kept < FEW_KEPT * tasks:
        asked = f" that was made {agree} times" if agree > 1 else ""
        warnings.warn(
            f"only {kept} of {tasks} tasks have a success{asked}, and training on so few rows teaches little: the "
            "policy that made them needs a better start (look at its evaluation; more or better demonstrations, more "
            "steps, another seed), or easier tasks, hints or more samples of each",
            stacklevel=3,
        )


class NegativesConfig(StageConfig):
    share: float = Field(0.1, gt=0, le=1, description="negatives of either kind, per trajectory that they are made of")
    refusal: str = Field(REFUSAL, description="the answer to a request that needs tools although none are offered")


@stage("trajectories.negatives", version=1)
def negatives(context: Context, config: NegativesConfig, trajectories: list[Trajectories]) -> Trajectories:
    """Examples in which no tool should be called (Agent-FLAN). For a ``share`` of the trajectories that call tools, the
    request is given again without any tool on offer. For a ``share`` of the conversations without tools, the
    conversation is given again with the tools of another trajectory. Train on them beside the rest, with a chat
    template that shows tools. Rows of other splits than train are refused."""
    random = Random(f"negatives-{context.seed}")
    rows = {row.trajectory_id: row for selection in trajectories for row in selection.trained_on()}.values()
    refuse_measured({row.trajectory_id: row.split for row in rows})
    agentic = [row for row in rows if calls_tools(row) and row.tools != "[]"]
    plain = [row for row in rows if not calls_tools(row) and row.tools == "[]"]
    if not agentic:
        raise ValueError(
            "no trajectory calls a tool that it lists; give an agent's, and conversations without tools beside them"
        )
    chosen = [row for row in agentic if random.random() < config.share]
    made = [without_tools(row, context.trajectory_id(n), config.refusal) for n, row in enumerate(chosen)]
    for row in plain:
        if random.random() < config.share:
            name = context.trajectory_id(len(made))
            made.append(with_unneeded_tools(row, name, random.choice(agentic).tools))
    context.append(made)
    context.metrics.update(without_tools=len(chosen), with_unneeded_tools=len(made) - len(chosen))
    return context.select()
