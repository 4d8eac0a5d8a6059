"""Environments by name. A user's own is named ``package.module:Class``.

To add an environment, write its module and name it in the table below.
"""

from typing import cast

from agentrl.declared import declared, is_environment
from agentrl.environments.base import Environment

ENVIRONMENTS = {"lookup": "agentrl.environments.lookup:LookupEnvironment"}
"""Name -> ``module:Class``."""


def load_environment(name: str) -> Environment:
    """The environment of that name. The name may come from a row of data, so only what is declared as an environment is
    imported or called. Raises ValueError that lists the known ones."""
    path = name if ":" in name else ENVIRONMENTS.get(name)
    if path is None:
        raise ValueError(f"env {name!r} is unknown; known are {sorted(ENVIRONMENTS)}, or package.module:Class")
    try:
        found = declared(path, "environment", is_environment)
    except LookupError as error:
        raise ValueError(str(error.args[0])) from error
    if not isinstance(found, type) or not callable(getattr(found, "tasks", None)):
        raise ValueError(f"{name!r} is no environment: a class with the methods tasks and episode")
    return cast(Environment, found())
