"""Content digests of models, tokenizers and files that lie outside the store.

Digests of large files are remembered by size and time of change, in ``$XDG_CACHE_HOME/agentrl/digests.json``.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from agentrl.datastore.storage.digest import digest
from agentrl.models.hub import cache_folder
from agentrl.pipelines.file.fields import Key, dotted, leaves, replaced
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.stage import External

C = TypeVar("C", bound=BaseModel)

TOKENIZER_FILES = (
    "tokenizer*", "*.tiktoken", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "spiece.model", "sentencepiece*",
)  # fmt: skip
"""What a tokenizer consists of in a model folder, chat template included."""

REMEMBER_BYTES = 16 * 2**20


def external_digest(name: str, what: str) -> str:
    """Digest of a path, or of a Hugging Face name by the revision in the local cache.

    Raises LookupError with a message for the user if it is not on this machine, or may not be read.
    """
    try:
        return _external_digest(name, what)
    except OSError as error:
        refused = f": {error.filename}" if error.filename and str(error.filename) != name else ""
        raise LookupError(f"{name} cannot be read as {what}: {error.strerror or error}{refused}") from None


def _external_digest(name: str, what: str) -> str:
    path = Path(name).expanduser()
    if path.is_file():
        return _remembered(path, [path, *_beside(path)])
    if path.is_dir():
        if path.resolve() == Path(path.anchor or "/"):
            raise LookupError(f"{name} is the root of the file system; name the folder of the {what}")
        patterns = TOKENIZER_FILES if what == "tokenizer" else ("**/*",)
        files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
        if not files:
            raise LookupError(f"{name} holds no {what} files")
        return _remembered(path, files)
    revision = _cached_revision(name) if what != "file" and name.count("/") <= 1 else None
    if revision:
        return f"{name}@{revision}"
    if reason := missing(name, what):
        raise LookupError(reason)
    raise LookupError(f"{name!r} is neither a path nor in the local Hugging Face cache; fetch it: hf download {name}")


def _beside(path: Path) -> list[Path]:
    """Files that are read with a file: those of the sub-agents of a session, and the write-ahead log of a database."""
    log = path.with_name(f"{path.name}-wal")
    if path.suffix != ".jsonl":
        return [log] if log.is_file() else []
    from agentrl.datastore.formats.sessions.claude_code import companions

    return companions(path)


def as_folder(name: str, weights: bool = True) -> str | Path:
    """A model's folder or its name on the Hugging Face hub; of a GGUF file the folder that it is converted to, once on
    each machine. Without ``weights`` it may have config and tokenizer alone.

    Raises ValueError that names the file if transformers does not read it, and LookupError if it may not be read.
    """
    from agentrl.models import gguf

    path = Path(name).expanduser()
    if not gguf.is_gguf(path):
        return path if path.exists() else name
    folder = gguf.model_folder if weights else gguf.config_folder
    return folder(path, external_digest(name, "model"))


def missing(name: str, what: str) -> str | None:
    """The error if no path is there and ``name`` cannot be one of the Hugging Face hub; None otherwise."""
    path = Path(name).expanduser()
    may_be_a_name = what != "file" and not name.startswith((".", "/", "~")) and name.count("/") <= 1
    if path.exists() or (may_be_a_name and (name.count("/") == 1 or _cached_revision(name))):
        return None
    beside = [str(Path(name).parent / other.name) for other in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = did_you_mean(str(Path(name)), beside)
    hub = "" if what == "file" else ", or a name on the Hugging Face hub"
    return f"there is no {what} at {path.absolute()}{hint or f'; give a path that exists{hub}'}"


def outside(config: BaseModel) -> Iterator[tuple[Key, External, str]]:
    """(key, marker, path or name) of everything outside the store that a config names, also in lists and models."""
    for key, marks, value in leaves(config):
        external = next((mark for mark in marks if isinstance(mark, External)), None)
        if external and value is not None and value not in external.inside:
            yield key, external, str(value)


PATH_OF = "path of "
"""Before the field, in the ``environment`` of a manifest: where something outside the store was."""


def with_paths(config: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """A hashed config with the paths and names that it leaves out, from the ``environment`` of its manifest."""
    whole: dict[str, Any] = json.loads(json.dumps(config))
    for field, path in environment.items():
        if field.startswith(PATH_OF):
            *above, last = field.removeprefix(PATH_OF).split(".")
            parent: Any = whole
            for part in above:
                parent = parent[int(part)] if isinstance(parent, list) else parent.setdefault(part, {})
            if isinstance(parent, list):
                parent.insert(int(last), path)
            else:
                parent[last] = path
    return whole


def pinned(config: C, hashed: Mapping[str, str]) -> C:
    """The config with the very content that was ``hashed`` (label -> digest): a name on the Hugging Face hub becomes
    the local folder of that revision, so that nothing newer is loaded, and a GGUF the folder it is converted to.

    Raises LookupError if a path holds other content now, or if something is not on this machine, and ValueError if a
    GGUF cannot be read.
    """

    def swap(key: Key, marks: tuple[Any, ...], value: Any) -> Any:
        external = next((mark for mark in marks if isinstance(mark, External)), None)
        if not external or value is None or value in external.inside:
            return value
        name, before = str(value), hashed[f"{external.what} {dotted(key)}"]
        named, at, revision = before.rpartition("@")
        if not at or named != name:
            if (now := external_digest(name, external.what)) != before:
                raise LookupError(
                    f"{external.what} {name!r} of with.{dotted(key)} changed: its content was {before[:12]} and is "
                    f"{now[:12]}; put back what was there, or plan and run again with what is there now"
                )
            whole = external.what == "model"
            return str(as_folder(name, whole)) if whole or external.what == "tokenizer" else value
        folder = cache_folder(name) / "snapshots" / revision
        if not folder.is_dir():
            raise LookupError(
                f"{external.what} {name!r} of with.{dotted(key)} is not in the Hugging Face cache at revision "
                f"{revision}, no {folder}; fetch it: hf download {name} --revision {revision}"
            )
        return type(value)(folder)

    return replaced(config, swap)


def _cached_revision(name: str) -> str | None:
    reference = cache_folder(name) / "refs" / "main"
    return reference.read_text().strip() if reference.is_file() else None


def _memory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl" / "digests.json"


def _remembered(path: Path, files: list[Path]) -> str:
    stats = [file.stat() for file in files]
    if sum(stat.st_size for stat in stats) < REMEMBER_BYTES:
        return _digest(path, files)
    signature = [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats, strict=True)]
    memory = _memory()
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        known = {}
    key = f"{path.resolve()}:{len(files)}"
    if known.get(key, {}).get("signature") != signature:
        known[key] = {"signature": signature, "digest": _digest(path, files)}
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial = memory.with_name(f"{memory.name}.{os.getpid()}")
        partial.write_text(json.dumps(known))
        partial.replace(memory)
    return known[key]["digest"]


def _digest(path: Path, files: list[Path]) -> str:
    if files == [path]:
        return digest(path)
    import hashlib

    total, folder = hashlib.blake2b(digest_size=16), path.parent if path.is_file() else path
    for file in files:
        total.update(f"{file.relative_to(folder).as_posix()}\0{digest(file)}\n".encode())
    return total.hexdigest()
