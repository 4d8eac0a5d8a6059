"""The nodes of search trees. The leaves of a tree are rows of the buffer; this table says how they hang together."""

from pydantic import BaseModel, ConfigDict

from agentrl.schemas.arrow import Int32, arrow_schema

NODE_VERSION = 2


class SearchNode(BaseModel):
    """One node: the state after a turn, ``input_ids[token_start:token_end]`` of a trajectory that went through it; the
    root, which has no parent, is the beginning of the task.

    ``visits`` counts the continuations through it, of which the paths of ``own`` end here, and ``total`` is the sum of
    their rewards. ``judge`` is what a model said that the state is worth, if one was asked. ``reward`` is that of a
    ``terminal`` node; ``born`` is the round of the search that found it.
    """

    model_config = ConfigDict(extra="forbid")

    node_id: str
    parent_node: str | None
    task_id: str
    depth: Int32
    trajectory_id: str
    token_start: Int32
    token_end: Int32
    visits: Int32
    own: Int32
    total: float
    judge: float | None = None
    reward: float | None
    terminal: bool
    born: Int32


NODE_SCHEMA = arrow_schema(SearchNode, NODE_VERSION)
