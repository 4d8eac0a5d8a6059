"""What the viewer's server answers, as the front-end reads it: models of the JSON, and schemas of the Arrow streams.

``at`` in a query is a Delta version of the buffer, or a time; without it the newest is read. Every answer about rows
names the version that it was read from, so that a link with ``at`` shows the same again.
"""

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Refusal(Answer):
    """Any answer with a status of 400 or above. ``next`` is what the reader can do, for instance a command."""

    error: str
    field: str | None = None
    allowed: list[str] = []
    next: str | None = None


# GET /api/session with the header x-agentrl-token: TOKEN -> 204 and a cookie, or 401. An address that others reach ends
# in #token=TOKEN: the page asks this once and takes the token out of its address. Any 401 means that it has to.


# GET /api/stores


class StoresShown(Answer):
    """The stores that are shown beside each other, by the last part of their paths, and the ``name`` of this one; none
    if it is the only one."""

    name: str
    stores: list[str]


# GET /api/tabs


class Filled(Answer):
    """The pages that have something to show, by their paths."""

    paths: list[str]


# GET /api/writing


class Writing(Answer):
    """The key that POST needs in the header X-Agentrl-Key; None if the viewer was started without ``--write``."""

    key: str | None
