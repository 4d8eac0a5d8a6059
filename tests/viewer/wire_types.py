"""Writes the types of the server's answers for the front-end: ``python tests/viewer/wire_types.py``.

``static/wire.d.ts`` follows from the models of ``flows/viewer/wire.py`` and ``wire_compare.py``: a test compares them.
"""

import inspect
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from flows.viewer import wire, wire_compare

PLACE = Path(wire.__file__).parent / "static/wire.d.ts"
PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", NoneType: "null", Any: "any"}


def declarations() -> str:
    """The text of ``wire.d.ts``: one interface for each model, in the order of the modules."""
    named = [one for module in (wire, wire_compare) for one in vars(module).values() if inspect.isclass(one)]
    models = [one for one in named if issubclass(one, wire.Answer) and one is not wire.Answer]
    lines = ["// Written by tests/viewer/wire_types.py from flows/viewer/wire.py and wire_compare.py."]
    for model in models:
        fields = [f"  {name}: {typed(field.annotation)};" for name, field in model.model_fields.items()]
        lines += [f"export interface {model.__name__} {{", *fields, "}"]
    return "\n".join(lines) + "\n"


def typed(annotation: Any) -> str:
    """The TypeScript type of an annotation. Raises TypeError for one that it does not know."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{one}"' for one in arguments)
    if origin is UnionType:
        return " | ".join(map(typed, arguments))
    if origin is list:
        return f"Array<{typed(arguments[0])}>"
    if origin is dict:
        return f"Record<{typed(arguments[0])}, {typed(arguments[1])}>"
    if inspect.isclass(annotation) and issubclass(annotation, wire.Answer):
        return annotation.__name__
    raise TypeError(f"no TypeScript type for {annotation}")


if __name__ == "__main__":
    PLACE.write_text(declarations())
