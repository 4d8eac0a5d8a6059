"""What a config chooses by name: one of ours, or ``module:Class`` of the user's own. A choice is a boundary: the code
of what is chosen belongs to the stage, that of what is not chosen does not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import BaseModel

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
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever the user's module raises is the user's to read
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name
        why = "there is no such module beside the pipeline file, here or installed" if missing else repr(error)
        raise LookupError(f"module {module_name!r} of {kind} {name!r} cannot be imported: {why}") from error
    found = getattr(module, attribute, None)
    classes = [
        key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == module_name
    ]
    if found is None:
        hint = did_you_mean(attribute, classes) or f"; classes there: {', '.join(classes) or 'none'}"
        raise LookupError(f"module {module_name!r} has no class {attribute!r}{hint}")
    if not isinstance(found, type):
        raise LookupError(f"{name!r} is a {type(found).__name__}; {kind} takes the name of a class, as module:Class")
    return found
