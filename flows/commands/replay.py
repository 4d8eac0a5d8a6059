"""Compute one training step again from Parquet, and compare loss and gradient norm with the recorded ones."""

import json
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

BAD_INPUT = 2


@app.command()
def replay(
    run: Annotated[str, typer.Argument(help="A training artifact: STAGE (its newest), STAGE/FINGERPRINT or TAG")],
    step: Annotated[int, typer.Option(min=0, help="Optimiser step; of an online stage, the iteration")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="beta=0.3, algorithm.clip_high=0.3; for this step alone")
    ] = None,
    store: Annotated[str, typer.Option(envvar="AGENTRL_STORE", help="Folder or s3://bucket/prefix")] = "store",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Compute one training step again from Parquet, and compare it with what was recorded."""
    from datastore.catalog import Catalog
    from pipelines.lineage import find_artifact
    from pipelines.replay import ReplayError
    from pipelines.replay import replay as compute

    catalog = Catalog(store)
    try:
        manifest = find_artifact(catalog, run)
        found = compute(catalog, manifest, step, settings or ())
    except (LookupError, ReplayError) as error:
        typer.echo(f"error: {error.args[0]}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "metric", "recorded", "replayed", title=f"{run}, step {step}: {found.rows} rows", title_justify="left"
    )
    for name, value in found.replayed.items():
        table.add_row(name, f"{found.recorded[name]:.9g}" if name in found.recorded else "-", f"{value:.9g}")
    console = Console()
    console.print(table)
    if found.changed:
        console.print(f"changed for this step: {', '.join(found.changed)}")
    else:
        console.print("equal" if found.equal else "[red]not equal[/]: other hardware, threads or library versions?")
