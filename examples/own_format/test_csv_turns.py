from pathlib import Path

from my_formats.csv_turns import CsvTurns

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.formats.exports import export_rows
from agentrl.datastore.formats.imports import import_paths
from agentrl.schemas.trajectory import Trajectory

CHATS = Path(__file__).parent / "chats.csv"


def test_conversations_come_in_and_go_out_again(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    result = import_paths(buffer, [CHATS], CsvTurns(type="mine", delimiter=";"))
    assert (result.rows, result.successes, result.unscored, result.ignored) == (3, 1, 1, {"channel": 6})
    rows = everything(buffer)
    assert [message.content for message in rows[0].messages] == ["What is the capital of Peru?", "Lima"]
    out = tmp_path / "out.csv"
    export_rows(buffer, [row.trajectory_id for row in rows], out, CsvTurns(type="mine"))
    again = TrajectoryBuffer(tmp_path / "again")
    import_paths(again, [out], CsvTurns(type="mine"))
    assert [(row.reward, row.messages) for row in everything(again)] == [(row.reward, row.messages) for row in rows]


def everything(buffer: TrajectoryBuffer) -> list[Trajectory]:
    ids = buffer.scan().select("trajectory_id").collect()["trajectory_id"]
    return buffer.get_many(sorted(ids))
