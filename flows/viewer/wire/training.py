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


# POST /api/replay {"artifact": ..., "step": ..., "set": ["algorithm.clip_high=0.3", ...]} -> a ReplayAnswer that works
# GET /api/replay?artifact=&step= -> Replayings; POST /api/replay/stop {} ends the one that works


class ReplayAnswer(Answer):
    """A training step computed again, with other settings if there are any. ``working`` is true while that runs, since
    ``seconds``: ask again in a second. ``problem`` says why it failed. ``recorded`` and ``replayed`` are metrics by
    name; ``equal`` says whether loss and gradient norm agree to six digits. ``rows`` is how many the step has."""

    artifact: str
    step: int
    settings: list[str]
    working: bool
    seconds: float
    problem: str | None
    rows: int | None
    recorded: dict[str, float | None]
    replayed: dict[str, float | None]
    equal: bool | None


class Replayings(Answer):
    """The replays of a step since the viewer started, oldest first."""

    replays: list[ReplayAnswer]


# GET /api/events -> server-sent events, one Pulse each, at once and whenever something changed


class Pulse(Answer):
    """``version`` of the buffer; the state of the newest 50 runs by id, newest first; of those at work, by RUN/STAGE,
    the status of the stages and the bytes of the live logs. A client asks for rows and lines after what it has."""

    version: int | None
    runs: dict[str, str]
    stages: dict[str, str]
    live: dict[str, int]


# GET /api/live/lines?run_id=&stage=&cursor=


class LiveAnswer(Answer):
    """Lines after a cursor (bytes), each the JSON of a step's metrics, and the cursor after them. If the log began
    again, ``restarted`` is true and so do the lines."""

    lines: list[str]
    cursor: int
    restarted: bool


# GET /api/run?run=ID


class RunStage(Answer):
    """A stage of a run. ``artifact`` is STAGE/FINGERPRINT and ``uses`` what made it, if it is there; ``cause`` says why
    it failed, and ``warnings`` what it warned of. ``live`` is true if its metrics are written now. ``log_tail`` is
    there for stages that failed or are at work."""

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
    log_tail: str


class RunAnswer(Answer):
    """A run with its stages. ``gone`` says how it is known that a killed one ended."""

    run_id: str
    pipeline: str
    state: str
    command: str
    host: str
    started: str
    seconds: float | None
    gone: str
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
