"""Choosing trajectories by what their tool calls were."""

import json
from collections import Counter
from typing import TYPE_CHECKING

from pydantic import Field

from agentrl.datastore.curation.rules import OwnRule

if TYPE_CHECKING:
    import polars as pl

    from agentrl.datastore.curation.curate import Work


class NoRepeats(OwnRule):
    """Keep rows that make the same call at most ``times`` times: an agent that repeats itself is stuck."""

    times: int = Field(1, ge=1)
    argument: str | None = Field(None, description="compare this argument alone; None compares whole calls")

    def keep(self, rows: "pl.DataFrame", work: "Work") -> "pl.DataFrame":
        import polars as pl

        most = [max(Counter(self._calls(text)).values(), default=0) for text in work.actions(rows)]
        return rows.filter(pl.Series(most, dtype=pl.Int64) <= self.times)

    def _calls(self, actions: str) -> list[str]:
        from agentrl.datastore.curation.text import CALL

        calls = [line.removeprefix(CALL) for line in actions.splitlines() if line.startswith(CALL)]
        if self.argument is None:
            return calls
        return [str(json.loads(call.partition(" ")[2]).get(self.argument)) for call in calls]
