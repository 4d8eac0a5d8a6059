"""What a run needs besides its pipeline file, looked for before anything runs: optional packages, a chat template, a
store that can be read and written."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipelines.fields import Key
from schemas.installation import install_hint, is_installed

EXTRAS: Mapping[str, tuple[str, str]] = {"optimizer.lora": ("peft", "lora"), "deepspeed": ("deepspeed", "deepspeed")}
"""Config field -> the package that it needs if it is set, and the extra that installs it."""


def missing_packages(config: BaseModel) -> Iterator[tuple[Key, str]]:
    """(key, message) of every field that is set and needs a package which is not installed."""
    for field, (package, extra) in EXTRAS.items():
        key = tuple(field.split("."))
        value: Any = config
        for name in key:
            value = getattr(value, name, None)
        if isinstance(value, BaseModel) and not is_installed(package):
            yield key, f"needs the package {package}, which is not installed: {install_hint(extra)}"


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
    """Why a local store cannot be used. None if it can, or if it is not local."""
    if "://" in store:
        return None
    path = Path(store).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir():
        return f"store {store!r} cannot be used: {there} is a file; give a folder, or one that can be made"
    if write and not os.access(there, os.W_OK | os.X_OK):
        return f"store {store!r} cannot be used: {there} is not writable for this user; give another with --store"
    return None
