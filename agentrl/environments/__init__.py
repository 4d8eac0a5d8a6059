"""Environments by name, with their settings. A user's own is named ``package.module:Class``.

To add an environment, write its module and name it in the table below.
"""

from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import ValidationError

from agentrl.environments.base import Environment, PlainEnvironment
from agentrl.schemas.choice import OneOf, Settings
from agentrl.schemas.declared import is_environment

ENVIRONMENTS = {
    "code": "agentrl.environments.code.environment:Code",
    "gymnasium": "agentrl.environments.adapters.gymnasium:GymnasiumEnvironment",
    "harness": "agentrl.environments.harness.environment:HarnessEnvironment",
    "lookup": "agentrl.environments.lookup:LookupEnvironment",
    "math": "agentrl.environments.math.environment:Math",
    "mcp": "agentrl.environments.adapters.mcp:McpEnvironment",
    "minigrid": "agentrl.environments.adapters.minigrid:MiniGrid",
    "office": "agentrl.environments.office.environment:Office",
    "openenv": "agentrl.environments.adapters.openenv:OpenEnvironment",
    "program_io": "agentrl.environments.program_io.environment:ProgramIO",
    "predict": "agentrl.environments.predict:Predict",
    "propose": "agentrl.environments.propose:Propose",
    "reasoning_gym": "agentrl.environments.adapters.reasoning_gym:ReasoningGym",
    "repository": "agentrl.environments.repository.environment:Repository",
    "research": "agentrl.environments.research.environment:Research",
    "rooms": "agentrl.environments.rooms.environment:Rooms",
    "scienceworld": "agentrl.environments.adapters.scienceworld:ScienceWorld",
    "search_qa": "agentrl.environments.search_qa.environment:SearchQA",
    "service": "agentrl.environments.service.environment:Service",
    "shop": "agentrl.environments.shop.environment:Shop",
    "skilled": "agentrl.environments.skilled:Skilled",
    "textarena": "agentrl.environments.adapters.textarena:TextArena",
    "verifiers": "agentrl.environments.adapters.verifiers:VerifiersEnvironment",
    "words": "agentrl.environments.words:WordsEnvironment",
}
"""Name -> ``module:Class``."""

ENVIRONMENT = OneOf(
    "environment", ENVIRONMENTS, Environment, declares=is_environment, own=(Environment, PlainEnvironment)
)


if TYPE_CHECKING:
    EnvironmentChoice = Settings
else:
    EnvironmentChoice = Annotated[Any, ENVIRONMENT]
    """Type of a config field that chooses an environment and its settings. Its text is what rows name it by."""


def load_environment(name: str) -> Environment:
    """The environment that a name stands for, with its settings: ``my_shop.shop:Shop{"dearest": 2}``. The name may come
    from a row of data, so only what is declared as an environment is imported or called. Raises ValueError that lists
    the known ones."""
    try:
        return cast(Environment, ENVIRONMENT.read(name).make())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"] if part != "type")
        raise ValueError(f"environment {name!r}: {where + ': ' if where else ''}{first['msg']}") from error
