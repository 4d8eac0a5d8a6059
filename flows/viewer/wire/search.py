"""What the viewer's server answers about search trees; see :mod:`agentrl.flows.viewer.wire`."""

from agentrl.flows.viewer.wire import Answer

# GET /api/search-trees?artifact=STAGE/FINGERPRINT&offset=&limit=


class SearchedTask(Answer):
    """The tree of one task. ``value`` is the mean reward behind its root, over ``visits`` continuations, with Wilson's
    interval (None if rewards are not between 0 and 1); ``ends`` of its nodes are terminal, and ``best`` is the highest
    reward of one."""

    task_id: str
    nodes: int
    depth: int
    visits: int
    value: float | None
    low: float | None
    high: float | None
    ends: int
    best: float | None


class SearchTrees(Answer):
    """``artifacts`` are all artifacts of the store that hold nodes, newest first; the first is shown unless asked for
    another. ``total`` trees, of which a page is here, those with the most nodes first."""

    artifacts: list[str]
    artifact: str | None
    total: int
    tasks: list[SearchedTask]


# GET /api/search-tree?artifact=&task_id=&at=


class NodeBox(Answer):
    """A state after a turn. ``parent`` is its position in the list, None for the root; ``x`` is its column in the
    drawing and ``y`` its row. ``value`` is the mean reward over ``visits`` continuations through it, of which ``own``
    end here, with Wilson's interval (None if rewards are not between 0 and 1). ``best`` is true on the path that
    follows, from the root on, the child of the highest value, and of equals the one that was visited most. ``text``
    begins what tokens [token_start, token_end) of ``trajectory_id`` say."""

    parent: int | None
    trajectory_id: str
    token_start: int
    token_end: int
    text: str
    visits: int
    own: int
    value: float | None
    low: float | None
    high: float | None
    reward: float | None
    terminal: bool
    born: int
    best: bool
    x: int
    y: float


class SearchTree(Answer):
    """Parents before children, at most 2,000: ``left_out`` nodes were visited less than all of these. ``problem`` says
    why nodes have no text."""

    version: int
    artifact: str
    task_id: str
    env: str
    prompt: str
    left_out: int
    problem: str
    nodes: list[NodeBox]
