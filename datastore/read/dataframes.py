"""The buffer as a data set of Ray or a frame of Daft. Both read the table's Parquet files themselves, in parallel."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read.lookup import known_columns
from agentrl.datastore.storage.delta_paths import FOLDER, data_files
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table.delta_table import schema_version
from agentrl.schemas.trajectory import TRAJECTORY_VERSION

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

PART_ROWS = 4096
"""Rows that one Ray task reads of a selection."""


def ray_dataset(
    buffer: "TrajectoryBuffer", columns: Sequence[str] | None, ids: pa.Array | None, version: int | None = None
) -> Any:
    """``ray.data.Dataset`` of these columns (None: all): of the table's files, or of the rows of ``ids``, which Ray's
    tasks read from the store. Raises StoreError if Ray is not installed, or the table is of an older version."""
    _require("ray", "pip install 'agentrl-engine[ray]'")
    import ray.data

    names = known_columns(columns)
    if ids is None:
        return ray.data.read_parquet(_files(buffer, version), columns=names, filesystem=_filesystem(buffer))
    parts = [{"ids": ids.slice(start, PART_ROWS).to_pylist()} for start in range(0, len(ids), PART_ROWS)]

    def read(part: dict[str, Any]) -> pa.Table:
        return buffer.read(list(part["ids"][0]), names, version)

    return ray.data.from_items(parts, override_num_blocks=max(1, len(parts))).map_batches(read, batch_size=1)


def daft_frame(buffer: "TrajectoryBuffer", columns: Sequence[str] | None, version: int | None = None) -> Any:
    """``daft.DataFrame`` of these columns (None: all). Raises StoreError if Daft is not installed, or the table is of
    an older version. On S3 Daft finds credentials and endpoint by its own rules."""
    _require("daft", "Daft 0.7 wants a pyarrow below 26, so give it an environment of its own: pip install daft")
    import daft

    return daft.read_parquet(_files(buffer, version)).select(*known_columns(columns))


def _require(package: str, remedy: str) -> None:
    if find_spec(package) is None:
        raise StoreError(f"the package {package!r} is not installed here. {remedy}")


def _files(buffer: "TrajectoryBuffer", version: int | None) -> list[str]:
    table = buffer.table(version)
    if schema_version(table) < TRAJECTORY_VERSION:
        raise StoreError("the table is of an older version of agentrl; run: agentrl buffer migrate")
    return data_files(buffer.storage, FOLDER, table)


def _filesystem(buffer: "TrajectoryBuffer") -> Any:
    """How Ray's tasks reach the files on any machine, with this process's credentials. None for a local folder."""
    if isinstance(buffer.storage, LocalStorage):
        return None
    from pyarrow.fs import S3FileSystem

    options = buffer.committed.options
    endpoint = urlsplit(options.get("aws_endpoint_url", ""))
    return S3FileSystem(
        access_key=options.get("aws_access_key_id"),
        secret_key=options.get("aws_secret_access_key"),
        session_token=options.get("aws_session_token"),
        region=options["aws_region"],
        endpoint_override=endpoint.netloc or None,
        scheme=endpoint.scheme or "https",
    )
