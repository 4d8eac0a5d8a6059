"""OpenAI chat JSON Lines: ``{"messages": [...], "tools": [...]}``, arguments of calls as JSON text.

Carries: roles, text, reasoning (``reasoning_content``), calls with ids, tool names, tool schemas.
Cannot carry: tokens, masks, log-probs, rewards and outcome, lineage, message spans.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from datastore.formats.common import from_chat, json_text, make_row, read_lines, to_chat, write_lines
from schemas.trajectory import Trajectory


def read(path: Path) -> Iterator[Trajectory]:
    for number, line in enumerate(read_lines(path)):
        yield make_row(number, from_chat(line["messages"]), tools=json_text(line.get("tools") or []))


def write(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, ({"messages": to_chat(row.messages), "tools": json.loads(row.tools)} for row in rows))
