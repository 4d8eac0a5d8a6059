"""The fingerprint of a stage: a hash of everything that its result depends on.

It covers the stage's name in the pipeline (which enters trajectory ids), the declared name and version, the config, the
seed, the fingerprints of the inputs, the content of models, tokenizers and files outside the store, the code that the
stage's function can reach in our packages and the user's, and the versions of packages of others which that code uses.

It cannot see: values that a closure holds at run time, names that are looked up by computed strings, objects reached
only through an argument (the buffer that a stage is handed), data files that code opens by itself, C extensions and
drivers. Package versions stand in for the code of others; ``@stage(version=...)`` and ``External`` are for the rest.
"""

import enum
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import platform
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipelines.code import CodeGraph
from pipelines.external import external_digest, outside
from pipelines.load import Node
from pipelines.stage import External, markers
from schemas.manifest import Ingredients, InputRecord

SCHEME = 1
"""Raised when this module, or what carries data to stages, changes what a fingerprint means."""

NO_EFFECT: dict[str, frozenset[str]] = {
    "*": frozenset({"log_every", "num_workers"}),
}
"""Config fields that cannot change a result, by stage name, ``*`` for all. They never enter the fingerprint."""

CARRYING_PACKAGES = frozenset(
    {
        "deltalake",
        "filelock",
        "jinja2",
        "mlflow",
        "packaging",
        "polars",
        "prefect",
        "pyarrow",
        "pydantic",
        "rich",
        "typer",
        "wandb",
    }
)
"""Packages that carry data, print or check, and compute no result: their versions do not enter the fingerprint."""

USED_WHERE_SET = {"deepspeed": ("deepspeed",), "peft": ("optimizer", "lora")}
"""Optional packages that act only where this config field is set: where it is None their versions do not enter, so that
installing one runs nothing again."""

_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow", "yaml": "PyYAML", "cv2": "opencv-python"}


class UnhashableError(ValueError):
    """A config value that has no canonical form. ``field`` names it, dots between its parts."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(f"{field}: {message}")


def canonical(value: Any, field: str = "config") -> Any:
    """A value as plain JSON data, equal for equal configs whatever their order of keys.

    Raises UnhashableError naming the field where a value has no stable form.
    """
    if isinstance(value, enum.Enum):
        return canonical(value.value, field)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, BaseModel):
        names = type(value).model_fields
        return {name: canonical(getattr(value, name), f"{field}.{name}") for name in sorted(names)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UnhashableError(field, f"has the key {key!r}; keys of a config are text")
        return {key: canonical(value[key], f"{field}.{key}") for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [canonical(item, f"{field}.{number}") for number, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((canonical(item, field) for item in value), key=lambda item: json.dumps(item))
    allowed = "numbers, text, lists, mappings, enums, dates, paths and pydantic models"
    raise UnhashableError(field, f"a {type(value).__name__} cannot be hashed; allowed are {allowed}")


def _hashed(config: BaseModel, prefix: str = "") -> dict[str, Any]:
    """What of a config is hashed as it is: all but secrets, and fields that name something outside."""
    hashed: dict[str, Any] = {}
    for name, info in type(config).model_fields.items():
        value, field, marks = getattr(config, name), f"{prefix}{name}", list(markers(info))
        if "secret" in marks or (value is not None and any(isinstance(marker, External) for marker in marks)):
            continue
        hashed[name] = _hashed(value, f"{field}.") if isinstance(value, BaseModel) else canonical(value, field)
    return hashed


def outside_fields(config: BaseModel) -> dict[str, str]:
    """Field -> path or name of everything outside the store that a config names."""
    return {".".join(key): str(value) for key, _, value in outside(config)}


class Fingerprinter:
    """Computes ingredients; sources are read and packages looked up once for all stages of a plan."""

    def __init__(self, graph: CodeGraph) -> None:
        self.graph = graph
        self._versions: dict[str, str] = {}

    def ingredients(self, node: Node, inputs: Mapping[str, list[InputRecord]]) -> Ingredients:
        """All that enters the fingerprint of one stage, given the fingerprints of its inputs.

        Raises UnhashableError naming the field where something cannot be hashed.
        """
        config = _hashed(node.config)
        for name in NO_EFFECT["*"] | NO_EFFECT.get(node.stage.name, frozenset()):
            config.pop(name, None)
        externals = {}
        for path, marker, value in outside(node.config):
            field = ".".join(path)
            for number, item in enumerate(value if isinstance(value, list | tuple) else [value]):
                key = f"{marker.what} {field}" + (f".{number}" if number else "")
                try:
                    externals[key] = external_digest(str(item), marker.what)
                except LookupError as error:
                    raise UnhashableError(field, str(error.args[0])) from None
        function = node.stage.function
        reached = self.graph.reach(function.__module__, function.__name__)
        idle = {name for name, path in USED_WHERE_SET.items() if _is_unset(config, path)}
        packages = {name: self._version(name) for name in sorted(reached.packages - CARRYING_PACKAGES - idle)}
        return Ingredients(
            scheme=SCHEME,
            stage=node.name,
            uses=node.stage.name,
            uses_version=node.stage.version,
            config=config,
            seed=node.seed,
            inputs=dict(inputs),
            externals=externals,
            code=reached.code,
            packages=packages | {"python": ".".join(platform.python_version_tuple()[:2])},
        )

    def _version(self, package: str) -> str:
        if package not in self._versions:
            self._versions[package] = _installed_version(package)
        return self._versions[package]


def _is_unset(config: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    """Whether a config has this field, and leaves it None."""
    value: Any = config
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return value is None


def _installed_version(package: str) -> str:
    """Version of what provides a top-level package; ``absent`` where it is not installed."""
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(package) is None:
            return "absent"
    owners = importlib.metadata.packages_distributions().get(package, [])  # reads the metadata of all, which takes long
    return ",".join(importlib.metadata.version(owner) for owner in sorted(set(owners))) or "unknown"


def fingerprint(ingredients: Ingredients) -> str:
    """32 hexadecimal digits."""
    text = json.dumps(ingredients.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
