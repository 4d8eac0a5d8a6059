"""Tools as typed functions: methods of an episode under ``@tool``.

The signature gives the JSON schema, the docstring gives the descriptions, and arguments are checked against the types:

    @tool
    def read(self, path: str, line: Annotated[int, Field(ge=1)] = 1) -> str:
        '''Ten lines of a file.

        path: of the file, as `list` shows it
        line: the first one
        '''

Lines that begin with the name of a parameter and a colon describe that parameter; the text before them describes the
tool. A wrong call is an :class:`Observation` with ``error``, never an exception.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agentrl.environments.base import Observation
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import ToolCall

Function = TypeVar("Function", bound=Callable[..., Any])


class ToolError(Exception):
    """Raised in a tool: the call is refused, and the policy reads the text."""


def tool(function: Function) -> Function:
    """Offer a method to the policy. Its result becomes text, as JSON if it is no ``str``. A method that returns an
    :class:`Observation` says so itself if the call was refused; it may raise :class:`ToolError` instead."""
    function.is_tool = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Tool:
    """A method under ``@tool``: its name, its JSON schema in OpenAI's form, and what checks the arguments."""

    name: str
    schema: Mapping[str, Any]
    arguments: type[BaseModel]


@lru_cache(maxsize=256)
def offered(episode: type[Any]) -> dict[str, Tool]:
    """The tools of a class of episodes, by name, in the order of their definition.

    Raises TypeError if a parameter has no name that a call could use, as in ``*rest``.
    """
    names = dict.fromkeys(name for cls in reversed(episode.__mro__) for name in vars(cls))
    methods = {name: getattr(episode, name) for name in names}
    return {name: _tool(name, method) for name, method in methods.items() if getattr(method, "is_tool", False)}


def schemas(episode: object) -> str:
    """JSON of the tools that an episode, or a class of episodes, offers."""
    cls: Any = episode if isinstance(episode, type) else type(episode)
    return json.dumps([tool.schema for tool in offered(cls).values()])


def answer(episode: object, call: ToolCall) -> Observation:
    """What a typed function says to a call. Unknown names and arguments of other types are errors that say so."""
    arguments = _arguments(episode, call)
    if isinstance(arguments, Observation):
        return arguments
    try:
        return observed(getattr(episode, call.name)(**arguments))
    except ToolError as error:
        return Observation(str(error), error=True)


async def answer_async(episode: object, call: ToolCall) -> Observation:
    """As :func:`answer`; the function may be a coroutine."""
    arguments = _arguments(episode, call)
    if isinstance(arguments, Observation):
        return arguments
    try:
        result = getattr(episode, call.name)(**arguments)
        return observed(await result if inspect.isawaitable(result) else result)
    except ToolError as error:
        return Observation(str(error), error=True)


def _arguments(episode: object, call: ToolCall) -> dict[str, Any] | Observation:
    """The checked arguments of a call, or why it is refused."""
    cls: Any = type(episode)
    known = offered(cls)
    if call.name not in known:
        return Observation(f"no tool {call.name}; there are {', '.join(known) or 'none'}", error=True)
    try:
        given = loads(call.arguments)
        if not isinstance(given, dict):
            return Observation(f"{call.name} takes an object of arguments", error=True)
        return dict(vars(known[call.name].arguments.model_validate(given)))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        return Observation(f"{call.name}: {problems}", error=True)
    except ValueError as error:
        return Observation(f"{call.name}: the arguments are no JSON: {error}", error=True)


def observed(result: Any) -> Observation:
    """What a tool returned, as an observation: a text as it is, anything else as JSON."""
    if isinstance(result, Observation):
        return result
    return Observation(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))


def _tool(name: str, function: Callable[..., Any]) -> Tool:
    _self, *parameters = inspect.signature(function).parameters.values()
    about, described = _described(function.__doc__ or "", [parameter.name for parameter in parameters])
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for spec in parameters:
        if spec.kind not in (spec.POSITIONAL_OR_KEYWORD, spec.KEYWORD_ONLY):
            raise TypeError(f"tool {name} takes {spec}; a tool's parameter has a name and a type")
        fields[spec.name] = (hints.get(spec.name, Any), ... if spec.default is spec.empty else spec.default)
    config = ConfigDict(extra="forbid", protected_namespaces=())
    arguments = create_model(name, __config__=config, **fields)
    parameters_schema = _untitled(arguments.model_json_schema())
    parameters_schema.pop("additionalProperties", None)
    for parameter, schema in parameters_schema.get("properties", {}).items():
        if parameter in described:
            schema["description"] = described[parameter]
    function_schema = {"name": name, "description": about, "parameters": parameters_schema}
    return Tool(name, {"type": "function", "function": function_schema}, arguments)


def _untitled(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without the titles that repeat the names: each token of it is in every prompt."""
    schema.pop("title", None)
    for subschema in [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]:
        _untitled(subschema)
    return schema


def _described(docstring: str, parameters: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The description of a tool, and those of its parameters."""
    about: list[str] = []
    described: dict[str, str] = {}
    name = None
    for line in inspect.cleandoc(docstring).splitlines():
        match = re.match(r"(\w+): (.+)", line)
        if match and match[1] in parameters:
            name = match[1]
            described[name] = match[2]
        elif name and line.strip():
            described[name] += " " + line.strip()
        elif not name:
            about.append(line)
    return "\n".join(about).strip(), described
