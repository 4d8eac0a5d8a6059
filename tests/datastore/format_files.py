"""Reading files as other projects write them, in small: the same keys and nesting, with text of our own."""

import json
from pathlib import Path
from typing import Any

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.formats import FORMATS, detect
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.source import Source
from agentrl.schemas.trajectory import Trajectory

USER = {"role": "user", "content": "where is Ann?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"who": "Ann"}'}}


class Read:
    """What a file gave."""

    def __init__(self, path: Path, name: str, document: Any, suffix: str = ".json") -> None:
        self.notes = Notes(quarantine=True, prompts=True)
        file = path / f"file{suffix}"
        if suffix.startswith(".jsonl"):
            file.write_text("".join(json.dumps(entry) + "\n" for entry in document))
        else:
            file.write_text(json.dumps(document, indent=1))
        source = Source(file, self.notes)
        assert detect(source) == name
        self.rows: list[Trajectory] = list(FORMATS[name].read(source))

    @property
    def row(self) -> Trajectory:
        [row] = self.rows
        return row


def shape(row: Trajectory) -> list[tuple[str, str]]:
    """Roles with text, and calls as ``name(arguments)``."""
    out = []
    for message in row.messages:
        calls = " ".join(f"{call.name}{json.dumps(call.parsed())}" for call in message.tool_calls)
        out.append((message.role.value, " ".join(filter(None, [message.content, calls]))))
    return out


TALK = [
    ("user", "where is Ann?"),
    ("assistant", 'find{"who": "Ann"}'),
    ("tool", "in Rome"),
    ("assistant", "She is in Rome."),
]


def chat(text: str = "hi", answer: str = "ho", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}], **more}


CHAT = chat()


def lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def count(buffer: TrajectoryBuffer) -> int:
    return 0 if buffer.version is None else int(buffer.sql("select count(*) from trajectories").item())
