"""One commit of the buffer's table, written by us: it is durable, it is checked against the version that it follows,
and after any interruption it is known whether it is in the log.

The file of a commit is created under the next free number, or not at all. So what was checked on the version before
is still true when the commit happens: no other writer can commit in between. delta-rs checks less (two compactions may
remove the same files), and does not make sure that a commit reaches the disk.
"""

import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.datastore.errors import CorruptError, StoreError, one_line
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage, sync
from agentrl.datastore.table import checkpoints
from agentrl.datastore.table.delta_log import commit_key
from agentrl.datastore.table.delta_table import BufferTable
from agentrl.datastore.table.open_writers import death
from agentrl.datastore.table.writer import Action, FileWriter

if TYPE_CHECKING:
    from deltalake import DeltaTable


def commit(
    to: BufferTable,
    files: FileWriter | None,
    build: "Callable[[DeltaTable], Sequence[Action]]",
    operation: str,
    info: dict[str, Any],
) -> int:
    """Write one commit and give its version.

    ``build`` gives the actions for a commit that follows the version it is called with, or raises if they must not
    follow it. It is called again if another commit comes first. ``files`` are those that the commit adds. They are
    kept if the outcome is not known.
    """
    mark = uuid.uuid4().hex
    while True:
        with to.following() as table:
            if files is not None and table.transaction_version(death(files.id)) is not None:
                raise StoreError(
                    "a vacuum took this writer for dead, because its mark was not renewed, and removed its files; "
                    "nothing was committed, do it again"
                )
            version = table.version() + 1
            try:
                actions = list(build(table))
            except CorruptError:
                if to.open().version() < version:
                    raise
                continue  # the file that could not be read may have left the table
        info_fields = {
            "timestamp": int(time.time() * 1000),
            "operation": operation,
            "operationParameters": {},
            "commit": mark,
        }
        # commitInfo comes last: a file that was cut short lacks it
        lines = [json.dumps(action, ensure_ascii=False) for action in [*actions, {"commitInfo": info_fields | info}]]
        body = "\n".join(lines).encode()
        if _create(to.storage, version, body, files):
            break
        time.sleep(random.uniform(0, 0.01))
    checkpoints.committed(to, version, len(body))
    return version


def _create(storage: LocalStorage | S3Storage, version: int, body: bytes, files: FileWriter | None) -> bool:
    """Create the commit. Returns whether the log has it under this version. After an error the log is read, and on S3
    the commit is put again."""
    key = commit_key(version)
    outcome: bool | None = None
    try:
        if files is not None:
            files.committed = None
        try:
            # False also if the answer to a put was lost, and the client has put it twice
            outcome = storage.put_if(key, body, None) is not None or storage.read(key) == body
        except BaseException as error:
            outcome = _settle(storage, key, body)
            if outcome and isinstance(error, Exception):
                return True
            if isinstance(error, Exception):
                raise StoreError(
                    f"commit {version} of {storage.uri} failed, and the table is unchanged: {one_line(error)}"
                ) from error
            raise
    finally:
        if files is not None:
            files.committed = outcome
    return outcome


def _settle(storage: LocalStorage | S3Storage, key: str, body: bytes) -> bool:
    """Whether a commit is in the log, after an error that does not tell. On S3 a put may still be on its way. Only a
    commit with this number settles that, so it is put again."""
    try:
        stored = storage.read(key)
        if stored is None and not isinstance(storage, LocalStorage):
            return storage.put_if(key, body, None) is not None or storage.read(key) == body
        if stored == body and isinstance(storage, LocalStorage):
            sync((storage.root / key).parent)
    except Exception as error:
        raise StoreError(
            f"it is unknown whether {storage.uri}/{key} was committed: the store does not answer ({one_line(error)}); "
            "its files are kept. Do it again: what is in the table already is not done twice"
        ) from error
    return stored == body
