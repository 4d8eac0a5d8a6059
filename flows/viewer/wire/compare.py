"""What the viewer's server answers about policies, tasks and pairs that are compared; see
:mod:`agentrl.flows.viewer.wire`."""

from agentrl.flows.viewer.wire import Answer

# GET /api/evaluations


class LevelResult(Answer):
    """Success on one level of one environment; ``level`` -1 is all levels, ``env`` "" all environments.
    ``control`` is the temperature that did best on dev tasks, if this is success at it as the control for
    sharpening."""

    env: str
    level: int
    greedy: bool
    control: float | None
    tasks: int
    n: int
    success: float
    low: float
    high: float


class EvaluatedPolicy(Answer):
    """An evaluation. ``artifact`` is STAGE/FINGERPRINT, as /api/compare takes it; ``when`` is ISO 8601."""

    artifact: str
    stage: str
    policy: str
    split: str
    when: str
    results: list[LevelResult]


class Evaluations(Answer):
    """Newest first."""

    evaluations: list[EvaluatedPolicy]


# GET /api/compare?than=ARTIFACT&arm=ARTIFACT&greedy=


class ComparedArm(Answer):
    """Success over all tasks with its 95 % interval; ``unscored`` rows have no outcome and are left out."""

    name: str
    artifacts: list[str]
    policies: list[str]
    tasks: int
    unscored: int
    success: float
    low: float
    high: float


class ChangedTask(Answer):
    """Success before and after, as shares of the attempts."""

    env: str
    task_id: str
    prompt: str
    before: float
    after: float


class PairedDifference(Answer):
    """``than`` is compared with ``arm`` on the tasks of both: the difference of success with its 95 % interval
    (bootstrap over tasks), McNemar's ``p`` if each task has one attempt in both, and the verdict in words.
    ``sentence`` says it shortly, by the names of the policies; ``shown`` says whether there is a difference. ``word``
    says what ``arm`` gained over ``than`` at its best temperature, the control for sharpening (adds, sharpens, none,
    worse, cannot tell), and ``learned`` says that with its figures, or why nobody can tell; None and empty if they are
    no evaluations. At most 500 tasks each are listed as gained and lost; ``tasks_gained`` and ``tasks_lost`` count
    all."""

    than: ComparedArm
    arm: ComparedArm
    greedy: bool
    mean: float
    low: float
    high: float
    p: float | None
    tasks: int
    unshared: int
    tasks_gained: int
    tasks_lost: int
    verdict: str
    sentence: str
    shown: bool
    word: str | None
    learned: str
    gained: list[ChangedTask]
    lost: list[ChangedTask]


# GET /api/better


class Better(Answer):
    """The newest policy against the one before it, at temperature 1, with at most 5 of the tasks that it lost; None if
    there are no two evaluations of the same tasks."""

    difference: PairedDifference | None


# GET /api/task?env=&task_id=&at=


class AttemptLine(Answer):
    trajectory_id: str
    success: bool | None
    reward: float | None
    sample_index: int
    n_tokens: int
    n_tool_errors: int
    termination: str


class Strip(Answer):
    """The attempts of one version of one policy in one stage at one temperature, in the order of time (at most 1,024),
    with success over the ``n`` that have an outcome, and its Wilson interval; they are None if none has. The segments
    of an episode are one attempt. ``rows`` counts all attempts."""

    stage: str
    policy: str
    policy_version: int
    temperature: float | None
    greedy: bool
    rows: int
    n: int
    success: float | None
    low: float | None
    high: float | None
    attempts: list[AttemptLine]


class TaskAttempts(Answer):
    """``rows`` counts all attempts. ``prompts`` are the different ones, of at most 5."""

    version: int
    env: str
    task_id: str
    prompts: list[str]
    rows: int
    strips: list[Strip]


# GET /api/task/tree?env=&task_id=&at=


class TreeBranch(Answer):
    """Tokens that ``rows`` attempts share: [start, end) of each of them, after those of ``parent`` (the position of a
    branch in the list; None for a root). ``x`` is its column in the drawing and ``y`` its row, from 0, between those of
    its children. ``success`` is over the ``n`` rows with an outcome, ``reward`` the mean over the ``rewarded``, with
    its interval (None if a reward is not between 0 and 1). ``text`` begins the branch's text. ``ends`` are the rows
    that end with it, at most 20."""

    parent: int | None
    start: int
    end: int
    rows: int
    n: int
    success: float | None
    rewarded: int
    reward: float | None
    low: float | None
    high: float | None
    text: str
    ends: list[str]
    x: int
    y: float


class TaskTree(Answer):
    """The attempts at a task as a tree of shared tokens, parents before children. ``left_out`` attempts have no tokens,
    or those of another tokenizer than most, or are beyond the newest 1,024."""

    version: int
    rows: int
    left_out: int
    branches: list[TreeBranch]


# GET /api/align?a=ID&b=ID&at=


class Aligned(Answer):
    """Where two rows part. ``shared`` counts the tokens that they begin with alike, so it is the first token that
    differs; None if they cannot be compared, and ``reason`` says why. ``flipped``: one succeeded, the other failed."""

    version: int
    a: str
    b: str
    shared: int | None
    reason: str
    same: bool
    flipped: bool


# GET /api/pairs?artifact=STAGE/FINGERPRINT&offset=&limit=


class PairLine(Answer):
    pair_id: str
    task_id: str
    kind: str
    chosen_id: str
    rejected_id: str
    chosen_reward: float | None
    rejected_reward: float | None
    shared_prefix: int


class PairLines(Answer):
    """``artifacts`` are all artifacts of the store that hold pairs, newest first; the first is shown unless asked for
    another."""

    artifacts: list[str]
    artifact: str | None
    total: int
    pairs: list[PairLine]


# GET /api/pair?artifact=&pair_id= ; GET /api/pair/tokens?artifact=&pair_id=&side=chosen|rejected -> Arrow as
# /api/tokens (start, length, joined, id, mask); GET /api/pair/text?artifact=&pair_id=&side= -> text/plain


class PairSide(Answer):
    """``covered`` counts the tokens that the loss covers, ``tokens`` all; ``ref_logprob`` is the sum over covered ones
    under the reference, if a training stage recorded it."""

    trajectory_id: str
    reward: float | None
    tokens: int
    covered: int
    covered_in_prefix: int
    ref_logprob: float | None


class PairAnswer(Answer):
    """``margin`` is the chosen side's ``ref_logprob`` less the rejected one's. ``trained_by`` is STAGE/FINGERPRINT.
    ``previous`` and ``next`` are the pairs before and after it."""

    pair_id: str
    task_id: str
    kind: str
    method: str
    shared_prefix: int
    chosen: PairSide
    rejected: PairSide
    margin: float | None
    trained_by: list[str]
    previous: str | None
    next: str | None


# GET /api/curation?at=


class FunnelLevel(Answer):
    """A rule, the rows before and after it, and of those that it dropped how many succeeded among the ``n`` with an
    outcome, with Wilson's interval of their share (None if ``n`` is 0). ``worry``: those that it dropped had succeeded
    more often than those that it kept, by more than chance explains, and the rule does not speak of outcomes.
    /buffer?among=ARTIFACT&rule=RULE shows what it dropped."""

    rule: str
    before: int
    after: int
    successes: int
    n: int
    low: float | None
    high: float | None
    worry: bool


class Funnel(Answer):
    """``kept`` counts the rows that were chosen. ``recorded`` is false if nobody knows which rows were dropped: then
    the counts of outcomes are 0."""

    artifact: str
    stage: str
    uses: str
    when: str
    kept: int
    recorded: bool
    levels: list[FunnelLevel]


class Funnels(Answer):
    """Newest first; ``more`` older ones are left out. ``version`` is that of the buffer which told the outcomes, None
    if nothing was ever appended."""

    version: int | None
    more: int
    funnels: list[Funnel]
