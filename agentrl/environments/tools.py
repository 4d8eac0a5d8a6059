"""Tools as typed functions: methods of an episode under ``@tool``. Types give the schema, and arguments are checked."""

import json
from collections.abc import Callable
from inspect import cleandoc
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from agentrl.environments.base import Observation
from schemas.trajectory import ToolCall

Function = TypeVar("Function", bound=Callable[..., Any])


def tool(function: Function) -> Function:
    """Offer a method to the policy. Its docstring is the description; its result becomes text, as JSON if it is
    none."""
    function.is_tool = True  # type: ignore[attr-defined]
    return function


def functions(episode: object) -> dict[str, Callable[..., Any]]:
    """The methods under ``@tool``, by name, in the order of their definition."""
    names = [name for cls in reversed(type(episode).__mro__) for name in vars(cls)]
    found = {name: getattr(episode, name) for name in dict.fromkeys(names)}
    return {name: function for name, function in found.items() if getattr(function, "is_tool", False)}


def schemas(episode: object) -> str:
    """JSON of the tools that an episode offers."""
    return json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": cleandoc(function.__doc__ or ""),
                    "parameters": _checked(function).json_schema(),
                },
            }
            for name, function in functions(episode).items()
        ]
    )


def _checked(function: Callable[..., Any]) -> TypeAdapter[Any]:
    adapted: Any = function
    return TypeAdapter(adapted)


def answer(episode: object, call: ToolCall) -> Observation:
    """What a typed function says to a call. Unknown names and arguments of other types are errors that say so."""
    known = functions(episode)
    if call.name not in known:
        return Observation(f"no tool {call.name}; there are {', '.join(known) or 'none'}", error=True)
    arguments = call.parsed()
    if not isinstance(arguments, dict):
        return Observation(f"{call.name} takes an object of arguments", error=True)
    try:
        result = _checked(known[call.name]).validate_python(ArgsKwargs((), arguments))
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return Observation(f"{call.name}: {said}", error=True)
    if isinstance(result, Observation):
        return result
    return Observation(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))
