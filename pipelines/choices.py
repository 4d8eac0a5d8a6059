"""What a config chooses by name: one of ours, or ``module:Class`` of the user's own. A choice is a boundary: the code
of what is chosen belongs to the stage, and the code of what is not chosen does not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from agentrl.declared import declared, is_environment
from pipelines.fields import Key, leaves
from pipelines.problems import did_you_mean
from pipelines.stage import Choice

NAMES: Mapping[str, str] = {"environment": "agentrl.environments:ENVIRONMENTS"}
"""Kind of choice -> the table of ours, which maps names to classes, or to ``module:Class``."""


@dataclass(frozen=True)
class Chosen:
    """One choice: ``implementation`` is what the name stands for."""

    kind: str
    name: str
    implementation: type[Any]

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def version(self) -> str:
        """The version that it declares, or nothing."""
        return str(getattr(self.implementation, "version", ""))


def named(config: BaseModel) -> Iterator[tuple[Key, str, str]]:
    """(key, kind, name) of every choice in a config."""
    for key, marks, value in leaves(config):
        for mark in marks:
            if isinstance(mark, Choice) and value is not None:
                yield key, mark.kind, str(value)


def chosen(kind: str, name: str) -> Chosen:
    """What a name stands for. Raises LookupError with a message for the user."""
    table = _load(NAMES[kind])
    if ":" in name:
        return Chosen(kind, name, _users(kind, name))
    if name not in table:
        hint = did_you_mean(name, table)
        rule = f"ours: {', '.join(sorted(table))}; one of your own: module:Class, beside the pipeline file or installed"
        raise LookupError(f"there is no {kind} {name!r}{hint}; {rule}")
    found = table[name]
    return Chosen(kind, name, _load(found) if isinstance(found, str) else found)


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


def _users(kind: str, name: str) -> type[Any]:
    found = declared(name, kind, is_environment)
    lacking = [method for method in ("tasks", "episode") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or lacking:
        raise LookupError(f"{name!r} is no {kind}: a class with the methods tasks and episode")
    return found
