"""Commands that bring trajectories in and out in the formats of others: import, export."""

from typing import Annotated, Any

import typer

from flows.commands._common import open_buffer
from flows.options import Format, Json, Location, Rows, Store, command
from flows.terminal import say, say_json

app = typer.Typer()


@command(app, "import")
def import_(
    path: Location,
    format: Format,
    store: Store = "store",
    env: Annotated[str | None, typer.Option(help="Environment of all rows")] = None,
    split: Annotated[str | None, typer.Option(help="Split of all rows")] = None,
    stage: Annotated[str, typer.Option(help="Stage name of the rows")] = "import",
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Set bad rows aside and append the rest")] = False,
    as_json: Json = False,
) -> None:
    """Append a file of another format. Importing the same file twice changes nothing."""
    from dataclasses import asdict

    from datastore.formats import import_file

    on_error: Any = "quarantine" if quarantine else "raise"
    result = import_file(open_buffer(store), path, format, stage=stage, env=env, split=split, on_error=on_error)
    if as_json:
        say_json(asdict(result))
    elif result.skipped:
        say(f"{path} is in the buffer already")
    else:
        aside = f", {result.quarantined} set aside in quarantine" if result.quarantined else ""
        say(f"{result.rows} rows appended{aside}; version {result.version}")


@command(app)
def export(
    path: Location,
    format: Format,
    rows: Rows,
    as_json: Json = False,
) -> None:
    """Write trajectories in another format."""
    from datastore.formats import export_file
    from flows.commands._selections import selected

    buffer = open_buffer(rows.store)
    count = export_file(buffer, selected(buffer, rows), path, format)
    if as_json:
        say_json({"path": str(path), "format": format, "records": count})
    else:
        say(f"{count} records written to {path}")
