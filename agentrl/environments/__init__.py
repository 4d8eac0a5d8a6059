"""Environments by name. A user's own is named ``package.module:Class``."""

from importlib import import_module

from agentrl.environments.base import Environment
from agentrl.environments.lookup import LookupEnvironment

ENVIRONMENTS: dict[str, type[Environment]] = {"lookup": LookupEnvironment}


def load_environment(name: str) -> Environment:
    """The environment of that name. Raises ValueError that lists the known ones."""
    if ":" in name:
        module, attribute = name.split(":", 1)
        return getattr(import_module(module), attribute)()
    if name not in ENVIRONMENTS:
        raise ValueError(f"env {name!r} is unknown; known are {sorted(ENVIRONMENTS)}, or package.module:Class")
    return ENVIRONMENTS[name]()
