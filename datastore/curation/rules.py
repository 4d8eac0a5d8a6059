"""The rules of curation, as they are written in a pipeline file. They apply in the order given."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from agentrl.schemas.choice import OneOf

if TYPE_CHECKING:
    import polars as pl

    from agentrl.datastore.curation.curate import Work


def _rows(where: str) -> str:
    from agentrl.datastore.curation.conditions import check_rows

    return check_rows(where)


def _tasks(where: str) -> str:
    from agentrl.datastore.curation.conditions import check_tasks

    return check_tasks(where)


def _column(name: str) -> str:
    from agentrl.datastore.curation.conditions import check_column

    return check_column(name)


Column = Annotated[str, AfterValidator(_column)]
"""Name of a scalar column."""


class CurationRule(BaseModel):
    """What all rules share: the name that chose it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str


class Filter(CurationRule):
    """Keep rows for which a SQL expression over the scalar columns is true, as in ``success and n_steps <= 4``."""

    rule: Literal["filter"]
    where: Annotated[str, AfterValidator(_rows)]


class Group(CurationRule):
    """Keep tasks for which a SQL expression over their trajectories is true, as in ``pass_rate between 0.2 and 0.8``.

    Names: ``n``, ``pass_rate``, ``mean_reward``, ``best_reward``, ``worst_reward``, ``reward_std``, ``mean_steps``,
    ``env``, ``level``.
    """

    rule: Literal["group"]
    where: Annotated[str, AfterValidator(_tasks)]


class Keep(CurationRule):
    """Of each task keep ``n`` rows: ``best`` by reward then fewest steps, ``correct`` the same among successes,
    ``shortest`` by steps then tokens among successes, ``first`` by id, or ``all``. Unscored rows are neither best nor
    successes: only ``first`` and ``all`` keep them."""

    rule: Literal["keep"]
    what: Literal["best", "correct", "shortest", "first", "all"] = "best"
    n: int = Field(1, ge=1)


class Exact(CurationRule):
    """Keep the first of rows whose actions (assistant text and tool calls) are equal."""

    rule: Literal["exact_duplicates"]
    scope: Literal["task", "all"] = "task"


class Near(CurationRule):
    """Keep the first of rows whose actions are similar: Jaccard of word 3-grams, estimated by MinHash (Broder,
    1997)."""

    rule: Literal["near_duplicates"]
    threshold: float = Field(0.8, gt=0, le=1)
    scope: Literal["task", "all"] = "task"


class Decontaminate(CurationRule):
    """Drop rows whose prompt is too close to a held-out task: at least ``overlap`` of its word n-grams occur in one
    held-out prompt, or its embedding has a cosine of ``cosine`` or more (None: n-grams alone)."""

    rule: Literal["decontaminate"]
    ngram: int = Field(8, ge=1)
    overlap: float = Field(0.5, gt=0, le=1)
    cosine: float | None = Field(None, gt=0, le=1)
    splits: list[str] = Field(["heldout", "test"], description="rows of the buffer that count as held out")


class Diverse(CurationRule):
    """Keep ``n`` rows that differ: ``k_center`` takes the farthest from those taken (Sener and Savarese, 2018),
    ``clusters`` takes in turn from k-means clusters. Vectors are of the prompt, or of the sequence of tool calls."""

    rule: Literal["diverse"]
    n: int = Field(ge=1)
    method: Literal["k_center", "clusters"] = "k_center"
    over: Literal["prompt", "tools"] = "prompt"
    clusters: int = Field(16, ge=2)


class Balance(CurationRule):
    """Keep as many rows of each value of a column as of the rarest one, or ``n`` at most, at random."""

    rule: Literal["balance"]
    by: Column
    n: int | None = Field(None, ge=1)


class Cap(CurationRule):
    """Keep ``n`` rows at random, of all or of each value of a column."""

    rule: Literal["cap"]
    n: int = Field(ge=1)
    per: Column | None = None


class OwnRule(CurationRule):
    """A rule of the user's. The fields of a class that is derived from this one are its settings."""

    columns: ClassVar[Sequence[str]] = ()
    """Scalar columns that it reads besides trajectory_id, task_id, reward, success, n_steps, n_tokens, env, level."""

    @abstractmethod
    def keep(self, rows: "pl.DataFrame", work: "Work") -> "pl.DataFrame":
        """Those of ``rows`` that stay. ``rows`` has scalar columns of the rows that the rules before left, sorted by
        id; ``work`` gives what the policy wrote and called (``actions``), heavy columns, and the seed."""


RULES = {
    "filter": "Filter",
    "group": "Group",
    "keep": "Keep",
    "exact_duplicates": "Exact",
    "near_duplicates": "Near",
    "decontaminate": "Decontaminate",
    "diverse": "Diverse",
    "balance": "Balance",
    "cap": "Cap",
}
"""Name -> class of this module."""

if TYPE_CHECKING:
    Rule = CurationRule
else:
    paths = {name: f"{__name__}:{cls}" for name, cls in RULES.items()}
    Rule = Annotated[Any, OneOf("rule", paths, CurationRule, key="rule", own=(OwnRule,))]


class Rules(BaseModel):
    """A list of rules: the content of a rules file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: list[Rule]
    seed: int = 0
    embedder: str = Field("embedded", description="sentence-transformers model or path, or the embedded default")
