"""Say what is wrong with a run's rollouts and training, with evidence, threshold and remedy."""

from typing import Annotated

import typer
from rich.text import Text

from agentrl.flows.commands._common import FAILED, fail, open_catalog
from agentrl.flows.commands.artifacts import looked_up
from agentrl.flows.options import Json, Run, Store, command
from agentrl.flows.terminal import console, say_json

app = typer.Typer()

ROWS = 5
"""Rows of a finding that are printed; ``--json`` has more."""


@command(app)
def doctor(
    run: Run = "last",
    store: Store = "store",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Load models above 2 GiB, or on S3, too: log-probs are computed again")
    ] = False,
    rewards: Annotated[
        bool, typer.Option("--rewards", help="Look through the stored rows for success that was not earned, instead")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what is wrong with a run's rollouts and training. Exit code 1 if something is."""
    from agentrl.pipelines.diagnose import diagnose
    from agentrl.pipelines.parts.audited import audit_run
    from agentrl.pipelines.run.runs import find_run

    with looked_up():
        record = find_run(open_catalog(store), run)
    if rewards and recompute:
        raise fail("error: --recompute does nothing with --rewards; leave one of them out")
    findings_of = audit_run(store, record) if rewards else diagnose(store, record, recompute)
    sick = any(findings_of.values())
    if as_json:
        stages = {name: [vars(finding) for finding in findings] for name, findings in findings_of.items()}
        say_json({"run_id": record["run_id"], "healthy": not sick, "stages": stages})
        raise typer.Exit(FAILED if sick else 0)
    out = console()
    for name, findings in findings_of.items():
        for finding in findings:
            out.print(Text.assemble((name, "bold"), ": ", (finding.name, "red")))
            out.print(f"  evidence   {finding.evidence}")
            out.print(f"  threshold  {finding.threshold}")
            out.print(f"  remedy     {finding.remedy}")
            if rewards:
                shown = zip(finding.rows[:ROWS], finding.tokens or (None,) * ROWS, strict=False)
                at = [name if token is None else f"{name} at token {token}" for name, token in shown]
                out.print(f"  rows       {', '.join(at)}" + (" ..." if len(finding.rows) > ROWS else ""))
    if not sick:
        out.print(f"run {record['run_id']}: {len(findings_of)} stages looked at, nothing found")
    raise typer.Exit(FAILED if sick else 0)
