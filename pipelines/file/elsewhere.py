"""Keys of a pipeline file that are known, but in another place: ``steps`` beside ``with`` and not in it."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentrl.pipelines.file.library import builtin_stages
from agentrl.pipelines.file.yaml_text import Key
from agentrl.schemas.annotations import markers, models_at
from agentrl.schemas.choice import OneOf
from agentrl.schemas.hints import slips
from agentrl.schemas.pipeline import PipelineSpec, StageSpec

_DEPTH = 4
"""Mappings in one another that a config is searched through."""

Path = tuple[str, ...]


def elsewhere(file: Mapping[str, Any], key: Key) -> Path | None:
    """The key path that was probably meant by an unknown ``key`` of the file: the nearest one that has its last name,
    or a name one slip away. None if there is none, or if a key that may stand where it was written is that near."""
    stages = file.get("stages")
    if not isinstance(stages, Mapping):
        return None
    *above, name = map(str, key)
    if len(above) > 1 and above[0] == "stages":
        known = _keys_of_stage(above[1], stages.get(above[1]))
    else:
        if not above and name in stages:
            return ("stages", name)
        known = [(field,) for field in PipelineSpec.model_fields]
    if any(slips(path[-1], name) == 1 for path in known if list(path[:-1]) == above):
        return None
    there = [path for path in known if path[-1] == name]
    if not there and len(name) > 4:
        there = [path for path in known if slips(path[-1], name) == 1]
    return min(there, key=lambda path: (-_shared(path, above), len(path)), default=None)


def _keys_of_stage(name: str, stage: Any) -> list[Path]:
    if not isinstance(stage, Mapping):
        return []
    start = ("stages", name)
    keys = [path for path in _keys(StageSpec, stage, start) if path[-1] != "with"] + [(*start, "with")]
    used = builtin_stages().get(str(stage.get("uses")))  # a module of the user's is not run for a hint
    return keys + (list(_keys(used.config, stage.get("with"), (*start, "with"))) if used else [])


def _keys(model: type[BaseModel], value: Any, start: Path, depth: int = 0) -> Iterator[Path]:
    """The paths of a model's keys, and of those of the models in it. Of several that a key may hold, those count that
    are of the ``type`` in ``value``."""
    value = value if isinstance(value, Mapping) else {}
    for name, info in model.model_fields.items():
        path = (*start, info.alias or name)
        yield path
        inside = value.get(path[-1])
        kind = inside.get("type") if isinstance(inside, Mapping) else getattr(info.default, "type", None)
        for other in _inside(info, kind) if depth < _DEPTH else ():
            yield from _keys(other, inside, path, depth + 1)


def _inside(info: FieldInfo, kind: Any) -> list[type[BaseModel]]:
    """The models that a field may hold; those of ``kind`` if it is not None. A class of the user's is not loaded."""
    chosen = [choice.find(kind) for choice in markers(info) if isinstance(choice, OneOf) and kind in choice.ours]
    models = [model for model in chosen if issubclass(model, BaseModel)]
    return models or [model for model in models_at(info.annotation, ()) if kind is None or _is_of(model, kind)]


def _is_of(model: type[BaseModel], kind: Any) -> bool:
    """Whether a model has this ``type``, or no type at all."""
    declared = model.model_fields.get("type")
    if declared is None or get_origin(declared.annotation) is not Literal:
        return True
    return kind in get_args(declared.annotation)


def _shared(path: Path, above: list[str]) -> int:
    """How many parts both have in common, from the first."""
    return next((n for n, (a, b) in enumerate(zip(path, above, strict=False)) if a != b), min(len(path), len(above)))
