"""Commands on what is in the store: runs, artifacts, lineage, tags, garbage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from agentrl.flows.commands._common import fail, open_catalog
from agentrl.flows.options import Artifact, DryRun, Json, Limit, Run, Store, command
from agentrl.flows.terminal import console, say, say_json

app = typer.Typer()


@contextmanager
def looked_up() -> Iterator[None]:
    """If a name is not found, exit with code 2 and the message of the look-up."""
    try:
        yield
    except LookupError as error:
        raise fail(f"error: {error.args[0]}") from None


@command(app)
def runs(store: Store = "store", limit: Limit = 20, as_json: Json = False) -> None:
    """List runs, newest first."""
    from agentrl.flows.show import print_runs
    from agentrl.pipelines.run.runs import all_runs, summary

    listed = all_runs(open_catalog(store))[:limit]
    if as_json:
        say_json([summary(run) for run in listed])
    else:
        print_runs(console(), listed)


@command(app)
def show(
    what: Annotated[str, typer.Argument(help="A run (its id, or last), or an artifact: STAGE, STAGE/FINGERPRINT, TAG")],
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Show one run with durations, cache hits and failures, or one artifact: its outputs, metrics and warnings, and the
    funnel of a curation, and what training gained over the control for sharpening."""
    from agentrl.flows.show import funnel_of, print_artifact, print_run
    from agentrl.pipelines.results.gains import gain_of
    from agentrl.pipelines.results.lineage import find_artifact
    from agentrl.pipelines.run.runs import find_run

    catalog = open_catalog(store)
    with looked_up():
        if what == "last" or what[:1].isdigit():
            run = find_run(catalog, what)
            say_json(run) if as_json else print_run(console(), run)
        else:
            manifest = find_artifact(catalog, what)
            if not as_json:
                print_artifact(console(), manifest, catalog)
                return
            levels = funnel_of(catalog, manifest)
            gained = gain_of(catalog, manifest) if "success_low" in manifest.metrics else None
            more = ({"funnel": levels} if levels else {}) | ({"gain": gained.to_json()} if gained else {})
            say_json(manifest.model_dump(mode="json") | more)


@command(app)
def diff(run_a: Run, run_b: Run, store: Store = "store", as_json: Json = False) -> None:
    """Say what differs between two runs: config, code, inputs, metrics, row counts."""
    from agentrl.flows.show import print_diff
    from agentrl.pipelines.run.runs import diff_runs, find_run

    catalog = open_catalog(store)
    with looked_up():
        a, b = find_run(catalog, run_a), find_run(catalog, run_b)
    differing = diff_runs(catalog, a, b)
    if as_json:
        say_json({"a": a["run_id"], "b": b["run_id"], "stages": differing})
    else:
        print_diff(console(), a, b, differing)


@command(app)
def lineage(
    artifact: Artifact,
    store: Store = "store",
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flow chart")] = False,
    as_json: Json = False,
) -> None:
    """Show what an artifact was made from."""
    from agentrl.flows.show import print_lineage
    from agentrl.pipelines.results import lineage as lineages

    catalog = open_catalog(store)
    with looked_up():
        manifest = lineages.find_artifact(catalog, artifact)
    root = lineages.lineage(catalog, manifest.ingredients.stage, manifest.fingerprint)
    if as_json:
        say_json(root.to_json())
    elif mermaid:
        say(lineages.mermaid(root))
    else:
        print_lineage(console(), root)


@command(app)
def tag(
    artifact: Artifact,
    name: Annotated[str, typer.Argument(help="Letters, digits, _ and -, a letter first")],
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Give an artifact a name. gc never frees an artifact that has one."""
    from agentrl.pipelines.results import lineage as lineages

    catalog = open_catalog(store)
    try:
        with looked_up():
            manifest = lineages.tag(catalog, artifact, name)
    except ValueError as error:
        raise fail(f"error: {error}") from None
    stage, fingerprint = manifest.ingredients.stage, manifest.fingerprint
    if as_json:
        say_json({"tag": name, "stage": stage, "fingerprint": fingerprint})
    else:
        say(f"{name} -> {stage}/{fingerprint[:8]}")


@command(app)
def gc(
    keep_runs: Annotated[int, typer.Option(min=0, help="Keep the artifacts of this many newest runs")],
    store: Store = "store",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Free artifacts that no kept run, tag or lineage needs. Rows of the buffer always stay."""
    from agentrl.flows.show import print_garbage
    from agentrl.pipelines.results.gc import collect, find_garbage

    garbage = (find_garbage if dry_run else collect)(open_catalog(store), keep_runs)
    if as_json:
        say_json({"dry_run": dry_run, **garbage.to_json()})
    else:
        print_garbage(console(), garbage, dry_run)
