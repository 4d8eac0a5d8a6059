"""Make a project folder: an environment, a pipeline, a test, a CI file and a .gitignore."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from agentrl.flows.commands._common import fail
from agentrl.flows.options import Json, command
from agentrl.flows.terminal import say, say_json

PROJECT = Path(__file__).parents[1] / "project"
HIDDEN = {"gitignore": ".gitignore", "ci.yml": ".github/workflows/ci.yml"}
"""Files that have another name in the project, because they would act where they lie here."""

app = typer.Typer()


@command(app)
def init(
    folder: Annotated[Path, typer.Argument(help="The folder of the project; it is made, or has none of these files")],
    as_json: Json = False,
) -> None:
    """Make a project folder: an environment, a pipeline, a test, a CI file and a .gitignore."""
    sources = sorted(path for path in PROJECT.rglob("*") if path.is_file() and path.suffix != ".pyc")
    names = [path.relative_to(PROJECT).as_posix() for path in sources]
    targets = [folder / HIDDEN.get(name, name) for name in names]
    if taken := [str(path) for path in targets if path.exists()]:
        raise fail(f"error: nothing was written, since there already is {', '.join(taken)}; name another folder")
    try:
        for source, target in zip(sources, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    except OSError as error:
        raise fail(f"error: {folder}: {error.strerror}") from None
    if as_json:
        say_json({"folder": str(folder), "files": [path.relative_to(folder).as_posix() for path in targets]})
        return
    for path in targets:
        say(str(path))
    say(f"next: cd {folder} && agentrl run pipeline.yaml")
