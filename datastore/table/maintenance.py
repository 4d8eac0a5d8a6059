"""What all upkeep shares: its lock, and the table's live files."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa

from agentrl.datastore.errors import LockTimeoutError
from agentrl.datastore.storage.lease import hold
from agentrl.datastore.table.ids import open_file

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from agentrl.datastore.buffer import TrajectoryBuffer

LOCK = "locks/upkeep-trajectories.lock"


@contextmanager
def alone(buffer: "TrajectoryBuffer") -> Iterator[None]:
    """One upkeep at a time, among processes. The lock only saves work: each commit checks by itself that no row is lost
    or doubled, also if the lock was lost."""
    with ExitStack() as held:
        try:
            held.enter_context(hold(buffer.storage, LOCK, timeout=0))
        except LockTimeoutError:
            warnings.warn(f"another upkeep of {buffer.store} is under way; this one waits for it", stacklevel=4)
            held.enter_context(hold(buffer.storage, LOCK))
        yield


def live_files(table: "DeltaTable") -> dict[str, tuple[int, int]]:
    """Live files with their rows and bytes, in the table's order. Rows are 0 if the log does not say."""
    actions = pa.table(table.get_add_actions(flatten=True))
    names = (unquote(path) for path in actions["path"].to_pylist())
    rows = (count or 0 for count in actions["num_records"].to_pylist())
    return dict(zip(names, zip(rows, actions["size_bytes"].to_pylist(), strict=True), strict=True))


def read_parts(buffer: "TrajectoryBuffer", name: str) -> Iterator[pa.Table]:
    """A data file's rows, one row group at a time."""
    with open_file(buffer.storage, name) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)
