"""Environments by name. A user's own is named ``package.module:Class``.

To add an environment, write its module and name it in the table below.
"""

from typing import cast

from agentrl.environments.base import Environment, PlainEnvironment
from schemas.choice import OneOf
from schemas.declared import is_environment

ENVIRONMENTS = {"lookup": "agentrl.environments.lookup:LookupEnvironment"}
"""Name -> ``module:Class``."""

ENVIRONMENT = OneOf(
    "environment", ENVIRONMENTS, Environment, declares=is_environment, own=(Environment, PlainEnvironment)
)


def load_environment(name: str) -> Environment:
    """The environment of that name. The name may come from a row of data, so only what is declared as an environment is
    imported or called. Raises ValueError that lists the known ones."""
    try:
        return cast(Environment, ENVIRONMENT.find(name)())
    except LookupError as error:
        raise ValueError(str(error.args[0])) from error
