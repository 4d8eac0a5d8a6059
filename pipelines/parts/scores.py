"""Stages that read the scores of a scorer in place of the rewards that rows were stored with."""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.handles import Scores, Trajectories
from agentrl.pipelines.stage import StageConfig
from agentrl.schemas.trajectory import UnscoredError


class ByScorer(StageConfig):
    """Which rewards a stage reads."""

    scorer: str | None = Field(
        None, description="a scorer of the input scores, whose reward and success count; null: as rows were stored"
    )


def scores_of(scores: Sequence[Scores], scorer: str | None) -> pa.Table | None:
    """The scores that a scorer gave, None if none is named.

    Raises LookupError if the scorer is in none of the tables, and ValueError if tables are given without a scorer's
    name, or if two of them have scores of one trajectory.
    """
    if scorer is None:
        if scores:
            raise ValueError("inputs.scores is wired, and with.scorer names none of its scorers; name one")
        return None
    whole = pa.concat_tables([table.table() for table in scores]) if scores else None
    known = [] if whole is None else sorted(pc.unique(whole["scorer"]).to_pylist())
    if whole is None or scorer not in known:
        hint = did_you_mean(scorer, known) or f"; there are {', '.join(known) or 'none: wire inputs.scores'}"
        raise LookupError(f"no scores of a scorer {scorer!r}{hint}")
    scored = whole.filter(pc.equal(whole["scorer"], scorer)).combine_chunks()
    if len(pc.unique(scored["trajectory_id"])) < len(scored):
        raise ValueError(f"two tables have scores of {scorer!r} for one trajectory; wire one of them, or rename one")
    return scored


def under(trajectories: list[Trajectories], scores: Sequence[Scores], scorer: str | None) -> list[Trajectories]:
    """Selections whose rows have the rewards that a scorer gave; as they are, if none is named.

    Raises UnscoredError if the scorer was not asked about some of the rows, and as :func:`scores_of` does.
    """
    table = scores_of(scores, scorer)
    if table is None:
        return trajectories
    for selection in trajectories:
        ids = selection.selection()["trajectory_id"]
        if missing := ids.filter(pc.invert(pc.is_in(ids, value_set=table["trajectory_id"]))).to_pylist():
            raise UnscoredError(f"score of {scorer!r}", missing)
    return [replace(selection, scores=table) for selection in trajectories]
