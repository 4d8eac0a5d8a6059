"""Compute one training step again from Parquet, and compare loss and gradient norm with the recorded ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.flows.commands._common import fail, open_catalog
from agentrl.flows.commands.artifacts import looked_up
from agentrl.flows.options import Artifact, Json, StepSettings, Store, command
from agentrl.flows.terminal import console, say_json

if TYPE_CHECKING:
    from agentrl.pipelines.replay.step import Replayed

app = typer.Typer()

SHOWN = 8
"""Rows whose advantage has another sign that are listed."""


@command(app)
def replay(
    artifact: Artifact,
    step: Annotated[int, typer.Option(min=0, help="Optimiser step; of an online stage, the iteration")],
    settings: StepSettings = None,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Compute one training step again from Parquet, and compare it with what was recorded. --set changes a
    setting of that step only: of the loss, or of a stage that learns from rollouts also the algorithm, its advantages,
    filters and rewards, for which its rows are made from the stored rollouts again."""
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
    _show(f"{artifact}, step {step}: {replayed.rows} rows", replayed)


def _show(title: str, replayed: "Replayed") -> None:
    from rich.table import Table

    table = Table("metric", "recorded", "replayed", title=title, title_justify="left")
    for name, value in replayed.replayed.items():
        table.add_row(name, f"{replayed.recorded[name]:.9g}" if name in replayed.recorded else "-", f"{value:.9g}")
    out = console()
    out.print(table)
    if not replayed.changed:
        out.print("equal" if replayed.equal else "not equal: other hardware, threads or library versions?")
        return
    out.print(f"changed for this step: {', '.join(replayed.changed)}")
    if not replayed.turned:
        return
    turns = Table("advantage", "recorded", "replayed", title="another sign of the advantage", title_justify="left")
    for row in replayed.turned[:SHOWN]:
        turns.add_row(row.trajectory_id, f"{row.recorded:.3g}", f"{row.replayed:.3g}")
    out.print(turns)
    counts = ", ".join(f"{number} from {signs}" for signs, number in replayed.turns.items())
    more = f"; --json lists all {len(replayed.turned)}" if len(replayed.turned) > SHOWN else ""
    out.print(f"rows with another sign: {counts}{more}")
