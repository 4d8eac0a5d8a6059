"""Compute one training step again from Parquet, and compare loss and gradient norm with the recorded ones."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.flows.commands._common import fail, open_catalog
from agentrl.flows.commands.artifacts import looked_up
from agentrl.flows.options import Artifact, Json, StepSettings, Store, command
from agentrl.flows.terminal import console, say_json

app = typer.Typer()


@command(app)
def replay(
    artifact: Artifact,
    step: Annotated[int, typer.Option(min=0, help="Optimiser step; of an online stage, the iteration")],
    settings: StepSettings = None,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Compute one training step again from Parquet, and compare it with what was recorded. --set changes a
    setting of that step only."""
    from agentrl.pipelines.file.library import search_in
    from agentrl.pipelines.replay.settings import ReplayError
    from agentrl.pipelines.replay.step import replay as compute
    from agentrl.pipelines.results.lineage import find_artifact

    search_in([Path.cwd()])  # a class of the user's own
    catalog = open_catalog(store)
    with looked_up():
        manifest = find_artifact(catalog, artifact)
    try:
        replayed = compute(catalog, manifest, step, settings or ())
    except ReplayError as error:
        raise fail(f"error: {error.args[0]}") from None
    if as_json:
        say_json(replayed.to_json())
        return
    from rich.table import Table

    title = f"{artifact}, step {step}: {replayed.rows} rows"
    table = Table("metric", "recorded", "replayed", title=title, title_justify="left")
    for name, value in replayed.replayed.items():
        table.add_row(name, f"{replayed.recorded[name]:.9g}" if name in replayed.recorded else "-", f"{value:.9g}")
    out = console()
    out.print(table)
    if replayed.changed:
        out.print(f"changed for this step: {', '.join(replayed.changed)}")
    else:
        out.print("equal" if replayed.equal else "not equal: other hardware, threads or library versions?")
