"""The fingerprint of a stage: a hash of everything that its result depends on.

It covers the stage's name in the pipeline (which enters trajectory ids), the declared name and version, the config, the
seed, the content of the inputs, the content of models, tokenizers and files outside the store, the code that the
stage can reach with this config in our packages and the user's (:mod:`agentrl.pipelines.plan.code`), what it chooses by
name or acts in (:mod:`agentrl.pipelines.file.choices`), and the versions of packages of others which that code uses.

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
from collections.abc import Callable, Collection, Mapping
from datetime import date, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentrl.pipelines.file.choices import Chosen
from agentrl.pipelines.file.external import external_digest, outside
from agentrl.pipelines.file.fields import Key, dotted, models
from agentrl.pipelines.file.load import Node
from agentrl.pipelines.plan.code import USED_IF_SET, CodeGraph, Reached, Sources, Start
from agentrl.pipelines.secrets import without_userinfo
from agentrl.pipelines.stage import External
from agentrl.schemas.annotations import ADDED, markers
from agentrl.schemas.declared import OURS
from agentrl.schemas.manifest import Ingredients, InputRecord

SCHEME = 2
"""Increase it if this module, or the code that carries data to stages, changes what a fingerprint means."""

_SERVING = (
    "base_url",  # where a model is served
    "concurrency",
    "requests_per_minute",
    "timeout_s",
    "retries",
    "price_prompt",
    "price_completion",
    "max_cost",
    "cache",
    "in_process",
    "sync",
    "urls",
    "servers",
    "tensor_parallel",
    "python",
    "folder",
)
"""Settings of an engine that say where and how fast it answers, not what."""

NO_EFFECT: Mapping[str, tuple[str, ...]] = {
    "*": (
        "log_every",
        "num_workers",
        *(f"engine.{name}" for name in _SERVING),
        *(f"teacher_engine.{name}" for name in _SERVING),
        *(f"by.{name}" for name in _SERVING),  # of who writes notes
        *(f"rewards.*.engines.*.{name}" for name in _SERVING),  # of judges
    ),
    "trajectories.relabel": tuple(f"{who}.engines.*.{name}" for who in ("describe", "verify") for name in _SERVING),
    "search.tree": tuple(f"{who}.engines.*.{name}" for who in ("judge", "reflect") for name in _SERVING),
    "evaluate.policy": tuple(f"search.{who}.engines.*.{name}" for who in ("judge", "reflect") for name in _SERVING),
    "train.*": (
        "track",  # sends metrics elsewhere too
        "checkpoint_every",  # from where a killed run goes on
        "record_tokens",  # adds columns to what was recorded, from which nothing is made
        "optimizer.micro_tokens",  # how a step is divided to fit the memory
        "optimizer.gradient_checkpointing",
        "deepspeed.sequence_parallel",
    ),
}
"""Config fields that cannot change a result, dots between the parts of their keys, by stage name; ``*`` stands for
anything. They never enter the fingerprint."""

CARRYING_PACKAGES = frozenset(
    {
        "deltalake",
        "filelock",
        "jinja2",
        "mlflow",
        "msgspec",
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

COMPUTING: Mapping[str, tuple[str, ...]] = {
    "polars": ("agentrl.datastore.curation", "agentrl.datastore.read.sampling", "agentrl.datastore.search"),
}
"""Packages that carry data in most places and compute in some: their versions enter the fingerprint of what reaches
these modules of ours, or a module of the user's that uses them."""

_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow", "yaml": "PyYAML", "cv2": "opencv-python"}


class UnhashableError(ValueError):
    """A config value that has no canonical form. ``field`` names it, dots between its parts."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(f"{field}: {message}")


def canonical(value: Any, field: str = "config") -> Any:
    """A value as plain JSON data, equal for equal configs whatever their order of keys. User and password of an URL
    are left out, like other secrets.

    Raises UnhashableError, with the field's name, if a value has no stable form.
    """
    if isinstance(value, enum.Enum):
        return canonical(value.value, field)
    if isinstance(value, str):
        return without_userinfo(value)
    if value is None or isinstance(value, bool | int):
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


class _Left(enum.Enum):
    OUT = "left out"


def _hashed(value: Any, unhashed: Callable[[Key, tuple[Any, ...], Any], bool], key: Key = (), marks: Any = ()) -> Any:
    """The part of a config that is hashed as it is, in its canonical form."""
    if unhashed(key, marks, value):
        return _Left.OUT
    if isinstance(value, BaseModel):
        infos = [(name, info) for name, info in sorted(type(value).model_fields.items()) if not _idle(value, name)]
        items = ((name, _hashed(getattr(value, name), unhashed, (*key, name), (*markers(i),))) for name, i in infos)
        return {name: item for name, item in items if item is not _Left.OUT}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {
            name: item
            for name in sorted(value)
            if (item := _hashed(value[name], unhashed, (*key, name), marks)) is not _Left.OUT
        }
    if isinstance(value, list | tuple):
        hashed = [_hashed(item, unhashed, (*key, number), marks) for number, item in enumerate(value)]
        return [item for item in hashed if item is not _Left.OUT]
    return canonical(value, dotted(key))


def _idle(model: BaseModel, name: str) -> bool:
    """Whether a field was added later, and has its default."""
    info = type(model).model_fields[name]
    default = info.get_default(call_default_factory=True, validated_data={})
    return ADDED in markers(info) and bool(getattr(model, name) == default)


def _unhashed(stage: str) -> Callable[[Key, tuple[Any, ...], Any], bool]:
    """Fields of a stage's config without effect, secrets, and what names something outside, which counts by content."""
    idle = {path for pattern, paths in NO_EFFECT.items() if fnmatch(stage, pattern) for path in paths}
    wild = [path for path in idle if "*" in path]

    def unhashed(key: Key, marks: tuple[Any, ...], value: Any) -> bool:
        named = isinstance(value, str | Path)
        outside = named and any(isinstance(mark, External) and value not in mark.inside for mark in marks)
        return "secret" in marks or outside or dotted(key) in idle or any(fnmatch(dotted(key), path) for path in wild)

    return unhashed


def outside_fields(config: BaseModel) -> dict[str, str]:
    """Field -> path or name of everything outside the store that a config names."""
    return {dotted(key): without_userinfo(name) for key, _, name in outside(config)}


class Fingerprinter:
    """Computes ingredients; sources are read and packages looked up once for all stages of a plan."""

    def __init__(self, graph: CodeGraph) -> None:
        self.graph = graph
        self.sources: dict[str, Sources] = {}
        """Of each stage whose ingredients were computed: how its code was found."""
        self._versions: dict[str, str] = {}

    def ingredients(
        self,
        node: Node,
        inputs: Mapping[str, list[InputRecord]],
        flowing: Collection[Chosen] = (),
        pipeline: str = "",
    ) -> Ingredients:
        """All that enters the fingerprint of one stage, given its inputs and what was chosen for their content.

        Raises UnhashableError naming the field if something cannot be hashed.
        """
        config = _hashed(node.config, _unhashed(node.stage.name))
        reached, choices = self._reach(node, config, flowing)
        packages = {name: self._version(name) for name in sorted(reached.packages) if _counts(name, reached)}
        return Ingredients(
            scheme=SCHEME,
            pipeline=pipeline,
            stage=node.name,
            uses=node.stage.name,
            uses_version=node.stage.version,
            config=config,
            seed=node.seed,
            inputs=dict(inputs),
            externals=_externals(node.config),
            choices={choice.label: choice.version for choice in choices},
            code=reached.code,
            packages=packages | {"python": ".".join(platform.python_version_tuple()[:2])},
        )

    def _reach(self, node: Node, config: dict[str, Any], flowing: Collection[Chosen]) -> tuple[Reached, list[Chosen]]:
        """The code of a stage with this config, and what was chosen by name that it uses."""
        function = node.stage.function
        starts = [Start(function.__module__, function.__name__), *_config_classes(node.config)]
        given = dict.fromkeys(type(node.config).model_fields) | config  # also what is left out at its default
        idle = {name for name, field in USED_IF_SET.items() if _is_unset(given, field)}
        reached = self.graph.reach(starts, idle)
        used = {*node.choices, *(choice for choice in flowing if choice.kind in reached.loads)}
        choices = sorted(used, key=lambda choice: choice.label)
        if choices:
            starts += [Start(c.implementation.__module__, c.implementation.__name__) for c in choices]
            reached = self.graph.reach(starts, idle)
        self.sources[node.name] = Sources(tuple(starts), frozenset(idle), reached.files, tuple(reached.modules))
        return reached, choices

    def _version(self, package: str) -> str:
        if package not in self._versions:
            self._versions[package] = _installed_version(package)
        return self._versions[package]


def _config_classes(config: BaseModel) -> list[Start]:
    """The classes of all models in a config. Their fields do not count, since the config holds their values."""
    classes = {cls for model in models(config) for cls in type(model).__mro__ if issubclass(cls, BaseModel)}
    classes = {cls for cls in classes if cls.__module__.partition(".")[0] != "pydantic"}
    starts = [Start(cls.__module__, cls.__qualname__, frozenset(cls.model_fields)) for cls in classes]
    return sorted(starts, key=lambda start: (start.module, start.name))


def _externals(config: BaseModel) -> dict[str, str]:
    """Field -> digest of everything outside the store that a config names."""
    digests = {}
    for key, marker, name in outside(config):
        try:
            digests[f"{marker.what} {dotted(key)}"] = external_digest(name, marker.what)
        except LookupError as error:
            raise UnhashableError(dotted(key), str(error.args[0])) from None
    return digests


def _counts(package: str, reached: Reached) -> bool:
    """Whether a package's version enters."""
    if package not in CARRYING_PACKAGES:
        return True
    if package not in COMPUTING:
        return False
    users = reached.packages[package]
    ours = {user for user in users if user.partition(".")[0] == OURS}
    return bool(users - ours) or any(user.startswith(COMPUTING[package]) for user in ours)


def _is_unset(config: Mapping[str, Any], field: str) -> bool:
    """Whether a config has the first part of this field, and nothing at its end."""
    first, *rest = field.split(".")
    if first not in config:
        return False
    value: Any = config[first]
    for name in rest:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value is None


def _installed_version(package: str) -> str:
    """Version of what provides a top-level package; ``absent`` if it is not installed."""
    try:
        return _public(importlib.metadata.version(_DISTRIBUTIONS.get(package, package)))
    except importlib.metadata.PackageNotFoundError:
        if importlib.util.find_spec(package) is None:
            return "absent"
    owners = importlib.metadata.packages_distributions().get(package, [])  # reads the metadata of all, which takes long
    return ",".join(_public(importlib.metadata.version(owner)) for owner in sorted(set(owners))) or "unknown"


def _public(version: str) -> str:
    """A version without its local part: ``2.13.0+cpu`` and ``2.13.0+cu130`` are builds of one release."""
    return version.partition("+")[0]


def fingerprint(ingredients: Ingredients) -> str:
    """32 hexadecimal digits."""
    content = ingredients.model_dump(mode="json", exclude={"pipeline"})
    for records in content["inputs"].values():
        for record in records:
            del record["fingerprint"]  # only the content counts, not how it was made
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
