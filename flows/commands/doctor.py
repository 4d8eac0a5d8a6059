"""Say what is wrong with a run's rollouts and training, with evidence, threshold and remedy."""

import json
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

BAD_INPUT = 2
SICK = 1


@app.command()
def doctor(
    run: Annotated[str, typer.Argument(help="A run: its id, the beginning of it, or last")] = "last",
    store: Annotated[str, typer.Option(envvar="AGENTRL_STORE", help="Folder or s3://bucket/prefix")] = "store",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Load models above 2 GiB, or on S3, too: log-probs are computed again")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Say what is wrong with a run's rollouts and training. Exit code 1 where something is."""
    from datastore.catalog import Catalog
    from pipelines.diagnose import diagnose
    from pipelines.runs import find_run

    try:
        record = find_run(Catalog(store), run)
    except LookupError as error:
        typer.echo(f"error: {error.args[0]}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    found = diagnose(store, record, recompute)
    sick = any(found.values())
    if as_json:
        stages = {name: [vars(finding) for finding in findings] for name, findings in found.items()}
        typer.echo(json.dumps({"run_id": record["run_id"], "healthy": not sick, "stages": stages}, indent=2))
        raise typer.Exit(SICK if sick else 0)
    from rich.console import Console

    console = Console(soft_wrap=True)
    for name, findings in found.items():
        for finding in findings:
            console.print(f"[bold]{name}[/]: [red]{finding.name}[/]")
            console.print(f"  evidence   {finding.evidence}", markup=False)
            console.print(f"  threshold  {finding.threshold}", markup=False)
            console.print(f"  remedy     {finding.remedy}", markup=False)
    if not sick:
        console.print(f"run {record['run_id']}: {len(found)} stages looked at, nothing found")
    raise typer.Exit(SICK if sick else 0)
