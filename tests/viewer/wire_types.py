"""Types of the server's answers for ``tsc``, from the models of the viewer."""

import inspect
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from agentrl.flows import viewer
from agentrl.flows.viewer import wire

PLACE = Path(__file__).parents[2] / "build/viewer-types/wire.d.ts"
"""Where ``tsconfig.json`` looks for them, as if they were beside the modules of the front-end."""
PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", NoneType: "null", Any: "any"}


def declarations() -> str:
    """The text of ``wire.d.ts``: one interface for each model, in the order of the modules."""
    packages = (import_module(f"{viewer.__name__}.{name}") for name in ("query", "pages", "offline"))
    names = [f"{package.__name__}.{module.name}" for package in packages for module in iter_modules(package.__path__)]
    modules = [wire, *map(import_module, names)]
    named = dict.fromkeys(kind for module in modules for kind in vars(module).values() if inspect.isclass(kind))
    models = [kind for kind in named if issubclass(kind, wire.Answer) and kind is not wire.Answer]
    lines = ["// Written by tests/viewer/wire_types.py from the models of flows/viewer."]
    for model in models:
        fields = [f"  {name}: {typed(field.annotation)};" for name, field in model.model_fields.items()]
        lines += [f"export interface {model.__name__} {{", *fields, "}"]
    return "\n".join(lines) + "\n"


def typed(annotation: Any) -> str:
    """The TypeScript type of an annotation; ``unknown``, which modules cannot use, for one that is not known here."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{argument}"' for argument in arguments)
    if origin is UnionType:
        return " | ".join(map(typed, arguments))
    if origin is list:
        return f"Array<{typed(arguments[0])}>"
    if origin is dict:
        return f"Record<{typed(arguments[0])}, {typed(arguments[1])}>"
    if inspect.isclass(annotation) and issubclass(annotation, wire.Answer):
        return annotation.__name__
    return "unknown"


def write() -> None:
    PLACE.parent.mkdir(parents=True, exist_ok=True)
    PLACE.write_text(declarations())
