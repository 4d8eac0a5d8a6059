"""The stage that selects rows of one version of the buffer's table: by SQL, by rules, by drawing."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentrl.datastore.curation.rules import Rule
from agentrl.datastore.errors import StoreError
from agentrl.datastore.read.lookup import id_array
from agentrl.datastore.search.embedding import EmbedderChoice
from agentrl.pipelines.handles import Scores, Trajectories
from agentrl.pipelines.parts.distinct import distinct, weights_in
from agentrl.pipelines.parts.dividing import dividing
from agentrl.pipelines.parts.scores import ByScorer, scores_of
from agentrl.pipelines.stage import Context, stage
from agentrl.pipelines.stages.curate import DROPPED_SCHEMA, Curation, dropped_rows, funnel_table
from agentrl.schemas.annotations import ADDED, External

if TYPE_CHECKING:
    import polars as pl

    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.curation.curate import Level
    from agentrl.datastore.read.sampling import Sample


class Draw(BaseModel):
    """Rows drawn from what is left; see ``datastore/read/sampling.py`` for what each strategy does to the
    distribution."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: Literal["uniform", "success_first", "prioritized", "recency", "diversity", "curriculum"] = Field(
        "uniform", description="how rows are drawn"
    )
    n: int = Field(ge=1, description="rows to draw, or groups if of is groups")
    priority: Annotated[Literal["reward", "surprise"], ADDED] = Field(
        "reward", description="of prioritized: the reward, or how far it is from the mean of its group"
    )
    alpha: Annotated[float, ADDED] = Field(
        0.6, ge=0, description="of prioritized: 0 draws all rows alike, 1 in proportion to the priority"
    )
    beta: Annotated[float, ADDED] = Field(
        0.4, ge=0, le=1, description="of prioritized: how far weights undo the bias; 1 does completely"
    )

    of: Annotated[Literal["rows", "groups"], ADDED] = Field(
        "rows", description="of prioritized: rows, or whole groups, for algorithms that compare the rows of a group"
    )

    @model_validator(mode="after")
    def _of_prioritized(self) -> "Draw":
        given = sorted(self.model_fields_set & {"priority", "alpha", "beta", "of"})
        if given and self.strategy != "prioritized":
            raise ValueError(f"{given[0]} does nothing with strategy: {self.strategy}; it is for prioritized")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """What the strategy is called with beside rows, number and seed."""
        if self.strategy != "prioritized":
            return {}
        return {"priority": self.priority, "alpha": self.alpha, "beta": self.beta, "of": self.of}


class SelectConfig(ByScorer):
    version: int = Field(ge=0, description="version of the buffer's table, see `agentrl buffer history`")
    where: str | None = Field(None, description="SQL over the scalar columns, as in: success and env = 'lookup'")
    split: str | None = Field("train", description="split of the tasks whose rows are taken; null takes all")
    ids: Annotated[Annotated[str, External("file")] | None, ADDED] = Field(
        None, description="text file with the ids of rows, one in each line: only these are taken; its content counts"
    )
    rules: list[Rule] = Field([], description="applied in this order to the rows that where leaves")
    embedder: EmbedderChoice = Field(
        "embedded", description="embedded (the buffer's own words), minilm, or a sentence-transformers model or path"
    )
    draw: Draw | None = Field(None, description="how many of the rows that are left, and which; None takes them all")
    annotations: Annotated[int | None, ADDED] = Field(
        None, ge=0, description="version of the annotations that where reads, as `agentrl buffer annotate` prints it"
    )

    @model_validator(mode="after")
    def _pins_what_it_reads(self) -> "SelectConfig":
        from agentrl.datastore.read.views import names_annotations

        reads = names_annotations(self.where or "")
        if reads and self.annotations is None:
            raise ValueError(
                "where reads the annotations, of which there are more each day; set annotations: N, the version of "
                "their table that counts"
            )
        if not reads and self.annotations is not None:
            raise ValueError(
                "annotations does nothing without a where that reads them, as in: trajectory_id in "
                "(select trajectory_id from annotations where name = 'thumbs' and value = 'up')"
            )
        return self

    @field_validator("where")
    @classmethod
    def _can_be_answered(cls, where: str | None) -> str | None:
        from agentrl.datastore.curation.conditions import check_trajectories

        return where if where is None else check_trajectories(where)


@stage("trajectories.select", version=1)
def select(
    context: Context,
    config: SelectConfig,
    trajectories: list[Trajectories] | None = None,
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
) -> Curation:
    """Rows of one version of the buffer, or of the selections given: first ``ids``, ``where`` and ``split``, then
    ``rules``, then ``draw``. The funnel has a row per rule: rows before and after, and the ids of some rows that it
    dropped. The table ``dropped`` has all of them, each with the rule. Rows of other splits are left out by default, so
    that no held-out row is trained on; they are counted. If a ``scorer`` is named, all of these see its rewards, and a
    row that it did not score is unscored. Rows of given selections keep their weights, times those of the draw."""
    from agentrl.datastore.curation.curate import curate

    given = None if trajectories is None else distinct(trajectories)
    if config.ids is not None:
        given = named(context.buffer, config.ids, config.version, given)
    rewards = scores_of(scores, config.scorer)
    where, left = in_split(config.where, config.split), id_array([])
    if config.split is not None:
        left = not_in_split(
            context.buffer, config.where, config.split, config.version, given, rewards, config.annotations
        )
    if config.draw and not config.rules:
        try:
            before, sample = _drawn(context, config, config.draw, where, given, rewards)
        except StoreError as error:
            more = f"; {len(left)} rows of other splits are left out, and `split: null` (--split all) takes them"
            raise StoreError(f"{error}{more if len(left) else ''}") from None
        ids, weights = id_array(sample.ids), sample.weights
    else:
        ids, weights = matching(context.buffer, where, config.version, given, rewards, config.annotations), None
        before = len(ids)
    funnel = first_level(config.split, len(left), before)
    with context.growing_table(DROPPED_SCHEMA, "dropped") as (dropped, add):
        if funnel:
            add(dropped_rows(context.buffer, funnel[0].rule, left))
        if config.rules:
            with dividing(context) as divide:
                result = curate(
                    context.buffer,
                    config.rules,
                    ids=ids,
                    seed=context.seed,
                    embedder=config.embedder,
                    version=config.version,
                    scores=rewards,
                    on_dropped=lambda rule, ids: add(dropped_rows(context.buffer, rule, ids)),
                    progress=context.progress,
                    divide=divide,
                )
            ids, weights, funnel = result.ids, None, [*funnel, *result.funnel]
    if config.rules and config.draw:
        _, sample = _drawn(context, config, config.draw, None, ids, rewards)
        ids, weights = id_array(sample.ids), sample.weights
    if trajectories is not None and (own := weights_in(trajectories, ids)) is not None:
        weights = [weight * factor for weight, factor in zip(own, weights or [1.0] * len(own), strict=True)]
    context.metrics.update(before=before, after=len(ids), other_splits=len(left))
    return Curation(context.select(ids, weights), context.table(funnel_table(funnel), "funnel"), dropped)


def first_level(split: str | None, left: int, kept: int) -> "list[Level]":
    """The first level of a funnel, if ``left`` rows were left out because they are of other splits."""
    from agentrl.datastore.curation.curate import Level

    return [Level(f"split {split}", left + kept, kept, [])] if left else []


def in_split(where: str | None, split: str | None) -> str | None:
    """The condition that ``where`` holds and the row is of a split (None: of any)."""
    return where if split is None else _and(where, f"split = {_quoted(split)}")


def not_in_split(
    buffer: "TrajectoryBuffer",
    where: str | None,
    split: str,
    version: int | None = None,
    ids: pa.Array | None = None,
    scores: pa.Table | None = None,
    annotations: int | None = None,
) -> pa.Array:
    """The ids of the rows of other splits for which ``where`` holds, of ``ids`` or of all, sorted."""
    rows = _rows(buffer, _and(where, f"split <> {_quoted(split)}"), version, ids, (), scores, annotations)
    return id_array(rows["trajectory_id"].sort().to_arrow())


def _and(where: str | None, more: str) -> str:
    return f"({where}) and {more}" if where else more


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def matching(
    buffer: "TrajectoryBuffer",
    where: str | None,
    version: int | None = None,
    ids: pa.Array | None = None,
    scores: pa.Table | None = None,
    annotations: int | None = None,
) -> pa.Array:
    """Ids for which ``where`` holds: of ``ids`` in their order, or of all rows sorted. They stay in Arrow, since there
    may be millions of them. ``scores`` take the place of the rows' rewards."""
    matches = id_array(_rows(buffer, where, version, ids, (), scores, annotations)["trajectory_id"].to_arrow())
    if ids is None:
        return matches.take(pc.sort_indices(matches))
    return ids.filter(pc.is_in(ids, value_set=matches))


def named(buffer: "TrajectoryBuffer", path: str, version: int | None = None, ids: pa.Array | None = None) -> pa.Array:
    """The ids in a text file, each once, or those of ``ids`` that stand in it. Raises StoreError that names ids which
    no row of this version has."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"ids: {path} cannot be read as text: {error}") from None
    wanted = known_of(buffer, id_array(list(dict.fromkeys(line for line in lines if line))), version, "ids")
    return wanted if ids is None else ids.filter(pc.is_in(ids, value_set=wanted))


def known_of(buffer: "TrajectoryBuffer", wanted: pa.Array, version: int | None, origin: str) -> pa.Array:
    """``wanted`` as it is. Raises StoreError that says where these ids are from and names those which no row of this
    version has."""
    known = id_array(_rows(buffer, None, version, wanted, ())["trajectory_id"].to_arrow())
    if unknown := wanted.filter(pc.invert(pc.is_in(wanted, value_set=known))).to_pylist():
        first = ", ".join(unknown[:3])
        raise StoreError(
            f"{origin}: version {version} of the buffer lacks {len(unknown)} of {len(wanted)} rows: {first}"
        )
    return wanted


def _drawn(
    context: Context,
    config: SelectConfig,
    draw: Draw,
    where: str | None,
    ids: pa.Array | None,
    scores: pa.Table | None,
) -> "tuple[int, Sample]":
    """How many rows there are to draw from, and the draw."""
    from agentrl.datastore.read.sampling import COLUMNS, SAMPLERS

    rows = _rows(context.buffer, where, config.version, ids, COLUMNS[draw.strategy], scores, config.annotations)
    return rows.height, SAMPLERS[draw.strategy](rows, draw.n, context.seed, **draw.options)


def _rows(
    buffer: "TrajectoryBuffer",
    where: str | None,
    version: int | None,
    ids: pa.Array | None,
    columns: Sequence[str],
    scores: pa.Table | None = None,
    annotations: int | None = None,
) -> "pl.DataFrame":
    """The rows for which ``where`` holds, of ``ids`` or of all, in no promised order: their ids and these columns."""
    import polars as pl

    names = ", ".join(["trajectory_id", *columns])
    query = f"select {names} from trajectories{f' where ({where})' if where else ''}"
    rows = buffer.sql(query, version, scores=scores, annotations=annotations)
    if ids is None:
        return rows
    return rows.join(pl.DataFrame({"trajectory_id": ids}), on="trajectory_id", how="semi")
