"""A shard: a function of a module and what it is given. It writes its result to files whose names depend on what it is
given, so a shard that runs twice, or in two processes at once, does no harm, and a finished one need not run again."""

import os
import pickle
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128

from agentrl.datastore.errors import StoreError


@dataclass(frozen=True)
class Shard:
    """``name`` says to people what it is about; ``function`` is ``module:function``; all arguments can be pickled."""

    name: str
    function: str
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> None:
        module, _, function = self.function.partition(":")
        getattr(import_module(module), function)(*self.arguments)


class Ending(NamedTuple):
    """How a try of a shard ended. ``problem`` is one line, None if it is done. ``again``: whether another worker may
    succeed. ``died``: whether its process ended in the middle of it. ``warnings``: what it warned of."""

    worker: str
    problem: str | None = None
    again: bool = False
    died: bool = False
    warnings: tuple[str, ...] = ()


class ShardError(StoreError):
    """A shard failed. The message names it, the worker if there is one, and the remedy."""


def packed(shard: Shard) -> bytes:
    """A shard as bytes, for another process. Raises ShardError if what it is given cannot be pickled."""
    try:
        return pickle.dumps(shard)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ShardError(
            f"shard {shard.name!r} cannot be sent to another process: {reason}; give classes of your own a place in a "
            "module, or run the stage with execution.engine: {type: here}"
        ) from None


@contextmanager
def finished(path: Path) -> Iterator[Path]:
    """A path to write a result to. After the block it is at ``path``, whole and durable; after an error it is not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)  # a disk that is full does not say which one it is
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array to a file, as :func:`finished` does."""
    with finished(path) as unfinished, unfinished.open("wb") as file:
        np.save(file, array)


def digest_of(*given: object) -> str:
    """A name for work on what is given: arrays, texts and numbers."""
    digest = xxh3_128()
    for value in given:
        data = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
