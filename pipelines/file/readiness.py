"""What a run needs besides its pipeline file, looked for before anything runs: optional packages, environment
variables, a chat template, a store that can be read and written."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentrl.datastore.errors import NoBufferError, StoreError
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage, storage_of
from agentrl.datastore.table.delta_table import BufferTable
from agentrl.pipelines.file.fields import Key, leaves
from agentrl.pipelines.file.problems import Origin, Problem
from agentrl.pipelines.secrets import is_reference
from agentrl.schemas.installation import install_hint, is_installed

SETTINGS: Mapping[str, tuple[str, str]] = {"optimizer.lora": ("peft", "lora"), "deepspeed": ("deepspeed", "deepspeed")}
"""Config field -> the package that it needs if it is set, and the extra that installs it."""

BY_HAND = ""
"""Stands for the extra of a package that none of ours installs."""

CHOICES: Mapping[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("type", "openai"): (("openai", "tenacity", "aiolimiter"), "openai"),
    ("type", "vllm"): (("httpx",), "vllm"),
    ("type", "mcp"): (("mcp",), "mcp"),
    ("type", "gymnasium"): (("gymnasium",), "gymnasium"),
    ("type", "minigrid"): (("minigrid",), "minigrid"),
    ("type", "scienceworld"): (("scienceworld",), "scienceworld"),
    ("type", "textarena"): (("textarena",), BY_HAND),
    ("type", "math"): (("math_verify",), "math"),
    ("type", "reasoning_gym"): (("reasoning_gym",), "reasoning-gym"),
    ("quantize", "nf4"): (("bitsandbytes",), "qlora"),
    ("rule", "diverse"): (("sklearn",), "retrieval"),
    ("format", "huggingface"): (("datasets",), "formats"),
    ("track", "tensorboard"): (("tensorboard",), "trackers"),
    ("track", "wandb"): (("wandb",), "trackers"),
    ("track", "mlflow"): (("mlflow",), "trackers"),
}
"""What a field of a config chooses by name, at any depth -> the packages that it needs, and the extra that installs
them."""


def missing_packages(config: BaseModel) -> Iterator[tuple[Key, str]]:
    """(key, message) of every field that is set and needs a package which is not installed."""
    for field, (package, extra) in SETTINGS.items():
        key: Key = tuple(field.split("."))
        value: Any = config
        for name in field.split("."):
            value = getattr(value, name, None)
        if isinstance(value, BaseModel):
            yield from _without(key, (package,), extra)
    for where, _, value in leaves(config):
        names = [name for name in where if isinstance(name, str)]  # without places in lists
        if isinstance(value, str) and (choice := CHOICES.get((names[-1], value))):
            yield from _without(where, *choice)


def _without(key: Key, packages: tuple[str, ...], extra: str) -> Iterator[tuple[Key, str]]:
    for package in packages:
        if not is_installed(package):
            from agentrl.environments.adapters.textarena import INSTALL

            how = INSTALL if extra == BY_HAND else install_hint(extra)
            yield key, f"needs the package {package}, which is not installed: {how}"
            return


def missing_variables(config: BaseModel, env: Mapping[str, str]) -> Iterator[tuple[Key, str]]:
    """(key, message) of every secret whose environment variable is neither set here nor in ``env``."""
    for key, marks, value in leaves(config):
        if "secret" in marks and is_reference(value) and (name := value[2:-1]) not in {**os.environ, **env}:
            yield key, f"environment variable {name} is not set; export it before the run, or name another"


def lacks_template(folder: Path) -> bool:
    """Whether a local model folder has a tokenizer without a chat template. A folder that cannot be read is left to the
    stage that loads it."""
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or any(folder.glob("chat_template*")):
        return False
    try:
        return not json.loads(settings.read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return False


def store_problem(store: str, *, write: bool) -> str | None:
    """Why a store cannot be used; None if it can. A bucket is asked for its list of names once. To ``write``, its
    folder must be writable, and its buffer of this schema."""
    try:
        storage = storage_of(store)
    except StoreError as error:
        return str(error)
    if isinstance(storage, S3Storage):
        return _bucket_problem(storage) or (_table_problem(storage) if write else None)
    path = storage.root
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        return f"store {store!r} cannot be used: {there} is a file; give a folder, or one that can be made"
    if write and not os.access(there, os.W_OK | os.X_OK):
        return f"store {store!r} cannot be used: {there} is not writable for this user; give another with --store"
    return _table_problem(storage) if write else None


def _table_problem(storage: LocalStorage | S3Storage) -> str | None:
    """Why the buffer takes no rows: an older schema, a newer one, a broken log."""
    try:
        BufferTable(storage).refuse_older()
    except NoBufferError:
        return None
    except StoreError as error:
        return str(error)
    return None


def _bucket_problem(storage: S3Storage) -> str | None:
    import obstore

    try:
        storage.children("")
    except (obstore.exceptions.BaseError, OSError) as error:
        reason = " ".join(str(error).split("\n\n")[0].split())[:300]
        return (
            f"store {storage.uri!r} cannot be used: {reason}; check the name of the bucket, AWS_ENDPOINT_URL, and "
            "whether these credentials may list it"
        )
    return None


def unusable(store: str) -> list[Problem]:
    """What keeps a run from using this store, as problems of the option ``--store``."""
    problem = store_problem(store, write=True)
    return [Problem(problem, Origin("--store", None))] if problem else []
