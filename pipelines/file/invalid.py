"""What pydantic says of a pipeline file, as a key of the file and a message for its author."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from agentrl.pipelines.file.elsewhere import elsewhere
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.file.yaml_text import Key
from agentrl.schemas.annotations import is_secret, models_at, unknown_key
from agentrl.schemas.secret_names import names_a_secret


def explained(item: Mapping[str, Any], model: type[BaseModel], file: Mapping[str, Any], key: Key) -> tuple[Key, str]:
    """The location below ``key`` and the message of one error of ``model``, which a part of the file was checked
    with."""
    location = _without_tags(item["loc"], file, key)
    if item["type"] == "extra_forbidden" and (path := elsewhere(file, (*key, *location))):
        return location, f"unknown key {location[-1]!r}; did you mean {'.'.join(path)!r}?"
    return location, _message(item, model, item["loc"])


def anchor(model: type[BaseModel], location: Key) -> str:
    """The dotted path of the setting at a location, as the documentation has it; of what is inside a choice, or is no
    setting, that of the setting above."""
    path: list[str] = []
    for part in location:
        if isinstance(part, int):
            continue
        fields = (each for owner in models_at(model, path) for each in owner.model_fields.items())
        if part not in {info.alias or name for name, info in fields}:
            break
        path.append(part)
    return ".".join(path)


def _without_tags(location: tuple[int | str, ...], value: Any, key: Key) -> Key:
    """A location of pydantic's without the tags of unions, which are not keys of the file."""
    for part in key:
        value = value.get(part, {}) if isinstance(value, Mapping) else {}
    kept: list[int | str] = []
    for number, part in enumerate(location):
        inside = part in value if isinstance(value, Mapping) else isinstance(value, list) and isinstance(part, int)
        if not inside and (number < len(location) - 1 or isinstance(value, str)):
            continue
        kept.append(part)
        value = value[part] if inside and not (isinstance(part, int) and part >= len(value)) else None
    return tuple(kept)


def _message(item: Mapping[str, Any], model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    if item["type"] in ("choice", "unknown_key", "unknown_name"):
        return str(item["msg"])
    if item["type"] == "extra_forbidden":
        return unknown_key(model, location)
    if item["type"] == "missing":
        return "is required"
    message = item["msg"].removeprefix("Value error, ")
    if names_a_secret(location) or is_secret(model, location) or isinstance(item["input"], dict | list):
        return message
    shown = repr(item["input"])
    hint = did_you_mean(item["input"], re.findall("'([^']+)'", item["ctx"]["expected"])) if _is_a_choice(item) else ""
    return message if len(shown) > 80 else f"{message}, not {shown}{hint}"


def _is_a_choice(item: Mapping[str, Any]) -> bool:
    return item["type"] in ("literal_error", "enum") and isinstance(item["input"], str)
