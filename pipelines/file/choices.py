"""What a config chooses by name: one of ours, or ``module:Class`` of the user's own. A choice is a boundary: the code
of what is chosen belongs to the stage, and the code of what is not chosen does not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from agentrl.pipelines.file.fields import Key, leaves, models
from agentrl.pipelines.stage import Choice
from agentrl.schemas.choice import Settings, plain

KINDS: Mapping[str, str] = {"environment": "agentrl.environments:ENVIRONMENT"}
"""Kind of choice -> the ``OneOf`` that looks its names up."""


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
    """(key, kind, name) of every field marked with :class:`Choice`."""
    for key, marks, value in leaves(config):
        for mark in marks:
            if isinstance(mark, Choice) and value is not None:
                yield key, mark.kind, str(value)


def chosen(kind: str, name: str) -> Chosen:
    """What a name stands for; settings in the name do not count. Raises LookupError with a message for the user."""
    module, _, attribute = KINDS[kind].partition(":")
    name = plain(name)
    return Chosen(kind, name, getattr(import_module(module), attribute).find(name))


def choices(config: BaseModel) -> list[Chosen]:
    """Everything that a config chooses by name and does not hold itself."""
    settings = [model for model in models(config) if isinstance(model, Settings)]
    chosen_settings = [Chosen(type(setting).kind, setting.type, type(setting).implementation) for setting in settings]
    return [*chosen_settings, *(chosen(kind, name) for _, kind, name in named(config))]
