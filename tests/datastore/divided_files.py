"""Files of several formats with broken records, an import of them, and a program that imports them."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.formats import parts
from agentrl.datastore.shards import engine as shards
from agentrl.pipelines.stages.imports import import_files

FIRST = str(Path(__file__).with_name("first_chat.json"))


def write_files(folder: Path) -> list[str]:
    """A long file of chats, of which each second has an odd key and two lines are broken; and twenty small ones, of
    another format."""
    lines = []
    for number in range(120):
        messages = [
            {"role": "user", "content": f"question {number % 9}"},
            {"role": "assistant", "content": f"{number}"},
        ]
        record = {"messages": messages, "score": number / 120, "id": f"c{number}"} | ({"odd": 1} if number % 2 else {})
        lines.append(json.dumps(record) if number not in (50, 90) else '{"messages": 1}')
    paths = [folder / "chats.jsonl"]
    paths[0].write_text("\n".join(lines[:1] + lines[1:]) + "\n")
    for number in range(32):
        paths.append(folder / f"{number:02}.json")
        turns = [{"from": "human", "value": f"ask {number}"}, {"from": "gpt", "value": f"say {number}"}]
        paths[-1].write_text(
            json.dumps([{"conversations": turns, "odd": 2} if number % 2 else {"conversations": turns}])
        )
    return list(map(str, paths))


def imported(
    store: Path, files: Sequence[str], engine: str | Mapping[str, Any] | None, quarantine: bool = True
) -> dict[str, Any]:
    """What an import says, and its rows."""
    buffer = TrajectoryBuffer(store)
    if buffer.version is None:  # a killed import may leave an empty table, and groups are called by the version
        import_files(buffer, [FIRST])
    answer = import_files(
        buffer, files, shard_engine=engine, quarantine=quarantine, reward="score", success="reward > 0.5"
    ).as_dict()
    ids = buffer.scan().select("trajectory_id").collect()["trajectory_id"].sort().to_list()
    rows = buffer.read(ids).drop_columns(["created_at"]).to_pylist()
    return {**answer, "rows": rows}


def main() -> None:
    """Import files by processes, and write what came of it: STORE RESULT FILE..."""
    shards.TRIES = 1000  # kills come from outside, and may meet one shard often
    parts.PART_SIZE = 3000
    store, result, *files = sys.argv[1:]
    answer = imported(Path(store), files, {"type": "processes", "workers": 2, "shards": 8})
    Path(result).write_text(json.dumps(answer, default=str))


if __name__ == "__main__":
    main()
