"""Packages of the extras, imported when they are used."""

from importlib import import_module
from typing import Any

from agentrl.datastore.errors import StoreError
from agentrl.schemas.installation import install_hint


def optional(module: str, extra: str) -> Any:
    """The module, or an error that names the extra to install."""
    try:
        return import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise StoreError(f"this needs {package}, which is not installed: {install_hint(extra)}") from None
