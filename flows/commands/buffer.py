"""Commands that look after the buffer: compact, warm, vacuum, check, migrate."""

from typing import Annotated

import typer

from agentrl.flows.commands._common import open_buffer, print_rows
from agentrl.flows.options import Json, Store, command
from agentrl.flows.terminal import say, say_json

app = typer.Typer()


@command(app)
def compact(store: Store = "store", as_json: Json = False) -> None:
    """Merge small files. No row changes, and old versions stay readable."""
    from agentrl.datastore.upkeep import compact as run

    print_rows([dict(run(open_buffer(store)))], as_json)


@command(app)
def warm(store: Store = "store", as_json: Json = False) -> None:
    """Copy the token columns to this machine, uncompressed, so that random rows are read fast. Run it again after
    appends and compactions."""
    from agentrl.datastore.read.token_cache import warm as run

    print_rows([dict(run(open_buffer(store)))], as_json)


@command(app)
def vacuum(
    store: Store = "store",
    retention_hours: Annotated[
        float, typer.Option(min=0, help="Keep all versions younger than this; 0 keeps only the newest")
    ] = 168.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it only list")] = False,
    as_json: Json = False,
) -> None:
    """Remove files that no artifact and no recent version needs."""
    from agentrl.datastore.upkeep import vacuum as run

    dead = run(open_buffer(store), retention_hours=retention_hours, dry_run=not yes)
    if as_json:
        say_json({"removed": yes, "files": dead})
    else:
        say(f"{len(dead)} files {'removed' if yes else 'can go; --yes removes them'}")


@command(app)
def check(
    store: Store = "store",
    repair: Annotated[
        bool, typer.Option("--repair", help="Restore rows from old files, and keep doubled rows once")
    ] = False,
    drop: Annotated[bool, typer.Option("--drop", help="Repair, then remove files that cannot be restored")] = False,
    accept_losses: Annotated[
        bool, typer.Option("--accept-losses", help="Let rows that are known to be lost fail no later check")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find what is wrong with files, rows, log and artifacts, and say what to do. Exit code 1 if anything is."""
    from dataclasses import asdict

    from agentrl.datastore import upkeep

    buffer = open_buffer(store)
    if repair or drop:
        done = upkeep.repair(buffer, drop=drop)
        say(
            f"{done.restored} rows restored, {done.once} doubled rows taken out, {done.set_aside} set aside in "
            f"quarantine; {len(done.dropped)} files dropped, {done.lost} rows LOST, {len(done.shards)} shards can be "
            f"appended again; {len(done.damaged)} damaged files stay",
            stderr=True,
        )
    if accept_losses:
        for accepted_loss in upkeep.accept_losses(buffer):
            say(f"accepted: {accepted_loss.what}", stderr=True)
    findings = [asdict(fault) for fault in upkeep.check(buffer)]
    if as_json:
        say_json(findings)
    else:
        for finding in findings:
            say(f"{finding['kind']}: {finding['what']}\n    {finding['advice']}")
        lost = [] if findings else upkeep.losses(buffer)
        for loss in lost:
            say(f"lost, and accepted: {loss.what}")
        good = "nothing else is wrong" if lost else "all files, rows and artifacts are sound"
        say(f"{len(findings)} findings" if findings else good)
    if findings:
        raise typer.Exit(1)


@command(app)
def migrate(store: Store = "store", as_json: Json = False) -> None:
    """Bring a table of an older schema to this one."""
    from agentrl.datastore.upkeep import migrate as run

    print_rows([dict(run(open_buffer(store)))], as_json)
