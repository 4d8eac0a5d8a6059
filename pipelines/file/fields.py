"""Walking over a config: its values with their keys and marks, and the models that it is made of."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from agentrl.schemas.annotations import markers

Key = tuple[str | int, ...]
Swap = Callable[[Key, tuple[Any, ...], Any], Any]


def leaves(value: Any, key: Key = (), marks: tuple[Any, ...] = ()) -> Iterator[tuple[Key, tuple[Any, ...], Any]]:
    """(key, markers of its field, value) of everything in a config that is neither a model, a mapping nor a list."""
    if isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            yield from leaves(getattr(value, name), (*key, name), tuple(markers(info)))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, (*key, name), marks)
    elif isinstance(value, list | tuple | set | frozenset):
        for number, item in enumerate(value):
            yield from leaves(item, (*key, number), marks)
    else:
        yield key, marks, value


def models(value: Any) -> Iterator[BaseModel]:
    """Every model in a config, itself included."""
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from models(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from models(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from models(item)


def replaced(value: Any, swap: Swap, key: Key = (), marks: tuple[Any, ...] = ()) -> Any:
    """A copy of a config in which each value that :func:`leaves` yields is replaced by ``swap(key, markers,
    value)``."""
    if isinstance(value, BaseModel):
        infos = type(value).model_fields.items()
        now = {name: replaced(getattr(value, name), swap, (*key, name), tuple(markers(info))) for name, info in infos}
        return value.model_copy(update=now)
    if isinstance(value, Mapping):
        return {name: replaced(item, swap, (*key, name), marks) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replaced(item, swap, (*key, number), marks) for number, item in enumerate(value))
    return swap(key, marks, value)


def dotted(key: Key) -> str:
    return ".".join(map(str, key))
