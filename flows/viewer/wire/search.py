"""What the viewer's server answers about search trees and about the map of prompts; see
:mod:`agentrl.flows.viewer.wire`."""

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


# GET /api/map?filter=&among=&rule=&lasso=&at= -> Arrow, a record for each prompt that rows have: x, y (float32), rows
# (those in the filter), scored (those of them with an outcome), solved (int32). Metadata of the schema, texts: frame
# names the plane, as a lasso does; version is that of the buffer; behind counts commits that the search index has not
# seen; unplaced counts rows in the filter whose prompts it does not hold. A lasso decides on the plane here, and hides
# nothing. It is FRAME:x,y;x,y;..., with at most 200 corners; /api/rows and /api/facets take it too.

# GET /api/map/prompts?filter=&among=&rule=&lasso=&at=


class MapPrompt(Answer):
    """``solved`` of the ``n`` rows with an outcome succeeded, with Wilson's interval (None if ``n`` is 0)."""

    prompt: str
    rows: int
    solved: int
    n: int
    low: float | None
    high: float | None


class MapPrompts(Answer):
    """The prompts in a filter and a lasso with the most rows, at most 50 of ``total``; ``rows`` are those of all."""

    version: int
    total: int
    rows: int
    prompts: list[MapPrompt]
