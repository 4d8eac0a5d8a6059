"""The stage that retries what was never solved with a hint, and takes the hint out (STaR)."""

import json
from dataclasses import replace
from string import Formatter
from typing import TYPE_CHECKING

from pydantic import Field, field_validator, model_validator

from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Model, NoteTable, Tasks, Trajectories
from agentrl.pipelines.parts.budget import SamplingConfig, check_room
from agentrl.pipelines.parts.common import count, load_policy, record_dialect, rollout_runner
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.parts.in_context import InContext, Showing
from agentrl.pipelines.parts.outcomes import record_failures, warn_of_ends
from agentrl.pipelines.parts.pairing import by_task
from agentrl.pipelines.parts.retries import check_trained_on
from agentrl.pipelines.parts.shards import Shards
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.rationalize import HINT, literal, only_repeats, strip_hint
from agentrl.schemas.trajectory import NOT_TRAINED, Role, Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.models.policy import Policy
    from agentrl.schemas.task import Task


class RationalizeConfig(StageConfig):
    samples: int = Field(4, ge=1, description="retries of each task that was never solved")
    hint: str = Field(
        HINT, description="appended to the opening; {answer} stands for the ground truth, {error} for what a failed "
        "attempt ended with: the last observation, cut to 300 characters",
    )  # fmt: skip
    keep: int = Field(1, ge=1, description="at most this many solved retries of each task")
    sampling: SamplingConfig = SamplingConfig()
    engine: TokenEngineChoice = DEFAULT_ENGINE
    limits: Limits = Limits()
    context: InContext = Field([])

    @field_validator("hint")
    @classmethod
    def _is_a_template(cls, hint: str) -> str:
        try:
            names = {name for _, name, _, _ in Formatter().parse(hint) if name is not None}
        except ValueError as error:
            raise ValueError(f"{hint!r} is no template: {error}; write braces twice, as in {{{{x}}}}") from None
        if unknown := sorted(names - {"answer", "error"}):
            raise ValueError(f"{{{unknown[0]}}} stands for nothing; a hint may have {{answer}} and {{error}}")
        return hint

    @property
    def shows_errors(self) -> bool:
        return not self.context and "{error}" in self.hint

    @model_validator(mode="after")
    def _hint_or_context(self) -> "RationalizeConfig":
        if self.context and "hint" in self.model_fields_set:
            raise ValueError("context is shown in place of the hint, so hint would do nothing; leave one of them out")
        return self


@stage("trajectories.rationalize", version=1)
def rationalize(
    context: Context,
    config: RationalizeConfig,
    model: Model,
    tasks: Tasks,
    trajectories: list[Trajectories],
    notes: NoteTable | None = None,
    experience: list[Trajectories] = [],  # noqa: B006  (an input that may be left out)
) -> Trajectories:
    """Retry the tasks that no given trajectory solved, with the answer as a hint, or what an attempt ended with (then
    tasks without a failed row are left out), or with ``context``, such as notes (guidance; then tasks without notes
    are left out). The output holds the solved retries without it; the retries as
    they were sampled stay in the buffer, with source ``hinted``."""
    solved, rows = _solved(trajectories), tasks.read()
    unsolved = {task.task_id: task for task in rows if task.task_id not in solved}
    check_trained_on(list(unsolved.values()))
    policy = load_policy(model, config.engine)
    record_dialect(context, policy)
    showing = Showing(config.context, notes, policy.codec.count, experience)
    if config.context:
        count(context, {"without_notes": sum(not showing.of(task).text for task in unsolved.values())})
        unsolved = {name: task for name, task in unsolved.items() if showing.of(task).text}

    errors = _errors(context, trajectories, unsolved) if config.shows_errors else {}
    if config.shows_errors:
        count(context, {"without_error": len(unsolved.keys() - errors.keys())})
        unsolved = {name: task for name, task in unsolved.items() if name in errors}

    def hint_of(task: "Task") -> str:
        if config.context:
            return showing.of(task).template
        return config.hint.replace("{error}", literal(errors.get(task.task_id, "")))

    _retry(context, config, policy, rows, unsolved, showing, hint_of)
    retried = context.select(sorted(_of_source(context, "hinted")))
    warn_of_ends(retried.table(["termination", "success"]), "retries")
    hinted = retried.read()
    stripped: list[Trajectory] = []
    ungrounded = 0
    for retries in by_task(hinted):
        task = unsolved[retries[0].task_id]
        right = [row for row in retries if row.success]
        shown = hint_of(task).format(answer=json.loads(task.ground_truth))
        good = sorted((r for r in right if not only_repeats(r, task, shown)), key=lambda r: (r.n_steps, r.n_tokens))
        ungrounded += len(right) - len(good)
        for retry in good[: config.keep]:
            name = context.trajectory_id(len(hinted) + len(stripped))
            row = strip_hint(retry, task, hint_of(task), policy.codec, name)
            own = [tag for tag in row.tags if tag not in showing.of(task).tags]
            stripped.append(row.model_copy(update={"tags": own}))
    context.append(stripped, shard=1)
    context.metrics.update(unsolved=len(unsolved), retries=len(hinted), rationalized=len(stripped))
    count(context, {"ungrounded": ungrounded})
    return context.select([row.trajectory_id for row in stripped])


def _solved(trajectories: list[Trajectories]) -> set[str]:
    """Tasks that a row solved which may be trained on."""
    columns = ["task_id", "success", "tags"]
    tables = (selection.table(columns).to_pydict() for selection in trajectories)
    rows = (row for table in tables for row in zip(*table.values(), strict=True))
    return {task_id for task_id, success, tags in rows if success and NOT_TRAINED not in tags}


LONGEST_ERROR = 300
"""Characters of an error that a hint shows; the end, where tests and tracebacks say what went wrong."""


def _errors(context: Context, trajectories: list[Trajectories], unsolved: "dict[str, Task]") -> dict[str, str]:
    """What the last failed attempt at each unsolved task ended with: its last observation; without one, how it ended.
    Rows that are not trained on, and rows of failures that are not the policy's, say nothing."""
    errors: dict[str, str] = {}
    for row in rows_of(trajectories):
        if row.task_id not in unsolved or row.success is not False or NOT_TRAINED in row.tags:
            continue
        seen = [message.content for message in row.messages if message.role is Role.TOOL]
        errors[row.task_id] = seen[-1].strip() if seen else f"ended by {row.termination.value}"
    count(context, {"errors_cut": sum(len(text) > LONGEST_ERROR for text in errors.values())})
    return {name: text[-LONGEST_ERROR:] for name, text in errors.items()}


def _retry(
    context: Context,
    config: RationalizeConfig,
    policy: "Policy",
    rows: "list[Task]",
    unsolved: "dict[str, Task]",
    showing: Showing,
    hint_of: "Callable[[Task], str]",
) -> None:
    """Sample the retries that the buffer does not hold yet. ``rows`` are all tasks."""
    from agentrl.rollouts.runner import tickets

    shards = Shards(context)
    every = tickets(list(unsolved.values()), config.samples, context.trajectory_id)
    attempts = {name: replace(attempt, hint=hint_of(attempt.task)) for name, attempt in shards.missing(every).items()}
    if not attempts:
        return
    sampling = config.sampling.of(policy)
    with rollout_runner(context, policy, rows, sampling, config.engine, config.limits) as runner:
        check_room(policy, runner, list(unsolved.values()), hint_of)
        made = runner.run(list(attempts.values()), stream(context.seed, "hinted"), list(attempts), source="hinted")
    tags = [showing(attempt.task).tags for attempt in attempts.values()]
    made = [row.model_copy(update={"tags": [*tag, *row.tags]}) for row, tag in zip(made, tags, strict=True)]
    count(context, showing.counts)
    shards.append(made, 0)
    shards.finish(2)
    record_failures(context, runner)


def _of_source(context: Context, source: str) -> list[str]:
    table = context.buffer.read(context.row_ids(), ["trajectory_id", "source"])
    return [row["trajectory_id"] for row in table.to_pylist() if row["source"] == source]
