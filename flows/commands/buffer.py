"""Commands that look after the buffer: compact, vacuum, check, migrate."""

from typing import Annotated

import typer

from flows.commands._common import open_buffer as _buffer
from flows.commands._common import print_rows as _print_rows
from flows.options import Json, Store
from flows.terminal import say_json as _print_json

app = typer.Typer()


@app.command()
def compact(store: Store = "store", as_json: Json = False) -> None:
    """Merge small files. No row changes, and old versions stay readable."""
    from datastore.upkeep import compact as run

    _print_rows([dict(run(_buffer(store)))], as_json)


@app.command()
def vacuum(
    store: Store = "store",
    retention_hours: Annotated[float, typer.Option(min=0, help="Keep all versions younger than this")] = 168.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it only list")] = False,
    as_json: Json = False,
) -> None:
    """Remove files that no artifact and no recent version needs."""
    from datastore.upkeep import vacuum as run

    dead = run(_buffer(store), retention_hours=retention_hours, dry_run=not yes)
    if as_json:
        _print_json({"removed": yes, "files": dead})
    else:
        typer.echo(f"{len(dead)} files {'removed' if yes else 'can go; --yes removes them'}")


@app.command()
def check(
    store: Store = "store",
    drop: Annotated[bool, typer.Option("--drop", help="Take missing and corrupt files out of the table")] = False,
    as_json: Json = False,
) -> None:
    """Find missing or corrupt files, broken rows and orphans, and say what to do. Exit code 1 where there are any."""
    from dataclasses import asdict

    from datastore.upkeep import check as run
    from datastore.upkeep import drop_unreadable

    buffer = _buffer(store)
    if drop:
        dropped = drop_unreadable(buffer)
        typer.echo(
            f"{len(dropped.files)} files taken out; {len(dropped.shards)} shards can be appended again", err=True
        )
    findings = [asdict(one) for one in run(buffer)]
    if as_json:
        _print_json(findings)
    else:
        for one in findings:
            typer.echo(f"{one['kind']}: {one['what']}\n    {one['advice']}")
        typer.echo(f"{len(findings)} findings" if findings else "all files, rows and artifacts are sound")
    if findings:
        raise typer.Exit(1)


@app.command()
def migrate(store: Store = "store", as_json: Json = False) -> None:
    """Bring a table of an older schema to this one."""
    from datastore.upkeep import migrate as run

    _print_rows([dict(run(_buffer(store)))], as_json)
