"""GGUF files, the form of llama.cpp, as ordinary model folders: weights in float32, tokenizer and chat template.

A file is converted once, into ``$XDG_CACHE_HOME/agentrl/models/``, under the digest of its content. The folder may be
removed at any time, and is made again when it is needed.
"""

import copy
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentrl.schemas.installation import install_hint, is_installed
from agentrl.schemas.permissions import readable

MAGIC = b"GGUF"


def is_gguf(path: str | Path) -> bool:
    """Whether this is a file that is named, or begins, as GGUF."""
    path = Path(path).expanduser()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC


def model_folder(path: str | Path, digest: str) -> Path:
    """The folder of a GGUF with this content, converted if this machine has not done so before.

    Raises ValueError if the file is cut off, or none that transformers reads.
    """
    return _made(digest, lambda folder: convert(path, folder))


def config_folder(path: str | Path, digest: str) -> Path:
    """A folder with the config and tokenizer of a GGUF, chat template included, which may lack the weights: it takes
    seconds where those take half a minute. Raises ValueError as :func:`model_folder` does."""
    whole = _cache() / _name(digest)
    return whole if whole.is_dir() else _made(f"{digest}-config", lambda folder: _convert_config(path, folder))


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Within it, a file is parsed once. transformers does so four times, and each takes seconds, most of them for the
    vocabulary."""
    if not is_installed("gguf"):
        yield
        return
    package: Any = import_module("gguf")
    reader = package.GGUFReader
    parsed = cache(reader)
    package.GGUFReader = lambda path, *mode: parsed(os.path.realpath(path), *mode)
    try:
        yield
    finally:
        package.GGUFReader = reader


@_parsed_once()
def convert(path: str | Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a GGUF into a folder. Raises ValueError as :func:`model_folder` does."""
    import torch
    from transformers import AutoModelForCausalLM

    _convert_config(path, folder)
    path = Path(path).expanduser()
    with _said(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
        )
        model, notes = loaded
        lacking = sorted(notes["missing_keys"])
        if lacking:  # transformers would draw them at random
            raise ValueError(f"it lacks {len(lacking)} of the model's weights, such as {lacking[0]}")
        with torch.device("meta"):
            plain = type(model)(_plain(model.config))
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder)
    readable(folder)


def _plain(config: Any) -> Any:
    """The config of a model whose weights are no longer quantized: with it, transformers would not save the model."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


@_parsed_once()
def _convert_config(path: str | Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    path = Path(path).expanduser()
    if not is_installed("gguf"):
        raise ValueError(f"model {str(path)!r} needs the package gguf; {install_hint('gguf')}")
    with _said(path):
        _refuse_cut(path)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if not tokenizer.chat_template:
        raise ValueError(f"model {str(path)!r} has no chat template (tokenizer.chat_template); take a chat model")
    tokenizer.save_pretrained(folder)
    _plain(config).save_pretrained(folder)


def _refuse_cut(path: Path) -> None:
    """Raise ValueError if the file ends before its last tensor, or is no GGUF at all."""
    from gguf import GGUFReader

    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF, so it is another file, or the beginning is lost")
    try:
        reader = GGUFReader(path)
        end = max((int(tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors), default=0)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        size = path.stat().st_size
        raise ValueError(f"it is broken, or cut off after {size} bytes ({_line(error)})") from None
    if not end:
        raise ValueError("it holds no tensors: it is a vocabulary alone")
    if end > path.stat().st_size:
        raise ValueError(f"it is cut off: {path.stat().st_size} bytes of {end}")


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """What transformers raises, as one ValueError that names the file, and without its bars and notes."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.utils import logging as notes

    before, bar = notes.get_verbosity(), gguf_utils.tqdm
    notes.disable_progress_bar()
    notes.set_verbosity(logging.CRITICAL)
    gguf_utils.tqdm = partial(bar, disable=True)  # it asks nobody
    try:
        yield
    except Exception as error:  # of architectures, quantizations and tokenizers that it does not know, of any type
        raise ValueError(
            f"model {str(path)!r} cannot be read: {_line(error)}; fetch it again, or take a GGUF of an architecture "
            f"and a quantization that transformers {version('transformers')} reads"
        ) from error
    finally:
        notes.set_verbosity(before)
        gguf_utils.tqdm = bar


def _line(error: Exception) -> str:
    message = next((line for line in str(error).splitlines() if line.strip()), "").strip().rstrip(".")
    return message if isinstance(error, ValueError) and message else f"{type(error).__name__}: {message}".rstrip(": ")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl" / "models"


def _name(digest: str) -> str:
    return f"{digest}-transformers-{version('transformers')}"


def _made(digest: str, make: Callable[[Path], Any]) -> Path:
    """The folder of this digest in the cache. Two processes may make it at once; the first to end keeps its own."""
    folder = _cache() / _name(digest)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        partial.chmod(0o755)
        make(partial)
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
