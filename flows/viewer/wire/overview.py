"""What the viewer's server answers about pipelines, runs and plans; see :mod:`agentrl.flows.viewer.wire`."""

from typing import Literal

from agentrl.flows.viewer.wire import Answer

# GET /api/overview?pipeline=NAME


class StageInput(Answer):
    """An edge of the graph: the stage that is read. ``reason`` says why this edge makes the stage run; None if it does
    not."""

    stage: str
    reason: str | None


class StageBox(Answer):
    """A stage of the pipeline. ``status`` is that of the plan (cached, run, blocked, skipped), ``running``, or how the
    stage ended in the newest run if it is to run again (failed, killed, cancelled); ``reason`` then says why. ``x`` is
    the column and ``y`` the row in the drawing, from 0. ``artifact`` is STAGE/FINGERPRINT if it is there."""

    id: str
    stage: str
    uses: str
    artifact: str | None
    status: Literal["cached", "run", "blocked", "skipped", "running", "failed", "killed", "cancelled"]
    reason: str
    fingerprint: str
    seconds: float | None
    inputs: list[StageInput]
    x: int
    y: int


class RunLine(Answer):
    """A run, newest first. ``when`` is ISO 8601, UTC. ``failed_stage`` is the stage at which it stopped, if it failed,
    was killed or was cancelled; ``cause`` says why, as far as that is known, and ``log_tail`` holds the last lines of
    its log. ``go_on`` is the command that does the rest, empty if nothing is left."""

    run_id: str
    pipeline: str
    when: str
    seconds: float | None
    state: str
    failed_stage: str | None
    cause: str
    log_tail: str
    go_on: str


class Overview(Answer):
    """``version`` is None, and ``rows`` 0, if nothing was ever appended. ``pipeline`` is the one that ``stages``
    shows, that of the newest run unless asked for another. If it is not planned, ``stages`` is what its newest run
    recorded and ``problem`` says why. ``runs`` are the newest of ``n_runs``. ``planning`` is true while the plan is
    being made: ask again in a second."""

    store: str
    version: int | None
    rows: int
    pipeline: str | None
    problem: str | None
    planning: bool
    stages: list[StageBox]
    runs: list[RunLine]
    n_runs: int
    pipelines: list[str]


# GET /api/plan?pipeline=NAME&set=dpo.beta=0.3&set=...


class PlanAnswer(Answer):
    """What would run if these settings had these values; nothing is run. A setting is as `agentrl plan --set` takes it,
    or STAGE.KEY for ``stages.STAGE.with.KEY``. ``problem`` says why there is no plan. ``planning`` is true while it is
    being made: ask again in half a second."""

    pipeline: str
    settings: list[str]
    problem: str | None
    planning: bool
    stages: list[StageBox]
