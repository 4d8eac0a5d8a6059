"""Code of one's own beside a pipeline file: said when it is run for the first time, and listed without running it."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.flows.terminal import say

if TYPE_CHECKING:
    from agentrl.pipelines.file.expand import StageDraft


def _memory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "folders.json"


def say_once(module: str, file: Path) -> None:
    """Say that a module is run, unless that was said of its folder before. Folders are remembered in
    ``$XDG_CACHE_HOME/agentrl/folders.json``."""
    depth = module.count(".") + (file.name == "__init__.py")
    folder, memory = str(file.parents[depth]), _memory()
    try:
        known = json.loads(memory.read_text())
    except (OSError, ValueError):
        known = []
    if not isinstance(known, list) or folder in known:
        return
    say(
        f"note: code in {folder} is run, since a name points to its module {module}; this is said once. "
        "`agentrl plan --no-code FILE` reads files only",
        stderr=True,
    )
    with suppress(OSError):  # then it is said again
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial = memory.with_name(f"{memory.name}.{os.getpid()}")
        partial.write_text(json.dumps([*known, folder]))
        partial.replace(memory)


def without_code(name: str, profile: str | None, settings: list[str]) -> list[dict[str, Any]]:
    """The stages of a pipeline file, what each uses and reads, and the files with code of one's own that a plan would
    run for it. Nothing of that code is run. Raises SpecError if the file cannot be read so far."""
    from pydantic import ValidationError

    from agentrl.pipelines.file.document import find, read, with_profile, with_settings
    from agentrl.pipelines.file.expand import expand
    from agentrl.pipelines.file.problems import Problem, SpecError
    from agentrl.schemas.pipeline import PipelineSpec

    document = read(find(name))
    document = with_settings(with_profile(document, profile) if profile else document, settings)
    try:
        spec = PipelineSpec.model_validate(document.value)
    except ValidationError as error:
        raise SpecError(
            [Problem(item["msg"], document.place(item["loc"]), item["loc"]) for item in error.errors(include_url=False)]
        ) from None
    expanded, problems = expand(spec)
    if problems:
        raise SpecError([Problem(message, document.place(key), key) for key, message in problems])
    folders = dict.fromkeys((document.path.parent.resolve(), Path.cwd()))
    return [
        {
            "stage": draft.name,
            "uses": draft.spec.uses,
            "reads": {key: edges if isinstance(edges, list) else [edges] for key, edges in draft.spec.inputs.items()},
            "code": sorted({str(file) for text in _texts(draft) for file in _files(text, folders)}),
        }
        for draft in expanded.drafts.values()
    ]


def _texts(draft: "StageDraft") -> Iterator[str]:
    """All texts of a stage that may name a module."""
    values: list[Any] = [draft.spec.uses, draft.spec.with_]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value


def _files(text: str, folders: dict[Path, None]) -> Iterator[Path]:
    """The files of a module, and of the packages around it, that ``module:Name`` would run."""
    module, colon, name = text.partition(":")
    parts = module.split(".")
    if not colon or not all(part.isidentifier() for part in [*parts, name]):
        return
    for folder in folders:
        here = folder.joinpath(*parts)
        if files := [file for file in (here.with_suffix(".py"), here / "__init__.py") if file.is_file()]:
            around = [folder.joinpath(*parts[:count], "__init__.py") for count in range(1, len(parts))]
            yield from (*files, *(file for file in around if file.is_file()))
            return
