"""What the viewer's server answers about two runs side by side, and about settings; see
:mod:`agentrl.flows.viewer.wire`."""

from typing import Any

from agentrl.flows.viewer.wire import Answer

# GET /api/runs/compare?a=RUN&b=RUN&at=


class RunName(Answer):
    """``run_id`` is STORE:ID if the run is of another store than this one."""

    run_id: str
    pipeline: str
    when: str
    state: str


class RunSide(Answer):
    """``seconds`` is None while it runs."""

    run_id: str
    pipeline: str
    when: str
    seconds: float | None
    state: str
    command: str


class TwoValues(Answer):
    """A metric, or the rows of an output, in both runs; None if one of them has it not."""

    name: str
    a: Any
    b: Any


class TaskOutcomes(Answer):
    """Attempts at a task in both runs, and how many of those with an outcome succeeded."""

    env: str
    task_id: str
    prompt: str
    a_solved: int
    a_n: int
    b_solved: int
    b_n: int


class ChangedRows(Answer):
    """The rows of a selection in both runs: ``a`` and ``b`` rows, of which ``shared`` are the same. ``a_artifact`` and
    ``b_artifact`` are STAGE/FINGERPRINT, as /buffer?among= takes them, with STORE: before them if they are of another
    store. ``tasks`` are attempted in both; ``differing``
    of them have another share of successes, and are listed first to last by task, at most 200. ``only_a`` and
    ``only_b`` tasks are attempted in one run alone."""

    output: str
    a_artifact: str
    b_artifact: str
    a: int
    b: int
    shared: int
    tasks: int
    differing: int
    only_a: int
    only_b: int
    examples: list[TaskOutcomes]


class StageDifference(Answer):
    """``only_in`` is the run that has the stage, None if both have it. ``ingredients`` are lines such as
    ``config beta 0.1 -> 0.3``, as `agentrl diff` has them. ``other_tasks``: it is an evaluation of other tasks in each
    run, so nothing of it is compared task by task, and ``changed`` is empty."""

    stage: str
    only_in: str | None
    ingredients: list[str]
    metrics: list[TwoValues]
    rows: list[TwoValues]
    other_tasks: bool
    changed: list[ChangedRows]


class RunsCompared(Answer):
    """``runs`` are the newest 200 of this store and of each beside it, newest first. Without ``b`` it is the newest run
    of this store, without ``a`` the run of the same pipeline before it; they are None if there is none. ``same`` are
    the stages that both runs made alike, ``stages`` the others. ``version`` is that of this store's buffer which told
    the outcomes, None if nothing was ever appended."""

    version: int | None
    runs: list[RunName]
    a: RunSide | None
    b: RunSide | None
    same: list[str]
    stages: list[StageDifference]


# GET /api/settings?pipeline=


class Setting(Answer):
    """``name`` is STAGE.KEY, as /api/plan takes it; ``value`` is JSON."""

    name: str
    value: str


class KnownSettings(Answer):
    """What the stages of a pipeline's newest run were configured with, as far as their artifacts are there."""

    pipeline: str
    settings: list[Setting]
