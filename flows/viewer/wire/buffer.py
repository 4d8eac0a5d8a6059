"""What the viewer's server answers about rows of the buffer as a table; see :mod:`agentrl.flows.viewer.wire`."""

from typing import Literal

from agentrl.flows.viewer.wire import Answer

# GET /api/rows?filter=&sort=&desc=&offset=&limit=&at=&columns=&among=&rule= -> Arrow, headers X-Total, X-Version,
# X-Columns, X-Absent
# One row of the table each: trajectory_id and the scalar columns that `columns` names, with commas between; without it
# all, which X-Columns lists. What is not asked for is not read. Texts are cut after 300 characters.
# Types: utf8, int32, float64, bool, timestamp[ms, UTC]. Default: sort=created_at, desc=true, offset=0, limit=100 (at
# most 1000). ``among`` (STAGE/FINGERPRINT) leaves the rows that an artifact chose, and with ``rule`` those that this
# rule dropped. If the filter asks for words, X-Words is a JSON list of them, and each row has match (utf8: the text
# around the first of them, null where nothing is spelled like them) and match_message (int32). X-Absent counts those of
# the rows of an artifact that this version of the buffer does not have.

# GET /api/facets?filter=&at=&among=&rule=


class Bin(Answer):
    """One bar: ``all`` rows and those ``filtered``. ``low`` <= value < ``high`` for numbers (the last bin includes
    ``high``); None otherwise. ``where`` is the SQL expression that chooses this bar alone, quoted for the filter."""

    label: str
    low: float | None
    high: float | None
    all: int
    filtered: int
    where: str


class Facet(Answer):
    """``more`` counts the values that have no bar of their own (categories beyond the 20 most frequent)."""

    column: str
    kind: Literal["number", "category", "bool"]
    bins: list[Bin]
    more: int


class Facets(Answer):
    version: int
    total: int
    filtered: int
    facets: list[Facet]


# GET /api/answers?id=&id=&at=


class Answers(Answer):
    """What the policy said last in each of these rows, by id, cut after 300 characters; empty if it said nothing."""

    version: int
    answers: dict[str, str]


# GET /api/search?q=&k=


class Hit(Answer):
    trajectory_id: str
    score: float


class Hits(Answer):
    """Best first. ``version`` is that of the buffer which the index holds, and ``behind`` counts newer commits."""

    version: int
    behind: int
    hits: list[Hit]
