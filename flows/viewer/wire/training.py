"""What the viewer's server answers about training, runs at work, and the doctor; see
:mod:`agentrl.flows.viewer.wire`."""

from agentrl.flows.viewer.wire import Answer

# GET /api/training


class SickBand(Answer):
    """``metric`` counts as sick ``above`` the bound, or below it; ``counts`` is what is compared with it."""

    metric: str
    bound: float
    above: bool
    counts: str


class TrainingStage(Answer):
    """A training artifact, a stage that trains now, or one that ended without an artifact: then ``ended`` says how, as
    in ``killed``. ``artifact`` is STAGE/FINGERPRINT, None if there is none; then its metrics come from /api/live/lines.
    ``series`` are the columns of its metrics, ``bands`` the doctor's bounds on them; without an artifact those that do
    not depend on its config. ``when`` is ISO 8601."""

    artifact: str | None
    stage: str
    uses: str
    run_id: str
    when: str
    steps: int
    series: list[str]
    bands: list[SickBand]
    ended: str | None = None


class TrainingStages(Answer):
    """Newest first, those without an artifact before the others."""

    stages: list[TrainingStage]


# GET /api/training/metrics?artifact= -> Arrow: one row per step, a column per metric
# GET /api/training/rows?artifact=&step= -> Arrow, header X-Version: the rows that a step learned from: trajectory_id,
# pair_id, label, weight (mean over trained tokens, online the advantage), trained (false: left out), group_id, reward,
# success, task_id, env, policy_version; the last six are null if the row is not in the buffer any more. staleness is
# how many versions of the weights later than they sampled it the row was trained on; null if that was not recorded


# GET /api/events -> server-sent events, one Pulse each, at once and whenever something changed


class StageProgress(Answer):
    """How far a stage is: ``done`` of ``total`` (None if nobody knows how much there is to do), and the seconds that
    are left at the speed so far."""

    done: int
    total: int | None
    left_s: float | None


class StoppedRun(Answer):
    """A run that failed or was killed, after which no run of its pipeline was completed, and the stage at which it
    stopped."""

    run_id: str
    pipeline: str
    stage: str | None
    state: str


class Pulse(Answer):
    """``version`` of the buffer; the state of the newest 50 runs by id, newest first; of those at work, by RUN/STAGE,
    the status of the stages, how far they are, and the bytes of the live logs. ``stopped`` are those of them that
    failed or were killed and not run again. A client asks for rows and lines after what it has."""

    version: int | None
    runs: dict[str, str]
    stages: dict[str, str]
    progress: dict[str, StageProgress]
    live: dict[str, int]
    stopped: list[StoppedRun]


# GET /api/live/lines?run_id=&stage=&cursor=


class LiveAnswer(Answer):
    """Lines after a cursor (bytes), each the JSON of a step's metrics, and the cursor after them. If the log began
    again, ``restarted`` is true and so do the lines."""

    lines: list[str]
    cursor: int
    restarted: bool


# GET /api/run?run=ID


class RunStage(Answer):
    """A stage of a run. ``artifact`` is STAGE/FINGERPRINT if it is there; ``uses`` is empty if neither it nor the
    record says that. ``cause`` says why it failed, and ``warnings`` what it warned of. ``live`` is true if its metrics
    are written now, ``curves`` if the metrics of a stage without an artifact are there. ``progress`` is how far it is,
    or how far it came. ``log`` is the file of its log on the viewer's machine, empty if there is none; ``log_tail`` has
    its last lines, for stages that are at work or were stopped."""

    stage: str
    uses: str
    status: str
    artifact: str | None
    reasons: list[str]
    cause: str
    warnings: list[str]
    started: str
    seconds: float | None
    live: bool
    curves: bool
    progress: StageProgress | None
    log: str
    log_tail: str


class RunAnswer(Answer):
    """A run with its stages. ``gone`` says how it is known that a killed one ended. ``go_on`` is the command that does
    the rest of a run that was stopped, empty if nothing is left."""

    run_id: str
    pipeline: str
    state: str
    command: str
    host: str
    started: str
    seconds: float | None
    gone: str
    go_on: str
    stages: list[RunStage]


# GET /api/doctor?run=ID


class Symptom(Answer):
    """A finding of a stage, in words: what was measured, the bound beyond which it counts as sick, and what helps.
    ``rows`` show it, at most 50, at these ``tokens`` if tokens do. ``artifact`` is STAGE/FINGERPRINT, None if it is
    gone, and ``step`` is the step that shows it best, None if none does."""

    stage: str
    artifact: str | None
    name: str
    evidence: str
    threshold: str
    remedy: str
    rows: list[str]
    tokens: list[int]
    step: int | None


class Diagnosis(Answer):
    """``working`` is true while the doctor looks: ask again in a second. ``problem`` says why there are no findings."""

    run_id: str
    working: bool
    problem: str | None
    stages: list[str]
    findings: list[Symptom]
