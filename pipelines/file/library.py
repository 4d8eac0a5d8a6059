"""What ``uses`` names: a stage of the library, or ``module:function`` of the user's own code."""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.stage import Stage
from agentrl.schemas.declared import OURS, declared, is_stage
from agentrl.schemas.installation import PACKAGE_ROOT


@cache
def builtin_stages() -> dict[str, Stage]:
    """Every stage declared in ``agentrl.pipelines.stages``, by name. Those modules import nothing heavy at their
    top."""
    if importlib.util.find_spec("agentrl.pipelines.stages") is None:
        return {}
    package = importlib.import_module("agentrl.pipelines.stages")
    stages: dict[str, Stage] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"agentrl.pipelines.stages.{info.name}")
        own = (value for value in vars(module).values() if isinstance(value, Stage))
        stages.update((stage.name, stage) for stage in own if stage.function.__module__ == module.__name__)
    return stages


def search_in(folders: Iterable[Path]) -> None:
    """Let the user's modules be found in these folders, before anything that is installed. ``agentrl`` itself is
    imported by now, so that a module of the same name cannot replace it."""
    for folder in reversed([str(folder.resolve()) for folder in folders]):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)


def resolve(uses: str) -> Stage:
    """The stage that ``uses`` names. A module is imported only if its source declares the stage.

    Raises LookupError with a message for the user if there is none.
    """
    if ":" not in uses:
        stages = builtin_stages()
        if uses in stages:
            return stages[uses]
        hint = did_you_mean(uses, stages) or f"; the library has: {', '.join(sorted(stages)) or 'none'}"
        raise LookupError(f"there is no stage {uses!r} in the library{hint} (write your own as module:function)")
    top = uses.partition(":")[0].partition(".")[0]
    if top == OURS and (shadow := _beside(top)):
        raise LookupError(f"{shadow} has the name of agentrl itself, and is never imported; rename it")
    found = declared(uses, "stage", is_stage, "@stage(name, version=1)")
    if not isinstance(found, Stage):
        raise LookupError(f"{uses!r} is not a stage; declare the function with @stage(name, version=1)")
    return found


def _beside(package: str) -> Path | None:
    """A module of the user's that has our name, and comes before ours on the module path."""
    ours = PACKAGE_ROOT
    for folder in map(Path, sys.path):
        if folder.resolve() == ours:
            return None
        for path in (folder / f"{package}.py", folder / package / "__init__.py"):
            if path.is_file():
                return path
    return None
