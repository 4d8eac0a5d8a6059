"""The stage that selects rows of one version of the buffer's table: by SQL, by rules, by drawing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from datastore.curation.rules import Rule
from pipelines.handles import Trajectories
from pipelines.stage import Context, StageConfig, stage
from pipelines.stages.curate import Curation, funnel_table

if TYPE_CHECKING:
    import polars as pl

    from datastore.buffer import TrajectoryBuffer
    from datastore.sampling import Sample


class Draw(BaseModel):
    """Rows drawn from what is left; see ``datastore/sampling.py`` for what each strategy does to the distribution."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: Literal["uniform", "success_first", "prioritized", "recency", "diversity", "curriculum"] = "uniform"
    n: int = Field(ge=1, description="rows to draw")


class SelectConfig(StageConfig):
    version: int = Field(ge=0, description="version of the buffer's table, see `agentrl buffer history`")
    where: str | None = Field(None, description="SQL over the scalar columns, as in: success and env = 'lookup'")
    rules: list[Rule] = Field([], description="applied in this order to the rows that where leaves")
    embedder: str = Field("embedded", description="sentence-transformers model or path, or the embedded default")
    draw: Draw | None = Field(None, description="how many of the rows that are left, and which; None takes them all")

    @field_validator("where")
    @classmethod
    def _can_be_answered(cls, where: str | None) -> str | None:
        from datastore.curation.conditions import check_trajectories

        return where if where is None else check_trajectories(where)


@stage("trajectories.select", version=1)
def select(context: Context, config: SelectConfig, trajectories: list[Trajectories] | None = None) -> Curation:
    """Rows of one version of the buffer, or of the selections given: first ``where``, then ``rules``, then ``draw``.
    The funnel has a row per rule: rows before and after, and the ids of some rows that it dropped."""
    from datastore.curation.curate import Level, curate

    given = None
    if trajectories is not None:
        given = list(dict.fromkeys(name for selection in trajectories for name in selection.ids()))
    funnel: list[Level] = []
    if config.draw and not config.rules:
        # millions of ids that are only drawn from must not become Python objects
        before, sample = _drawn(context, config, config.draw, config.where, given)
        ids, weights = sample.ids, sample.weights
    else:
        ids = matching(context.buffer, config.where, config.version, given)
        before, weights = len(ids), [1.0] * len(ids)
    if config.rules:
        result = curate(
            context.buffer,
            config.rules,
            ids=ids,
            seed=context.seed,
            embedder=config.embedder,
            version=config.version,
        )
        ids, weights, funnel = result.ids, result.weights, result.funnel
        if config.draw:
            _, sample = _drawn(context, config, config.draw, None, ids)
            ids, weights = sample.ids, sample.weights
    context.metrics.update(before=before, after=len(ids))
    return Curation(context.select(ids, weights), context.table(funnel_table(funnel), "funnel"))


def matching(
    buffer: "TrajectoryBuffer", where: str | None, version: int | None = None, ids: list[str] | None = None
) -> list[str]:
    """Ids for which ``where`` holds: of ``ids`` in their order, or of all rows sorted."""
    rows = _rows(buffer, where, version, ids, ())["trajectory_id"]
    if ids is None:
        return rows.sort().to_list()
    allowed = set(rows)
    return [name for name in ids if name in allowed]


def _drawn(
    context: Context, config: SelectConfig, draw: Draw, where: str | None, ids: list[str] | None
) -> "tuple[int, Sample]":
    """How many rows there are to draw from, and the draw."""
    from datastore.sampling import COLUMNS, SAMPLERS

    rows = _rows(context.buffer, where, config.version, ids, COLUMNS[draw.strategy])
    return rows.height, SAMPLERS[draw.strategy](rows, draw.n, context.seed)


def _rows(
    buffer: "TrajectoryBuffer", where: str | None, version: int | None, ids: list[str] | None, columns: Sequence[str]
) -> "pl.DataFrame":
    """The rows for which ``where`` holds, of ``ids`` or of all, in no promised order: their ids and these columns."""
    import polars as pl

    names = ", ".join(["trajectory_id", *columns])
    rows = buffer.sql(f"select {names} from trajectories{f' where ({where})' if where else ''}", version)
    if ids is None:
        return rows
    return rows.join(pl.DataFrame({"trajectory_id": ids}, schema={"trajectory_id": pl.String}), "trajectory_id", "semi")
