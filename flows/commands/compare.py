"""Compare what was measured: two evaluations task by task, or the arms of a sweep in one table."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.flows.commands._common import open_catalog
from agentrl.flows.commands.artifacts import looked_up
from agentrl.flows.options import Json, Store, command
from agentrl.flows.terminal import console, say_json

if TYPE_CHECKING:
    from agentrl.pipelines.results.compare import Comparison

SHOWN = 5
"""Tasks gained or lost that are named; ``--json`` has all."""

app = typer.Typer()


@command(app)
def compare(
    arms: Annotated[
        list[str],
        typer.Argument(
            help="Evaluations, rollouts, or models that were evaluated: TAG, STAGE, STAGE/FINGERPRINT, a pattern such "
            "as 'eval-*', or a stage with a matrix. The first one is what the others are compared with"
        ),
    ],
    greedy: Annotated[bool, typer.Option("--greedy", help="Compare greedy attempts; else those sampled")] = False,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Put arms side by side: what varies between their configs, success with seeds pooled, and paired differences on
    the same tasks."""
    from agentrl.pipelines.results.compare import compare as compute

    with looked_up():
        comparison = compute(open_catalog(store), arms, greedy=greedy)
        described = comparison.to_json()
    if as_json:
        say_json(described)
    else:
        _print(comparison, described)


def _print(comparison: "Comparison", described: dict[str, Any]) -> None:
    from rich.table import Table

    from agentrl.pipelines.results.passes import PassDifference

    out = console()
    for note in described["notes"]:
        out.print(note, markup=False, highlight=False, soft_wrap=True)
    seeds = any(arm["seeds"] for arm in described["arms"])
    table = Table(box=None, pad_edge=False)
    first = [*(comparison.keys or ["policy"]), *(["seeds"] if seeds else [])]
    for column in (*first, "tasks", "success", "95 % interval"):
        table.add_column(column, overflow="fold")
    for arm in described["arms"]:
        settings = [str(arm["settings"][key]) for key in comparison.keys] or [", ".join(dict.fromkeys(arm["policies"]))]
        success = arm["success"]
        interval = f"{success['low']:.3f} - {success['high']:.3f}"
        of_seeds = [", ".join(arm["seeds"])] if seeds else []
        table.add_row(*settings, *of_seeds, str(arm["tasks"]), f"{success['mean']:.3f}", interval)
        for seed in arm["by_seed"] if len(arm["by_seed"]) > 1 else []:
            table.add_row(*[""] * len(settings), seed["seed"], "", f"{seed['success']:.3f}", "")
    out.print(table)
    for arm in described["arms"]:
        if arm["unscored"]:
            failed = f", {arm['excluded']} of which failed by no doing of the policy" if arm["excluded"] else ""
            out.print(f"{arm['arm']}: {arm['unscored']} rows without an outcome are left out{failed}", markup=False)
    for contrast in described["differences"]:
        out.print(contrast["verdict"], markup=False, highlight=False, soft_wrap=True)
        for seed in contrast["by_seed"]:
            out.print(f"  seed {seed['seed']}: {seed['word']}", markup=False, highlight=False)
        for passed in contrast["passes"]:
            out.print(f"  {PassDifference(**passed)}", markup=False, highlight=False, soft_wrap=True)
        for what in ("gained", "lost"):
            names = contrast[f"tasks_{what}"]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            if names:
                out.print(f"  {what}: {', '.join(names[:SHOWN])}{more}", markup=False, highlight=False, soft_wrap=True)
