"""What the annotations of a pydantic model say: marks of a field, models at a location, keys that it knows."""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentrl.schemas.hints import did_you_mean


@dataclass(frozen=True)
class External:
    """Marks a config field that names a model, tokenizer or file outside the store, as in
    ``base: Annotated[str, External("model")]``.

    What lies there enters the fingerprint by content: for a tokenizer the tokenizer's files alone, otherwise every
    file of a folder. Relative paths are relative to the current directory. ``inside`` lists values that name something
    of ours: such a value counts as it is.
    """

    what: Literal["model", "tokenizer", "file"] = "file"
    inside: tuple[str, ...] = ()


ADDED = "added"
"""Marks a config field that came after the first version, as in ``retries: Annotated[int, ADDED] = 0``. At its default
it does not enter the fingerprint, so that what was made before the field existed is used again."""


def markers(info: FieldInfo) -> Iterator[Any]:
    """Markers of a field, also inside ``Annotated[str, External()] | None``."""
    yield from info.metadata
    todo = [info.annotation]
    while todo:
        annotation = todo.pop()
        if get_origin(annotation) is Annotated:
            yield from get_args(annotation)[1:]
        todo += [argument for argument in get_args(annotation) if get_origin(argument) or isinstance(argument, type)]


def models_at(annotation: Any, location: Sequence[int | str]) -> list[type[BaseModel]]:
    """Models that may stand at a location of pydantic's below an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not location:
            return [annotation]
        head, *rest = location
        for name, info in annotation.model_fields.items():
            if head in (name, info.alias):
                return models_at(info.annotation, rest)
        return models_at(annotation, rest)  # a tag
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return models_at(arguments[0], location)
    if origin in (Union, types.UnionType):
        return [model for argument in arguments for model in models_at(argument, location)]
    if origin in (dict, list, tuple) and location:
        return models_at(arguments[-1], location[1:])
    return []


def unknown_key(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """The message for a key that no model at this location has."""
    owners = models_at(model, location[:-1])
    known = [info.alias or name for owner in owners for name, info in owner.model_fields.items()]
    hint = did_you_mean(str(location[-1]), known) or f"; allowed: {', '.join(known)}"
    return f"unknown key {str(location[-1])!r}{hint}"


def is_secret(model: type[BaseModel], location: Sequence[int | str]) -> bool:
    """Whether a location of pydantic's lies in a field that is declared as a secret."""
    return any(
        "secret" in markers(info)
        for end, part in enumerate(location)
        for owner in models_at(model, location[:end])
        for name, info in owner.model_fields.items()
        if part in (name, info.alias)
    )
