"""Checkpoints of training that survive a kill and a power failure.

A checkpoint is written under a temporary name, made durable and then renamed. The one before it stays beside it as
``<name>.previous``, so that training goes on from there if the newest one turns out to be damaged.
"""

import os
import uuid
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` as the newest checkpoint and keep the one before it."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.replace(path, _previous(path))
        os.replace(temporary, path)  # after a kill between the two, the previous one is the newest
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read, or None if there is none.

    A damaged one (empty, cut short, or with blocks that do not match their checksums) is renamed to
    ``<name>.damaged-...``, with a warning that names it, and the one before it is taken.
    """
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
    for file, instead in ((path, "the checkpoint before it"), (_previous(path), "the start")):
        if not file.exists():
            continue
        try:
            return _read(file)
        except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            aside = file.with_name(f"{file.name}.damaged-{uuid.uuid4().hex[:8]}")
            file.rename(aside)
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            warnings.warn(
                f"checkpoint {file} is damaged ({reason}) and was set aside as {aside.name}; training goes on from "
                f"{instead}",
                stacklevel=2,
            )
    return None


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        if broken := archive.testzip():
            raise ValueError(f"checksum of {broken} does not match")
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
