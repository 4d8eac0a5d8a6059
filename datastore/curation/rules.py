"""The rules of curation, as they are written in a pipeline file. They apply in the order given."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from agentrl.datastore.curation.text import Part
from agentrl.datastore.redaction.settings import Redaction
from agentrl.datastore.search.embedding import EmbedderChoice
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


def _each_once(parts: list[str]) -> list[str]:
    if len(set(parts)) < len(parts):
        raise ValueError(f"names a part twice: {', '.join(parts)}; name each once")
    return parts


Column = Annotated[str, AfterValidator(_column)]
"""Name of a scalar column."""


class CurationRule(BaseModel):
    """What all rules share: the name that chose it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str


class Filter(CurationRule):
    """Keep rows for which a SQL expression over the scalar columns is true, as in ``success and n_steps <= 4``."""

    rule: Literal["filter"]
    where: Annotated[str, AfterValidator(_rows)] = Field(description="SQL over the scalar columns of a row")


class Group(CurationRule):
    """Keep tasks for which a SQL expression over their trajectories is true, as in ``pass_rate between 0.2 and 0.8``.

    Names: ``n``, ``pass_rate``, ``mean_reward``, ``best_reward``, ``worst_reward``, ``reward_std``, ``mean_steps``,
    ``env``, ``level``.
    """

    rule: Literal["group"]
    where: Annotated[str, AfterValidator(_tasks)] = Field(description="SQL over the columns of a task, as above")


class Keep(CurationRule):
    """Of each task keep ``n`` rows: ``best`` by reward then fewest steps, ``correct`` the same among successes,
    ``shortest`` by steps then tokens among successes, ``first`` by id, or ``all``. Unscored rows are neither best nor
    successes: only ``first`` and ``all`` keep them."""

    rule: Literal["keep"]
    what: Literal["best", "correct", "shortest", "first", "all"] = Field("best", description="which rows, as above")
    n: int = Field(1, ge=1, description="rows of each task")


Compared = Annotated[list[Part], AfterValidator(_each_once), Field(min_length=1)]
"""Parts of a conversation, each once."""
Scope = Literal["task", "all"]


class Exact(CurationRule):
    """Keep the best of rows that are equal in all parts that ``compare`` names: by default the question and the actions
    (what the assistant wrote and called). White space and the order of a call's arguments do not count."""

    rule: Literal["exact_duplicates"]
    scope: Scope = Field("task", description="rows of one task are compared, or all")
    compare: Compared = Field(["question", "actions"], description="parts of the conversation")


class Near(CurationRule):
    """Keep the best of rows that are similar in each part that ``compare`` names: by default the question and the
    actions. Similar is a Jaccard similarity of word 3-grams at or above ``threshold``. Candidates are found by sketches
    (Dahlgaard et al., 2017), and no row is dropped by an estimate."""

    rule: Literal["near_duplicates"]
    threshold: float = Field(0.8, gt=0, le=1, description="Jaccard similarity from which on rows are similar")
    scope: Scope = Field("task", description="rows of one task are compared, or all")
    compare: Compared = Field(["question", "actions"], description="parts of the conversation")


class Semantic(CurationRule):
    """Keep the best of rows that mean nearly the same in each part that ``compare`` names: embeddings by the stage's
    ``embedder`` have a cosine at or above ``threshold`` (SemDeDup, Abbas et al., 2023). If more than 4,096 rows are to
    be compared, they are divided into clusters, and rows of two clusters are not."""

    rule: Literal["semantic_duplicates"]
    threshold: float = Field(0.95, gt=0, le=1, description="cosine from which on texts mean nearly the same")
    scope: Scope = Field("task", description="rows of one task are compared, or all")
    compare: Compared = Field(["question", "actions"], description="parts of the conversation")


class ValidCalls(CurationRule):
    """Keep rows of which every tool call is valid: its arguments are a JSON object that fits the schema of the tool, as
    JSON Schema defines it. A row without calls is kept."""

    rule: Literal["valid_calls"]
    undeclared: Literal["drop", "keep"] = Field(
        "drop",
        description="rows with a call whose tool the row does not declare, or declares with a schema that cannot be "
        "used; keep asks only for an object of arguments",
    )


class Secrets(CurationRule):
    """Drop rows whose texts or token ids hold a secret: keys, tokens, passwords, private keys, mail addresses, phone
    numbers, names of hosts and users. The stage ``trajectories.redact`` replaces them instead. Needs the extra
    ``redact``."""

    rule: Literal["secrets"]
    secrets: Redaction = Field(Redaction(), description="what counts as a secret")


class Decontaminate(CurationRule):
    """Drop rows that hold a held-out task. Held out are the tasks given to the stage, and rows of ``splits``.

    The whole conversation is searched: prompt, messages, reasoning, calls and answers of tools. A row is dropped if
    ``overlap`` of the word n-grams of a held-out question, or of the actions for it, stand there; if that share of the
    n-grams of its own question is in one held-out question; or if its question's embedding has a cosine of ``cosine``
    or more (None: n-grams alone). A question shorter than ``ngram`` words is found if a text of the conversation is
    exactly it. Actions of fewer words, and n-grams of actions for several questions, do not count."""

    rule: Literal["decontaminate"]
    ngram: int = Field(8, ge=1, description="words of an n-gram")
    overlap: float = Field(0.5, gt=0, le=1, description="share of n-grams from which on a row is dropped")
    cosine: float | None = Field(
        None, gt=0, le=1, description="of embeddings of questions, from which on a row is dropped; null: n-grams alone"
    )
    splits: list[str] = Field(["heldout", "test"], description="rows of the buffer that count as held out")
    against: Annotated[list[Literal["question", "actions"]], AfterValidator(_each_once), Field(min_length=1)] = Field(
        ["question", "actions"], description="what of held-out rows must not be in a conversation"
    )


class Diverse(CurationRule):
    """Keep ``n`` rows that differ: ``k_center`` takes the farthest from those taken (Sener and Savarese, 2018), in one
    process; ``core_sets`` does so in parts of the rows, which engines divide, and then among what it took there;
    ``clusters`` takes in turn from k-means clusters. Vectors are of the prompt, or of the sequence of tool calls."""

    rule: Literal["diverse"]
    n: int = Field(ge=1, description="rows that are kept")
    method: Literal["k_center", "core_sets", "clusters"] = Field("k_center", description="how they are found, as above")
    over: Literal["prompt", "tools"] = Field("prompt", description="vectors of the prompt, or of the calls' names")
    clusters: int = Field(16, ge=2, description="of method clusters: how many")


class Balance(CurationRule):
    """Keep as many rows of each value of a column as of the rarest one, or ``n`` at most, at random."""

    rule: Literal["balance"]
    by: Column = Field(description="a scalar column")
    n: int | None = Field(None, ge=1, description="rows of each value at most; null: as many as the rarest has")


class Cap(CurationRule):
    """Keep ``n`` rows at random, of all or of each value of a column."""

    rule: Literal["cap"]
    n: int = Field(ge=1, description="rows that are kept")
    per: Column | None = Field(
        None, description="a scalar column, of each value of which n rows are kept; null: of all"
    )


class ByAnnotations(CurationRule):
    """Keep rows of which people or judges say something: an annotation of this ``name`` about the whole row, whose
    value is one of ``values``, or whose number is at least ``least`` in the mean over authors. Rows of which nobody
    says anything go. The version of the annotations is part of the rule, so that the same rule keeps the same rows."""

    rule: Literal["annotated"]
    name: str = Field(min_length=1, description="of the annotations, as in thumbs")
    version: int = Field(ge=0, description="of the table of annotations, as `agentrl buffer annotate` prints it")
    values: list[str] | None = Field(None, min_length=1, description="what is said, as in [up]; null: anything")
    least: float | None = Field(None, description="mean number over authors, as in 4 of stars; null: any")
    author_kind: Literal["person", "judge"] | None = Field(None, description="whose annotations count; null: all")
    drop: bool = Field(False, description="drop these rows, and keep the others")


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
    "semantic_duplicates": "Semantic",
    "valid_calls": "ValidCalls",
    "secrets": "Secrets",
    "decontaminate": "Decontaminate",
    "diverse": "Diverse",
    "annotated": "ByAnnotations",
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
    embedder: EmbedderChoice = Field(
        "embedded", description="embedded (the buffer's own words), minilm, or a sentence-transformers model or path"
    )
