"""Where data stays: the trajectory buffer, the artifact catalog, retrieval, and exchange formats.

Names are loaded when first used, so that ``import datastore`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datastore.append import AppendResult
    from datastore.buffer import TrajectoryBuffer
    from datastore.catalog import Catalog
    from datastore.errors import StoreError

_EXPORTS = {
    "AppendResult": "append",
    "Catalog": "catalog",
    "StoreError": "errors",
    "TrajectoryBuffer": "buffer",
}

__all__ = ["AppendResult", "Catalog", "StoreError", "TrajectoryBuffer"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'datastore' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"datastore.{_EXPORTS[name]}"), name)
