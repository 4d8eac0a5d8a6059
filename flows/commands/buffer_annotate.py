"""Commands for what people and judges say of rows: annotate, agreement."""

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.flows.commands._common import open_buffer, print_rows
from agentrl.flows.options import Json, Seed, Store, command
from agentrl.flows.terminal import say, say_json

app = typer.Typer()

SHOWN = 8
"""At most so many lines that were set aside are printed; ``--json`` has them all."""


@command(app)
def annotate(
    file: Annotated[Path, typer.Argument(help="JSON Lines, CSV or Parquet: an annotation in each line")],
    store: Store = "store",
    author: Annotated[str | None, typer.Option(help="Of lines that name none")] = None,
    label: Annotated[str | None, typer.Option(help="Name of what lines say that have none, as in thumbs")] = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="A judge says so, not a person, if a line does not say")
    ] = False,
    as_json: Json = False,
) -> None:
    """Add what people or judges say of rows. Lines that are there already are left out; those that do not fit their row
    are set aside and counted. No row is rewritten."""
    from agentrl.datastore.formats.annotations import annotate_from

    given: dict[str, Any] = {"author": author, "name": label, "author_kind": "judge" if judge else None}
    defaults = {field: value for field, value in given.items() if value is not None}
    done, kept = annotate_from(open_buffer(store), file, defaults)
    if as_json:
        refused = [line.as_dict() for line in done.refused]
        counts = {"version": done.version, "rows": done.rows, "already": done.already}
        say_json({**counts, "refused": refused, "quarantine": kept})
        return
    say(f"{done.rows} annotations added, {done.already} there already; version {done.version} of the annotations")
    if done.refused:
        say(f"{len(done.refused)} lines are set aside in {kept}")
        for line in done.refused[:SHOWN]:
            say(f"  {line.place}: {f'{line.key}: ' if line.key else ''}{line.reason}")


@command(app)
def agreement(
    name: Annotated[str, typer.Argument(help="Of the annotations, as in thumbs")],
    store: Store = "store",
    at: Annotated[int | None, typer.Option("--annotations", min=0, help="Version of the annotations")] = None,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="How far apart numbers are counts, as of stars, and not only whether")
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Say how far authors agree: Krippendorff's alpha of all of them, and Cohen's kappa of each two, with intervals."""
    from agentrl.pipelines.results.agreement import agreement as agreement_of

    print_rows(agreement_of(open_buffer(store).annotations.frame(at), name, numbers=numbers, seed=seed), as_json)
