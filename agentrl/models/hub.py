"""Models of the Hugging Face hub, in the cache of this machine (``HF_HOME``)."""

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]+)/?$")
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TEXTS = ["*.json", "*.model", "*.jinja", "*.txt", "*.tiktoken"]


class Revision(NamedTuple):
    """A name on the hub, and a commit or a branch of it."""

    name: str
    revision: str


def on_hub(path: str | Path) -> Revision | None:
    """What of the hub a path stands for: a name, or a folder in the hub's cache, which may be that of another machine;
    None if it is any other folder."""
    if match := _SNAPSHOT.search(str(path)):
        return Revision(match[1].replace("--", "/", 1), match[2])
    if Path(path).is_dir() or not _NAME.fullmatch(str(path)):
        return None
    return Revision(str(path), "main")


def on_machine(path: str | Path) -> Path | None:
    """The folder of a model, if this machine has all of it: ``path``, or what stands for it in this machine's cache."""
    model = on_hub(path)
    if model is None or _is_whole(Path(path)):
        return Path(path) if Path(path).is_dir() else None
    kept = cache_folder(model.name)
    branch = kept / "refs" / model.revision
    folder = kept / "snapshots" / (branch.read_text() if branch.is_file() else model.revision)
    return folder if _is_whole(folder) else None


def cache_folder(name: str) -> Path:
    """The folder of a model of the hub in this machine's cache, whether it is there or not. It is where the hub's
    client looks, which takes long to import."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = Path(os.environ.get("HF_HOME", cache / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", home / "hub")))
    return hub.expanduser() / f"models--{name.replace('/', '--')}"


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").exists() and all(path.exists() for path in _weights(folder))


def _weights(folder: Path) -> Iterator[Path]:
    """The files that weights must be in."""
    for kind in ("safetensors", "bin"):
        index = next(folder.glob(f"*.{kind}.index.json"), None)
        if index:
            yield from {folder / file for file in json.loads(index.read_text())["weight_map"].values()}
            return
        if any(folder.glob(f"*.{kind}")):
            return
    yield folder / "model.safetensors"


def model_folder(path: str | Path) -> Path:
    """The folder of a model on this machine: ``path`` if it is none of the hub's, else the one in this machine's cache,
    into which it is downloaded if it is not there.

    Raises ValueError as :func:`download` does, or if there is neither a folder nor a name.
    """
    if folder := on_machine(path):
        return folder
    if model := on_hub(path):
        return download(model)
    raise ValueError(_told(path, "there is no such folder."))


def download(model: Revision) -> Path:
    """The folder in this machine's cache, with what the hub has of the model: config, tokenizer and weights, as
    safetensors if there are any. Of processes that ask at once, one downloads a file: the hub's client holds a lock
    beside the cache (``.locks``), and those that waited find the file there.

    Raises ValueError with the name, this machine and the reason if it cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        for kind in ("*.safetensors", "*.bin"):
            folder = Path(
                snapshot_download(
                    model.name,
                    revision=model.revision,
                    allow_patterns=[kind, *_TEXTS],
                    ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
                )
            )
            if any(folder.glob(kind)):
                return folder
    except Exception as error:  # its own, those of httpx, and of the disk: each is a reason
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            _told(f"{model.name}@{model.revision}", f"the download failed: {reason[0].rstrip('.')}.")
        ) from error
    raise ValueError(_told(f"{model.name}@{model.revision}", "the hub has no weights of it."))


def _told(path: str | Path, reason: str) -> str:
    return (
        f"model {str(path)!r} cannot be loaded on {socket.gethostname()}: {reason} Give a folder with config.json, "
        "safetensors and a tokenizer, or a name on the Hugging Face hub; hf download NAME fetches it before"
    )


if __name__ == "__main__":
    try:
        print(download(Revision(*sys.argv[1:3])))
    except ValueError as error:
        sys.exit(str(error))
