"""The stage that selects rows of one version of the buffer's table: by SQL, by rules, by drawing."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from datastore.curation.rules import Rule
from pipelines.handles import Trajectories
from pipelines.stage import Context, StageConfig, stage
from pipelines.stages.curate import Curation, funnel_table

if TYPE_CHECKING:
    from datastore.buffer import TrajectoryBuffer


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
    def _reads_no_file(cls, where: str | None) -> str | None:
        if where is not None:
            from datastore.sql import check

            check(where)
        return where


@stage("trajectories.select", version=1)
def select(context: Context, config: SelectConfig, trajectories: list[Trajectories] | None = None) -> Curation:
    """Rows of one version of the buffer, or of the selections given: first ``where``, then ``rules``, then ``draw``.
    The funnel has a row per rule: rows before and after, and the ids of some rows that it dropped."""
    from datastore.curation.curate import Level, curate

    given = None
    if trajectories is not None:
        given = list(dict.fromkeys(name for selection in trajectories for name in selection.ids()))
    ids = matching(context.buffer, config.where, config.version, given)
    weights = [1.0] * len(ids)
    before = len(ids)
    funnel: list[Level] = []
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
        ids, weights = drawn(context.buffer, ids, config.draw, config.version, context.seed)
    context.metrics.update(before=before, after=len(ids))
    return Curation(context.select(ids, weights), context.table(funnel_table(funnel), "funnel"))


def matching(
    buffer: "TrajectoryBuffer", where: str | None, version: int | None = None, ids: list[str] | None = None
) -> list[str]:
    """Ids for which ``where`` holds: of ``ids`` in their order, or of all rows sorted."""
    rows = buffer.sql(f"select trajectory_id from trajectories{f' where {where}' if where else ''}", version)
    if ids is None:
        return rows["trajectory_id"].sort().to_list()
    allowed = set(rows["trajectory_id"])
    return [name for name in ids if name in allowed]


def drawn(
    buffer: "TrajectoryBuffer", ids: list[str], draw: Draw, version: int, seed: int
) -> tuple[list[str], list[float]]:
    """Ids and weights of a draw from ``ids``."""
    import polars as pl

    from datastore.sampling import COLUMNS, SAMPLERS

    wanted = pl.LazyFrame({"trajectory_id": ids}, schema={"trajectory_id": pl.String})
    rows = buffer.scan(version).select(COLUMNS).join(wanted, on="trajectory_id", how="semi").collect()
    sample = SAMPLERS[draw.strategy](rows, draw.n, seed)
    return sample.ids, sample.weights
