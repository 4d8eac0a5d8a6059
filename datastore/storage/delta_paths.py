"""Delta tables in local folders whose names mean something else in a URI.

delta-rs gives the paths of data files percent-encoded, and Polars does not decode them. delta-rs cannot open a table at
all below a folder named ``100%20sure``, since it decodes the name once too often. So in such folders Polars gets the
names from us, and delta-rs opens the log through a link in a temporary folder. It does not open data files.
"""

import atexit
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from agentrl.datastore.storage.object_store import LocalStorage, S3Storage

if TYPE_CHECKING:
    import polars as pl
    from deltalake import DeltaTable

_PLAIN = re.compile(r"[A-Za-z0-9/_.~@:+,=&;!()'$-]*")

FOLDER = "trajectories"
"""The table's folder, below the store."""


def is_plain(storage: LocalStorage | S3Storage) -> bool:
    """Whether delta-rs and Polars read the place's name as we do."""
    return not isinstance(storage, LocalStorage) or _PLAIN.fullmatch(storage.uri) is not None


def opened_as(storage: LocalStorage | S3Storage, folder: str) -> str:
    """The name under which delta-rs opens the log of the table in ``folder``."""
    if not isinstance(storage, LocalStorage) or is_plain(storage):
        return f"{storage.uri.rstrip('/')}/{folder}"
    return _linked(storage.root / folder)


@cache
def _linked(table: Path) -> str:
    """A folder of this process that holds a link to the table's log. The log itself need not exist yet."""
    folder = tempfile.mkdtemp(prefix="agentrl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (Path(folder) / table.name).mkdir()
    (Path(folder) / table.name / "_delta_log").symlink_to(table / "_delta_log")
    return f"{folder}/{table.name}"


def data_files(storage: LocalStorage | S3Storage, folder: str, table: "DeltaTable") -> list[str]:
    """The table's data files, as Polars takes them."""
    if is_plain(storage):
        return table.file_uris()
    import pyarrow as pa

    names = pa.table(table.get_add_actions())["path"].to_pylist()
    return [f"{storage.uri}/{folder}/{unquote(name)}" for name in names]


def scan_table(storage: LocalStorage | S3Storage, folder: str, table: "DeltaTable") -> "pl.LazyFrame":
    """All rows of a table's version. Statistics of the log skip files only if the place's name is plain."""
    import polars as pl
    import pyarrow as pa

    if is_plain(storage):
        return pl.scan_delta(table)
    schema = pl.DataFrame(pa.schema(table.schema()).empty_table()).schema
    files = data_files(storage, folder, table)
    if not files:
        return pl.LazyFrame(schema=schema)
    return pl.scan_parquet(files, schema=schema, glob=False, missing_columns="insert", extra_columns="ignore")
