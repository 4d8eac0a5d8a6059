"""Applying the rules. Every rule takes the rows that are left and says which of them stay; heavy columns are read only
by the rules that look at them, for the rows that are left by then."""

import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from agentrl.datastore.curation import divided
from agentrl.datastore.curation import rules as r
from agentrl.datastore.curation.annotated import said_of_rows
from agentrl.datastore.curation.conditions import tasks_of
from agentrl.datastore.curation.division import Division
from agentrl.datastore.curation.kept import kept_folder
from agentrl.datastore.curation.text import Part, part_text
from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import sql
from agentrl.datastore.read.lookup import Ids, id_array
from agentrl.datastore.read.matches import Find
from agentrl.datastore.read.ranking import RANK
from agentrl.datastore.read.scores import rescored
from agentrl.datastore.search.embedding import EMBEDDED, Embedder, LatentEmbedder, pretrained
from agentrl.datastore.search.vectors import TEXTS, embedded, embedded_by_shards
from agentrl.datastore.shards.divide import Divide
from agentrl.datastore.storage.delta_paths import FOLDER, data_files
from agentrl.datastore.table.writer import SCALARS
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

EXAMPLES = 3
ROWS_AT_ONCE = 1024
"""Rows whose messages are read at once."""


@dataclass(frozen=True)
class Level:
    """One level of the funnel: a rule, the rows before and after it, and the ids of some that it dropped."""

    rule: str
    before: int
    after: int
    examples: list[str]


@dataclass(frozen=True)
class Curated:
    """The selection, in the order of ids, and how it came about."""

    ids: pa.Array
    funnel: list[Level]


@dataclass
class Work:
    """What the rules work on besides the scalar columns."""

    buffer: "TrajectoryBuffer"
    seed: int
    embedder_name: str
    heldout: list[str]
    version: int
    division: Division

    @cached_property
    def embedder(self) -> Embedder:
        if self.embedder_name != EMBEDDED:
            return pretrained(self.embedder_name)
        prompts = self.column(lambda rows: rows.select(pl.col("prompt").unique().sort()))
        return LatentEmbedder.fit([*prompts, *self.heldout], seed=self.seed)

    def embed(self, batches: Iterable[Sequence[str]]) -> tuple[np.ndarray, int]:
        """Vectors of texts, float32 [texts, dimensions], and how many texts are longer than what is looked at."""
        if not self.division.named:
            return embedded(batches, self.embedder)
        fitted = self.embedder if self.embedder_name == EMBEDDED else None
        assert fitted is None or isinstance(fitted, LatentEmbedder)
        return embedded_by_shards(batches, self.embedder_name, fitted, self.division.work, self.division)

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of texts, float32 [texts, dimensions]; equal texts are embedded once."""
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        distinct = list(numbers)
        vectors, _ = self.embed(distinct[start : start + TEXTS] for start in range(0, len(distinct), TEXTS))
        return vectors[[numbers[text] for text in texts]]

    def column(self, of: Callable[[pl.LazyFrame], pl.LazyFrame]) -> pl.Series:
        """The one column that ``of`` makes of all rows of the version."""
        return self.buffer.current(self.version, lambda: of(self.buffer.scan(self.version)).collect()).to_series()

    def actions(self, rows: pl.DataFrame) -> Iterator[str]:
        """What the policy wrote and called in each row, as text: a line for each message, and for each call. Texts are
        read as they are asked for, fastest if ``rows`` are sorted by id, as they are given to rules."""
        return (text for [text] in self.parts(rows, ["actions"]))

    def parts(self, rows: pl.DataFrame, parts: Sequence[Part]) -> Iterator[list[str]]:
        """The texts of these parts of each row, read as :meth:`actions` are."""
        for row in self.conversations(rows):
            yield [part_text(part, row["prompt"], row["messages"]) for part in parts]

    def conversations(self, rows: pl.DataFrame, *more: str) -> Iterator[dict[str, Any]]:
        """``prompt``, ``messages`` and ``more`` columns of each row, read as :meth:`actions` are."""
        ids = rows["trajectory_id"].to_arrow()
        for start in range(0, len(ids), ROWS_AT_ONCE):
            yield from self.buffer.read(ids.slice(start, ROWS_AT_ONCE), ["prompt", "messages", *more]).to_pylist()

    def columns(self, rows: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
        """Other columns of these rows, in their order."""
        return pl.DataFrame(self.buffer.read(rows["trajectory_id"].to_list(), list(names)))


_ALONE = Divide()


def _forget(rule: str, ids: pa.Array) -> None:
    pass


def _untold(done: int, rules: int) -> None:
    pass


def curate(
    buffer: "TrajectoryBuffer",
    rules: Sequence[r.Rule],
    *,
    ids: Ids | None = None,
    heldout: Sequence[str] = (),
    seed: int = 0,
    embedder: str = EMBEDDED,
    version: int | None = None,
    scores: pa.Table | None = None,
    on_dropped: Callable[[str, pa.Array], None] = _forget,
    progress: Callable[[int, int], None] = _untold,
    divide: Divide = _ALONE,
) -> Curated:
    """Narrow rows (default: the whole buffer) by rules. ``heldout`` holds prompts of held-out tasks, for
    decontamination. The same buffer version (None: the newest), rules and seed give the same selection. ``scores`` of
    one scorer take the place of the rows' rewards. ``on_dropped`` is called after each rule that dropped rows, with its
    name in the funnel and their ids, sorted; ``progress`` after each, with how many are done and of how many.
    ``divide`` says how rules that read text are divided, which changes nothing of what they drop."""

    def read(version: int) -> tuple[int, pl.DataFrame]:
        rows = rescored(buffer.scan(version), scores)
        if ids is not None:
            rows = rows.join(pl.LazyFrame({"trajectory_id": id_array(ids)}), on="trajectory_id", how="semi")
        return version, buffer.current(version, rows.select(_needed(rules)).collect)

    version, rows = buffer.newest(read) if version is None else read(version)
    rows = rows.sort("trajectory_id")
    with ExitStack() as stack:
        folder = divide.work or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=_temporary(buffer))))
        files = data_files(buffer.storage, FOLDER, buffer.table(version))
        division = Division(
            buffer.storage,
            files,
            kept_folder(buffer.storage, divide.shared),
            folder,
            divide.run,
            divide.shards,
            divide.named,
        )
        work = Work(buffer, seed, embedder, sorted(set(heldout)), version, division)
        return _curated(rows, rules, work, on_dropped, progress)


def _temporary(buffer: "TrajectoryBuffer") -> Path:
    folder = buffer.storage.working_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _curated(
    rows: pl.DataFrame,
    rules: Sequence[r.Rule],
    work: Work,
    on_dropped: Callable[[str, pa.Array], None],
    progress: Callable[[int, int], None],
) -> Curated:
    funnel = []
    for number, rule in enumerate(rules):
        progress(number, len(rules))
        apply: Callable[..., pl.DataFrame] = _own if isinstance(rule, r.OwnRule) else _APPLY[rule.rule]
        left = work.buffer.current(work.version, partial(apply, rows, rule, work))
        kept = left.sort("trajectory_id")
        dropped = rows.join(kept, on="trajectory_id", how="anti")["trajectory_id"]
        funnel.append(Level(_describe(rule), rows.height, kept.height, dropped.head(EXAMPLES).to_list()))
        if len(dropped):
            on_dropped(funnel[-1].rule, id_array(dropped.to_arrow()))
        rows = kept
    return Curated(id_array(rows["trajectory_id"].to_arrow()), funnel)


_BUILT_ON = ("trajectory_id", "task_id", "reward", "success", "n_steps", "n_tokens", "env", "level")
_READS = {"decontaminate": ("split",)}


def _needed(rules: Sequence[r.Rule]) -> list[str]:
    """The scalar columns that rules may look at: those that they are built on, and all that their texts name. Prompts
    and settings of millions of rows would take many times as much memory."""
    texts = [str(value) for rule in rules for value in (*rule.model_dump().values(), *_reads(rule))]
    named = set(re.findall(r"\w+", " ".join(texts)))
    return [name for name in SCALARS if name in _BUILT_ON or name in named]


def _reads(rule: r.Rule) -> Sequence[str]:
    return rule.columns if isinstance(rule, r.OwnRule) else _READS.get(rule.rule, ())


def _own(rows: pl.DataFrame, rule: r.OwnRule, work: Work) -> pl.DataFrame:
    """What a rule of the user's leaves: it chooses among rows, and changes none."""
    kept = rule.keep(rows, work)
    if not isinstance(kept, pl.DataFrame) or "trajectory_id" not in kept.columns:
        what = f"columns {', '.join(kept.columns)}" if isinstance(kept, pl.DataFrame) else f"a {type(kept).__name__}"
        raise StoreError(f"rule {rule.rule} returned {what}; keep() returns the rows that stay, with their ids")
    unknown = kept.join(rows, on="trajectory_id", how="anti")
    if unknown.height or kept["trajectory_id"].is_duplicated().any():
        wrong = unknown["trajectory_id"].head(3).to_list() or "an id twice"
        raise StoreError(f"rule {rule.rule} returned {wrong}; keep() returns the rows that stay, each once")
    return rows.join(kept.select("trajectory_id"), on="trajectory_id", how="semi")


def _describe(rule: r.Rule) -> str:
    fields = rule.model_dump(exclude={"rule"}, exclude_defaults=True)
    return " ".join([rule.rule, *(f"{name}={value}" for name, value in fields.items())])


def _where(rows: pl.DataFrame, where: str, find: Find | None = None) -> pl.DataFrame:
    """Rows for which a SQL expression is true. ``find`` answers ``matches(messages, ...)``."""
    name = f"rule expression {where!r}"
    try:
        return sql.matching(rows.lazy(), where, name, find).collect()
    except pl.exceptions.PolarsError as error:
        raise StoreError(f"{name}: {str(error).splitlines()[0]}") from None


def _filter(rows: pl.DataFrame, rule: r.Filter, work: Work) -> pl.DataFrame:
    return _where(rows, rule.where, lambda text: work.buffer.text.ids(text, work.version))


def _group(rows: pl.DataFrame, rule: r.Group, work: Work) -> pl.DataFrame:
    tasks = tasks_of(rows.lazy()).collect()
    return rows.join(_where(tasks, rule.where), on="task_id", how="semi")


def _keep(rows: pl.DataFrame, rule: r.Keep, work: Work) -> pl.DataFrame:
    if rule.what == "all":
        return rows
    if rule.what in ("correct", "shortest"):
        rows = rows.filter(pl.col("success"))
    elif rule.what == "best":
        rows = rows.filter(pl.col("reward").is_not_null())
    order: dict[str, Sequence[pl.Expr]] = {
        "shortest": (pl.col("n_steps"), pl.col("n_tokens"), pl.col("trajectory_id")),
        "first": (pl.col("trajectory_id"),),
    }
    return rows.sort(*order.get(rule.what, RANK)).group_by("task_id", maintain_order=True).head(rule.n)


def _secrets(rows: pl.DataFrame, rule: r.Secrets, work: Work) -> pl.DataFrame:
    from agentrl.datastore.redaction.rows import RowRedaction, unread_tokens

    redaction = RowRedaction(work.buffer.storage, rule.secrets, on_tokens="drop")
    ids = rows["trajectory_id"].to_arrow()
    clean, unread = list[bool](), 0
    for start in range(0, len(ids), ROWS_AT_ONCE):
        for row in work.buffer.read(ids.slice(start, ROWS_AT_ONCE), version=work.version).to_pylist():
            cleaned = redaction.clean(Trajectory.model_validate(row))
            clean.append(not cleaned.changed)
            unread += cleaned.unread
    if unread:
        warnings.warn(f"rule secrets: {unread_tokens(unread)}", stacklevel=2)
    return rows.filter(pl.Series(clean, dtype=pl.Boolean))


def _annotated(rows: pl.DataFrame, rule: r.ByAnnotations, work: Work) -> pl.DataFrame:
    fitting = said_of_rows(work.buffer.annotations.frame(rule.version), rule.name, rule.author_kind)
    if rule.values is not None:
        fitting = fitting.filter(pl.col("value").is_in(rule.values))
    if rule.least is not None:
        means = fitting.group_by("trajectory_id").agg(pl.col("number").mean())
        fitting = means.filter(pl.col("number") >= rule.least)
    return rows.join(fitting, on="trajectory_id", how="anti" if rule.drop else "semi")


def _balance(rows: pl.DataFrame, rule: r.Balance, work: Work) -> pl.DataFrame:
    if not rows.height:
        return rows
    by = rule.by
    rarest = int(rows.group_by(by).len()["len"].min())  # type: ignore[arg-type]
    return _at_random(rows, by, rule.n or rarest, work.seed)


def _cap(rows: pl.DataFrame, rule: r.Cap, work: Work) -> pl.DataFrame:
    return _at_random(rows, rule.per, rule.n, work.seed)


def _at_random(rows: pl.DataFrame, by: str | None, n: int, seed: int) -> pl.DataFrame:
    order = np.random.default_rng(seed).permutation(rows.height)
    shuffled = rows.sort("trajectory_id")[order]
    return shuffled.head(n) if by is None else shuffled.group_by(by, maintain_order=True).head(n)


_APPLY: dict[str, Callable[..., pl.DataFrame]] = {
    "filter": _filter,
    "group": _group,
    "keep": _keep,
    "exact_duplicates": divided.exact_duplicates,
    "near_duplicates": divided.near_duplicates,
    "semantic_duplicates": divided.semantic_duplicates,
    "valid_calls": divided.valid_calls,
    "secrets": _secrets,
    "decontaminate": divided.decontaminate,
    "diverse": divided.diverse,
    "annotated": _annotated,
    "balance": _balance,
    "cap": _cap,
}
