"""The stage that chooses what to train on, by rules."""

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from agentrl.datastore.curation.rules import Rule
from agentrl.datastore.search.embedding import EmbedderChoice
from agentrl.pipelines.handles import Scores, Table, Tasks, Trajectories
from agentrl.pipelines.parts.distinct import distinct, weights_in
from agentrl.pipelines.parts.dividing import dividing
from agentrl.pipelines.parts.scores import ByScorer, scores_of
from agentrl.pipelines.stage import Context, stage

if TYPE_CHECKING:
    from agentrl.datastore import TrajectoryBuffer
    from agentrl.datastore.curation.curate import Level

EXAMPLES = 3
FUNNEL_SCHEMA = pa.schema(
    [
        pa.field("rule", pa.string(), nullable=False),
        pa.field("before", pa.int64(), nullable=False),
        pa.field("after", pa.int64(), nullable=False),
        pa.field("dropped_examples", pa.list_(pa.string()), nullable=False),
    ]
)


def funnel_table(funnel: "list[Level]") -> pa.Table:
    """One row per rule: its name, the rows before and after it, and the ids of some rows that it dropped."""
    levels = [
        {
            "rule": level.rule,
            "before": level.before,
            "after": level.after,
            "dropped_examples": level.examples,
        }
        for level in funnel
    ]
    return pa.Table.from_pylist(levels, schema=FUNNEL_SCHEMA)


DROPPED_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("rule", pa.string(), nullable=False),
        pa.field("source_id", pa.string()),
    ]
)


def dropped_rows(buffer: "TrajectoryBuffer", rule: str, ids: pa.Array) -> pa.Table:
    """The rows that a rule dropped, by its name in the funnel, with the ids that their sources gave them."""
    sources = buffer.read(ids, ["source_id"])["source_id"]
    columns = {"trajectory_id": ids, "rule": pa.repeat(rule, len(ids)), "source_id": sources}
    return pa.table(columns, schema=DROPPED_SCHEMA)


class Curation(NamedTuple):
    trajectories: Trajectories
    funnel: Table
    dropped: Table


class CurateConfig(ByScorer):
    rules: list[Rule] = Field(description="applied in this order; see docs/reference/buffer.md")
    split: str | None = Field("train", description="split of the tasks whose rows are taken; null takes all")
    embedder: EmbedderChoice = Field(
        "embedded", description="embedded (the buffer's own words), minilm, or a sentence-transformers model or path"
    )
    dry_run: bool = Field(False, description="pass all rows on, and only report what the rules would do")


@stage("trajectories.curate", version=1)
def curate(
    context: Context,
    config: CurateConfig,
    trajectories: list[Trajectories],
    heldout: list[Tasks] | None = None,
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
) -> Curation:
    """Narrow trajectories by rules to a selection of ids. The funnel has a row per rule: rows before and after, and the
    ids of some rows that it dropped. The table ``dropped`` has all of them, each with the rule. Rows of other splits
    are left out by default, as the funnel says. Rows keep their weights. ``heldout`` tasks are what the rule
    ``decontaminate`` compares with."""
    from agentrl.datastore.curation.curate import Level
    from agentrl.datastore.curation.curate import curate as apply

    given = distinct(trajectories)
    kept, funnel = given, list[Level]()
    prompts = [task.prompt for tasks in heldout or [] for task in tasks.read()]
    with context.growing_table(DROPPED_SCHEMA, "dropped") as (dropped, add), dividing(context) as divide:
        if config.split is not None:
            same = pc.equal(context.buffer.read(given, ["split"])["split"], config.split).combine_chunks()
            kept, others = given.filter(same), given.filter(pc.invert(same))
            if len(others):
                others = others.take(pc.sort_indices(others))
                funnel.append(Level(f"split {config.split}", len(given), len(kept), others[:EXAMPLES].to_pylist()))
                add(dropped_rows(context.buffer, funnel[-1].rule, others))
        result = apply(
            context.buffer,
            config.rules,
            ids=kept,
            heldout=prompts,
            seed=context.seed,
            embedder=config.embedder,
            scores=scores_of(scores, config.scorer),
            on_dropped=lambda rule, ids: add(dropped_rows(context.buffer, rule, ids)),
            progress=context.progress,
            divide=divide,
        )
    funnel += result.funnel
    context.metrics.update(before=len(given), after=len(result.ids), other_splits=len(given) - len(kept))
    chosen = given if config.dry_run else result.ids
    weights = weights_in(trajectories, chosen)
    return Curation(context.select(chosen, weights), context.table(funnel_table(funnel), "funnel"), dropped)
