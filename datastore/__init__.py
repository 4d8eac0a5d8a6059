"""Where data stays: the trajectory buffer, the artifact catalog, retrieval, and exchange formats.

Names are loaded when first used, so that ``import agentrl.datastore`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.errors import StoreError
    from agentrl.datastore.table.append import AppendResult

_EXPORTS = {
    "AppendResult": "table.append",
    "Catalog": "artifacts.catalog",
    "StoreError": "errors",
    "TrajectoryBuffer": "buffer",
}

__all__ = ["AppendResult", "Catalog", "StoreError", "TrajectoryBuffer"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'agentrl.datastore' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
