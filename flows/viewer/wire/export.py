"""What an exported file says of itself. Its rows, tokens and tasks are answers as :mod:`agentrl.flows.viewer.wire`
has them."""

from typing import Literal

from agentrl.flows.viewer.wire import Answer
from agentrl.flows.viewer.wire.buffer import Facet


class ExportedColumn(Answer):
    """A scalar column, and what its values are."""

    name: str
    kind: Literal["text", "number", "bool", "time"]


class Contents(Answer):
    """``rows`` of the ``selected`` ones are in the file, as they were at a ``version`` of the buffer. ``parts`` are the
    numbers of rows in each part of the file. The facets count all rows."""

    agentrl: str
    version: int
    selection: str
    rows: int
    selected: int
    tokens: int
    columns: list[ExportedColumn]
    parts: list[int]
    facets: list[Facet]
