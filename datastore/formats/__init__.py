"""Formats of others, read and written. Each module's docstring is its mapping, and says what it cannot carry."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from datastore.errors import StoreError
from datastore.formats import atif, chat, huggingface, sharegpt, swe_agent, tau2, trl, verifiers, verl
from schemas.trajectory import Trajectory, trajectory_id

if TYPE_CHECKING:
    from datastore.buffer import AppendResult, TrajectoryBuffer
    from datastore.ingest import OnError

_STAGE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,79}")

_NOT_THE_FORMAT = (
    *(LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError),
    pa.ArrowException,
)
"""What reading a file raises if it is of another format, or holds what no row can."""

LINEAGE = {"stage": "", "fingerprint": "", "run_id": ""}
"""Filled in by the append: an imported row is the import's."""


@dataclass(frozen=True)
class Format:
    """``read`` yields rows of a file or folder; ``write`` takes rows and gives the number of records written."""

    read: Callable[[Path], Iterator[Trajectory]]
    write: Callable[[Iterable[Trajectory], Path], int]
    tokens: bool
    """Whether token ids, mask and log-probs come back exactly."""


FORMATS: dict[str, Format] = {
    "openai-chat": Format(chat.read, chat.write, tokens=False),
    "trl-sft": Format(trl.read_sft, trl.write_sft, tokens=False),
    "trl-prompt-completion": Format(trl.read_prompt_completion, trl.write_prompt_completion, tokens=False),
    "trl-preference": Format(trl.read_preference, trl.write_preference, tokens=False),
    "trl-kto": Format(trl.read_kto, trl.write_kto, tokens=False),
    "verl-sft": Format(verl.read, verl.write, tokens=False),
    "verifiers": Format(verifiers.read, verifiers.write, tokens=True),
    "verifiers-v1": Format(verifiers.read_v1, verifiers.write_v1, tokens=True),
    "atif": Format(atif.read, atif.write, tokens=True),
    "swe-agent": Format(swe_agent.read, swe_agent.write, tokens=False),
    "tau2": Format(tau2.read, tau2.write, tokens=False),
    "sharegpt": Format(sharegpt.read, sharegpt.write, tokens=False),
    "huggingface": Format(huggingface.read, huggingface.write, tokens=True),
}


def named(name: str) -> Format:
    import difflib

    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise StoreError(f"there is no format {name!r}{hint} Formats are {', '.join(FORMATS)}")
    return FORMATS[name]


def import_file(
    buffer: "TrajectoryBuffer",
    path: Path,
    name: str,
    *,
    stage: str = "import",
    env: str | None = None,
    split: str | None = None,
    on_error: "OnError" = "raise",
) -> "AppendResult":
    """Append a file's rows. The fingerprint is of the file's content and the format, so that importing a file twice
    changes nothing. Rows get ids of this import; the source's own ids stay in ``episode_id`` and ``task_id``."""
    from datastore.digest import digest

    named(name)
    if not path.exists():
        raise StoreError(f"there is nothing to import at {path}")
    if not _STAGE.fullmatch(stage):
        raise StoreError(f"--stage {stage!r} is no name of a stage: up to 80 letters, digits, _ and -, a letter first")
    content = f"{digest(path)}/{name}/{env}/{split}"
    fingerprint = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    change = {key: value for key, value in (("env", env), ("split", split)) if value is not None}

    def rows() -> Iterator[Trajectory]:
        for number, row in enumerate(named(name).read(path)):
            own = {"trajectory_id": trajectory_id(stage, fingerprint, number), **LINEAGE, **change}
            yield row.model_copy(update=own)

    try:
        return buffer.append(rows(), stage=stage, fingerprint=fingerprint, on_error=on_error)
    except StoreError:
        raise
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RecursionError,
        pa.ArrowException,
    ) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else (str(error).splitlines() or [""])[0][:300]
        raise StoreError(f"{path} does not look like {name}: {reason}; see docs/formats.md") from error


def export_file(buffer: "TrajectoryBuffer", ids: Sequence[str], path: Path, name: str) -> int:
    """Write rows of the buffer to a file or folder, a bounded number at a time. Gives the number of records."""

    def rows() -> Iterator[Trajectory]:
        for start in range(0, len(ids), 1024):
            yield from buffer.get_many(ids[start : start + 1024])

    path.parent.mkdir(parents=True, exist_ok=True)
    return named(name).write(rows(), path)
