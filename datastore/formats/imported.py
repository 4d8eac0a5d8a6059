"""What an import did."""

from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


@dataclass
class Imported:
    """What an import did, or with ``dry_run`` would do.

    ``fingerprint`` is that of the import, which ``agentrl buffer forget`` takes. ``files`` has the rows of each file.
    ``known`` are files whose rows are in the buffer already, ``repeats`` files whose content is there under other
    labels, and ``skipped`` files of a folder that no format fits.
    """

    fingerprint: str = ""
    dry_run: bool = False
    version: int | None = None
    rows: int = 0
    messages: int = 0
    calls: int = 0
    tokens: int = 0
    successes: int = 0
    unscored: int = 0
    quarantined: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    repeats: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    ignored: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, int] = field(default_factory=dict)
    unreadable: list[dict[str, str]] = field(default_factory=list)
    present: int = 0
    """Rows of sessions that have grown which the buffer has already."""
    annotations: int = 0
    """Annotations of rows that their records carry, and that were added."""
    superseded: int = 0
    """Rows that were removed, since a new one goes on from them."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def count(self, rows: pa.Table) -> None:
        self.rows += rows.num_rows
        self.messages += pc.sum(pc.list_value_length(rows["messages"])).as_py() or 0
        self.calls += pc.sum(rows["n_tool_calls"]).as_py() or 0
        self.tokens += pc.sum(rows["n_tokens"]).as_py() or 0
        self.successes += pc.sum(rows["success"]).as_py() or 0
        self.unscored += pc.sum(pc.and_(rows["success"].is_null(), rows["reward"].is_null())).as_py() or 0
