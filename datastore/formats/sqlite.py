"""SQLite databases in which agent frameworks keep sessions: read as they are, without a change to them. What is in a
write-ahead log beside the file counts."""

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentrl.datastore.errors import StoreError

MAGIC = b"SQLite format 3\0"


def columns_of(path: Path) -> Mapping[str, frozenset[str]]:
    """The columns of each table. None of a file that cannot be read."""
    try:
        with closing(_opened(path, 1 << 20)) as database:
            names = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
            return {name: frozenset(_columns(database, name)) for name in names}
    except sqlite3.Error:
        return {}


def rows_of(path: Path, name: str, query: str, limit: int) -> Iterator[dict[str, Any]]:
    """The rows that a query gives, by column. ``name`` is that of the file in errors, and ``limit`` the bytes that a
    value may take. Raises StoreError if the database cannot be read."""
    try:
        with closing(_opened(path, limit)) as database:
            cursor = database.execute(query)
            names = [column for column, *_ in cursor.description]
            for row in cursor:
                yield dict(zip(names, row, strict=True))
    except sqlite3.Error as error:
        raise StoreError(f"{name} cannot be read as SQLite: {error}") from None


def content_of(path: Path, name: str, limit: int) -> str:
    """Digest of all rows, however the file holds them."""
    total = hashlib.blake2b(digest_size=16)
    for table in sorted(columns_of(path)):
        total.update(table.encode() + b"\0")
        for row in rows_of(path, name, f"select * from {quoted(table)}", limit):
            total.update(repr(list(row.items())).encode() + b"\0")
    return total.hexdigest()


def quoted(name: str) -> str:
    """The name of a table or column in a query."""
    return '"' + name.replace('"', '""') + '"'


def _columns(database: sqlite3.Connection, table: str) -> Iterator[str]:
    for row in database.execute(f"pragma table_info({quoted(table)})"):
        yield row[1]


def _opened(path: Path, limit: int) -> sqlite3.Connection:
    database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, check_same_thread=False)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limit)
    database.text_factory = lambda data: data.decode(errors="replace")
    database.execute("pragma trusted_schema = off")
    return database
