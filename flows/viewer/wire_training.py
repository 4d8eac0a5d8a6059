"""What the viewer's server answers about training, runs at work, and the doctor; see :mod:`flows.viewer.wire`."""

from flows.viewer.wire import Answer

# GET /api/training


class TrainingStage(Answer):
    """A training artifact, or a stage that trains now. ``artifact`` is STAGE/FINGERPRINT, None while it is at work;
    then its metrics come from /api/live/lines. ``series`` are the columns of its metrics. ``when`` is ISO 8601."""

    artifact: str | None
    stage: str
    uses: str
    run_id: str
    when: str
    steps: int
    series: list[str]


class TrainingStages(Answer):
    """Newest first, those at work before the others."""

    stages: list[TrainingStage]


# GET /api/training/metrics?artifact= -> Arrow: one row per step, a column per metric
# GET /api/training/rows?artifact=&step= -> Arrow: the rows that a step learned from: trajectory_id, pair_id, label,
# weight (mean over trained tokens, online the advantage), trained (false: left out), group_id, reward, success,
# task_id, policy_version; the last five are null if the row is not in the buffer any more


# POST /api/replay {"artifact": ..., "step": ..., "set": ["algorithm.clip_high=0.3", ...]} starts it,
# GET /api/replay?artifact=&step=&set=&set= tells how far it is, and POST /api/replay/stop {} ends it


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


# GET /api/events -> server-sent events, one Pulse each, at once and whenever something changed


class Pulse(Answer):
    """``version`` of the buffer; the state of the runs by id, newest 50; bytes of the live logs of those at work, by
    RUN/STAGE. A client asks for rows and lines after what it has."""

    version: int | None
    runs: dict[str, str]
    live: dict[str, int]


# GET /api/live/lines?run_id=&stage=&cursor=


class LiveAnswer(Answer):
    """Lines after a cursor (bytes), each the JSON of a step's metrics, and the cursor after them. If the log began
    again, ``restarted`` is true and so do the lines."""

    lines: list[str]
    cursor: int
    restarted: bool


# GET /api/doctor?run=ID


class Symptom(Answer):
    """A finding of a stage, in words: what was measured, the bound beyond which it counts as sick, and what helps."""

    stage: str
    name: str
    evidence: str
    threshold: str
    remedy: str


class Diagnosis(Answer):
    """``working`` is true while the doctor looks: ask again in a second. ``problem`` says why there are no findings."""

    run_id: str
    working: bool
    problem: str | None
    stages: list[str]
    findings: list[Symptom]
