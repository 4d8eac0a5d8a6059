"""Environments by name. A user's own is named ``package.module:Class``.

To add an environment, write its module and name it in the table below.
"""

from importlib import import_module

from agentrl.environments.base import Environment

ENVIRONMENTS = {"lookup": "agentrl.environments.lookup:LookupEnvironment"}
"""Name -> ``module:Class``."""


def load_environment(name: str) -> Environment:
    """The environment of that name. Raises ValueError that lists the known ones."""
    path = name if ":" in name else ENVIRONMENTS.get(name)
    if path is None:
        raise ValueError(f"env {name!r} is unknown; known are {sorted(ENVIRONMENTS)}, or package.module:Class")
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)()
