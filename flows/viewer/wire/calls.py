"""What the viewer's server answers about calls of tools; see :mod:`agentrl.flows.viewer.wire`."""

from agentrl.flows.viewer.wire import Answer

# GET /api/calls?filter=&at=&among=&rule=


class ToolCalls(Answer):
    """Calls of one tool, how many of them were answered and how many failed, in so many rows; the ``seconds`` that
    ``timed`` of them took together, and their median, which is None if no call says it."""

    name: str
    calls: int
    answered: int
    failed: int
    rows: int
    timed: int
    seconds: float
    median: float | None


class FailedCall(Answer):
    """A call that failed: the number of the ``message`` that answers it, and how both texts begin."""

    trajectory_id: str
    message: int
    tool: str
    arguments: str
    answer: str


class CallsByTool(Answer):
    """Calls of the newest ``looked_at`` of the ``rows`` in the filter that call tools; the tool that failed most comes
    first. ``unknown`` errors were counted by rows that do not say which call they are of. At most 200 failed calls are
    listed, those of the newest rows."""

    version: int
    rows: int
    looked_at: int
    unknown: int
    tools: list[ToolCalls]
    failed: list[FailedCall]
