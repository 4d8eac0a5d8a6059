"""Commands on cuts: sets of rows to give to others, each with a manifest that can be checked."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.flows.commands._common import FAILED, open_buffer, open_catalog, print_rows
from agentrl.flows.commands.buffer_read import version
from agentrl.flows.options import At, Format, Json, Replace, Split, Store, command
from agentrl.flows.terminal import console, say, say_json

app = typer.Typer(no_args_is_help=True, help="Cut a data set to give to others: made by rules, checked by digests.")

CutName = Annotated[
    str, typer.Argument(help="A cut: NAME (its newest), NAME/FINGERPRINT, a tag, or a folder that an export wrote")
]


@command(app)
def make(
    name: Annotated[str, typer.Argument(help="Name of the cut: letters, digits, _ and -, a letter first")],
    rules: Annotated[Path, typer.Option(help="A YAML file with rules, evaluation_sets, licences and a seed")],
    selection: Annotated[
        str | None, typer.Option("--from", help="Of these rows alone: a selection, as `buffer select` saves one")
    ] = None,
    split: Split = None,
    at: At = None,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Choose rows by rules, and write them down with digests, sources, licences and what was left out why. Rows are of
    the train split unless --split says otherwise. The same rules on the same version make the same cut, byte for
    byte."""
    from agentrl.datastore.cuts.folder import CutFolder
    from agentrl.flows.commands._cuts import make as run
    from agentrl.flows.showing import display_for, shown

    buffer = open_buffer(store)
    number = None if at is None else buffer.table(version(at)).version()
    with shown(name, display_for(console(stderr=True), quiet=as_json)) as told:
        outcome = run(buffer, name, rules, selection, None if split == "all" else split or "train", number, told)
    manifest = outcome.manifest
    cut = CutFolder(open_catalog(store).local(manifest, manifest.outputs["cut"].path))
    if as_json:
        say_json(
            {"cut": name, "fingerprint": manifest.fingerprint, "sha256": cut.identity, "again": outcome.reused}
            | {"manifest": cut.manifest.model_dump(mode="json")}
        )
        return
    print_rows([level.model_dump() for level in cut.manifest.funnel], as_json)
    again = ", which was there already" if outcome.reused else ""
    made = f"cut {name}/{manifest.fingerprint[:8]}{again}"
    say(f"{cut.manifest.rows} rows of version {cut.manifest.table.version}; {made}")
    say(f"sha256 {cut.identity}")


@command(app, "list")
def list_(store: Store = "store", as_json: Json = False) -> None:
    """List the cuts of a store, newest first under each name."""
    from agentrl.pipelines.results.cuts import all_cuts, summary

    print_rows([summary(manifest) for manifest in all_cuts(open_catalog(store))], as_json)


@command(app)
def show(cut: CutName, store: Store = "store", as_json: Json = False) -> None:
    """Show the manifest of a cut: its rows, funnel, sources with licences, and evaluation sets."""
    from agentrl.datastore.redaction.rows import unread_tokens
    from agentrl.flows.commands._cuts import opened

    name, folder, _ = opened(store, cut)
    manifest = folder.manifest
    if as_json:
        say_json({"cut": name, "sha256": folder.identity, "manifest": manifest.model_dump(mode="json")})
        return
    counts = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in manifest.counts.model_dump().items())
    say(f"{name}: {manifest.rows} rows of version {manifest.table.version}, seed {manifest.seed}: {counts}")
    print_rows([level.model_dump() for level in manifest.funnel], as_json)
    print_rows([source.model_dump() for source in manifest.sources], as_json)
    if manifest.evaluation_sets:
        print_rows([compared.model_dump() for compared in manifest.evaluation_sets], as_json)
    else:
        say("compared with no evaluation set")
    if held := manifest.heldout:
        say(f"held out: {held.rows} rows of split {', '.join(held.splits)} in version {held.version}")
    if manifest.secrets is None:
        say("nobody looked for secrets")
    else:
        places = ", ".join(f"{kind} {count}" for kind, count in manifest.secrets.places.items())
        say(f"secrets in {manifest.secrets.rows} rows{': ' * bool(places)}{places}")
        if manifest.secrets.unread:
            say(unread_tokens(manifest.secrets.unread))
    say(f"sha256 {folder.identity}")


@command(app)
def verify(cut: CutName, store: Store = "store", as_json: Json = False) -> None:
    """Compute the digest of every row and file of a cut again. The exit code is 1 if anything is not what it was."""
    from agentrl.datastore.cuts import verify as verifying
    from agentrl.flows.commands._cuts import opened
    from agentrl.flows.showing import display_for, shown

    name, folder, manifest = opened(store, cut)
    if manifest is None:
        checked = verifying.verify_export(Path(cut))
    else:
        with shown("rows", display_for(console(stderr=True), quiet=as_json)) as told:
            checked = verifying.verify(open_buffer(store), folder, told)
    if as_json:
        say_json(checked.as_dict())
    elif checked.ok:
        compared = (
            f"{checked.rows} rows and every file" if checked.rows else "every file (its rows are in another format)"
        )
        say(f"{name}: {compared} as they were; sha256 {checked.identity}")
    else:
        say("\n".join([f"{name} is not what it was:", *checked.problems()]), stderr=True)
    if not checked.ok:
        raise typer.Exit(FAILED)


@command(app)
def diff(first: CutName, second: CutName, store: Store = "store", as_json: Json = False) -> None:
    """Say which rows the second cut has and the first has not, and the other way round, and by which rule."""
    from agentrl.datastore.cuts.diff import diff as compare
    from agentrl.flows.commands._cuts import opened

    between = compare(opened(store, first)[1], opened(store, second)[1])
    if as_json:
        counts, rows = between.counts().to_dicts(), between.rows.to_dicts()
        say_json({"why": between.why, "counts": counts, "rows": rows})
        return
    for line in between.why:
        say(line)
    if not between.rows.height:
        say("both have the same rows")
        return
    print_rows(between.counts().to_dicts(), as_json)
    for row in between.rows.group_by("change", "rule", maintain_order=True).head(3).to_dicts():
        say(f"  {row['change']} {row['trajectory_id']}" + (f" ({row['rule']})" if row["rule"] else ""))


@command(app)
def export(
    cut: Annotated[str, typer.Argument(help="A cut of the store: NAME (its newest), NAME/FINGERPRINT or a tag")],
    folder: Annotated[Path, typer.Argument(help="Folder to write")],
    format: Format = "parquet",
    no_annotations: Annotated[
        bool, typer.Option("--no-annotations", help="Without what people and judges said of the rows")
    ] = False,
    force: Replace = False,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Write a cut as a data set: its rows as Parquet with all that they have, or in another format, the cut, what was
    said of them, tasks, tokenizers, checksums, and a card that the hub reads."""
    from agentrl.datastore.cuts.export import export_cut
    from agentrl.flows.commands._cuts import opened
    from agentrl.pipelines.file.library import search_in

    search_in([Path.cwd()])  # a format of the user's own
    name, opened_cut, _ = opened(store, cut)
    done = export_cut(open_buffer(store), opened_cut, name, folder, format, force=force, annotations=not no_annotations)
    if as_json:
        say_json(done.as_dict())
        return
    if done.loses:
        lost = ", ".join(f"{what} {count}" for what, count in done.loses.items())
        say(f"{format} cannot hold, of {done.rows} rows: {lost}")
    for why, count in done.tasks_left_out.items():
        say(f"{count} tasks {why} were left out")
    for why, count in done.annotations_left_out.items():
        say(f"{count} annotations were left out, {why}")
    if done.annotations:
        say(f"{done.annotations} annotations are beside the rows")
    say(f"{done.records} records of {done.rows} rows written to {folder}; sha256 {done.identity}")


@command(app, "import")
def import_(
    folder: Annotated[Path, typer.Argument(help="Folder that `agentrl cut export` wrote, as Parquet")],
    name: Annotated[str | None, typer.Option(help="Name of the cut in this store; default: that of the folder")] = None,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Take a cut of another store into this one, after every file and every row was compared with it."""
    from agentrl.flows.commands._cuts import bring_in
    from agentrl.flows.showing import display_for, shown

    chosen = name or folder.resolve().name
    with shown("rows", display_for(console(stderr=True), quiet=as_json)) as told:
        manifest = bring_in(open_buffer(store), folder, chosen, told).manifest
    metrics = manifest.metrics
    if as_json:
        say_json({"cut": chosen, "fingerprint": manifest.fingerprint, **metrics})
        return
    if metrics["annotations"]:
        say(f"{metrics['annotations']} annotations added")
    say(f"{metrics['appended']} rows appended, {metrics['known']} were there; cut {chosen}/{manifest.fingerprint[:8]}")
    say(f"sha256 {metrics['sha256']}")
