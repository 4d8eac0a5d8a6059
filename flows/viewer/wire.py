"""What browsers and the viewer's server say to each other, as far as it is not of one page.

A function of a page answers a :class:`Query`, and its module has the models of both. ``at`` in a query is a Delta
version of the buffer, or a time; without it the newest is read. Every answer about rows names the version that it was
read from, so that a link with ``at`` shows the same again. Tables are Arrow streams; what their columns mean stands at
the functions that make them.
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Query(BaseModel):
    """The query of a request. What is not a field is refused by name."""

    model_config = ConfigDict(extra="forbid")


class AtVersion(Query):
    at: str | None = None


class RowQuery(AtVersion):
    """``id`` stands in the path."""

    id: str


class Filtered(AtVersion):
    """``among`` names an artifact, and ``rule`` one of its rules: see :mod:`agentrl.flows.viewer.query.among`."""

    filter: str = ""
    among: str | None = None
    rule: str | None = None


class Refusal(Answer):
    """Any answer with a status of 400 or above. ``next`` is what the reader can do, for instance a command."""

    error: str
    field: str | None = None
    allowed: list[str] = []
    next: str | None = None


class StoresShown(Answer):
    """The stores that are shown beside each other, by the last part of their paths, and the ``name`` of this one; none
    if it is the only one."""

    name: str
    stores: list[str]


class Writing(Answer):
    """The key that POST needs in the header X-Agentrl-Key; None if the viewer was started without ``--write``."""

    key: str | None


class RefusedError(Exception):
    """What was asked cannot be answered, and why. The client gets it as :class:`Refusal`."""

    def __init__(
        self,
        error: str,
        *,
        field: str | None = None,
        allowed: Sequence[str] = (),
        following: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(error)
        self.status = status
        self.body = Refusal(error=error, field=field, allowed=list(allowed), next=following)
