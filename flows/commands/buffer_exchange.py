"""Commands that bring trajectories in and out in the formats of others: import, tokenizer, export, forget."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.flows.commands._common import fail, on_secrets, open_buffer, print_rows
from agentrl.flows.options import (
    AnyFormat,
    DryRun,
    Format,
    Json,
    Location,
    OnSecrets,
    Replace,
    Rows,
    ShardsBy,
    SplitOfAll,
    Store,
    command,
)
from agentrl.flows.terminal import console, say, say_json

if TYPE_CHECKING:
    from agentrl.datastore.formats.imported import Imported

app = typer.Typer()

SHOWN = 8
"""At most so many files, keys and records of each kind are printed; ``--json`` has them all."""


@command(app, "import")
def import_(
    paths: Annotated[list[str], typer.Argument(help="Files and folders; - is the standard input")],
    format: AnyFormat = None,
    store: Store = "store",
    env: Annotated[str | None, typer.Option(help="Environment of all rows")] = None,
    split: SplitOfAll = None,
    policy: Annotated[str | None, typer.Option(help="Policy of all rows")] = None,
    task_prefix: Annotated[str | None, typer.Option(help="Put before every task id")] = None,
    reward: Annotated[str | None, typer.Option(help="A component, or a field of the record as in stats.final")] = None,
    success: Annotated[str | None, typer.Option(help="SQL, as in: reward >= 0.5 and exact = 1")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or name of the tokenizer that made the ids")] = None,
    join: Annotated[str | None, typer.Option(help="CSV, JSONL or Parquet with reward, success, split, tags")] = None,
    on: Annotated[str | None, typer.Option(help="Key of --join: KEY, or OURS=THEIRS; default source_id")] = None,
    stage: Annotated[str, typer.Option(help="Stage name of the rows")] = "import",
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Set broken records and rows aside, and append the rest")
    ] = False,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="Take records of chat without any assistant message too")
    ] = False,
    max_record_mb: Annotated[float, typer.Option(help="Records that take more are refused; see --quarantine")] = 64,
    shard_engine: ShardsBy = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Append files of other formats. Files that are in the buffer already are left out. Keys that are not carried are
    printed."""
    from agentrl.flows.showing import display_for, shown
    from agentrl.pipelines.file.library import search_in
    from agentrl.pipelines.stages.imports import import_files

    search_in([Path.cwd()])  # a format of the user's own
    labels = {"env": env, "split": split, "policy": policy, "task_prefix": task_prefix, "reward": reward}
    with shown("import", display_for(console(stderr=True), quiet=as_json)) as told:
        result = import_files(
            open_buffer(store),
            paths,
            format,
            progress=told,
            stage=stage,
            tokenizer=tokenizer,
            quarantine=quarantine,
            prompts=prompts,
            max_record_mb=max_record_mb,
            shard_engine=shard_engine,
            dry_run=dry_run,
            **labels,
            success=success,
            join=join,
            on=on,
        )
    if as_json:
        say_json(result.as_dict())
    else:
        _report(result)


@command(app)
def tokenizer(
    model: Annotated[str, typer.Argument(help="A model folder, or a name on the Hugging Face hub")],
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Keep a model's tokenizer in the store, so that the token ids of its rows become text. Stages do this by
    themselves; rows of older stores and of other programs need it."""
    from agentrl.models.policy import Tokenizing
    from agentrl.pipelines.tokenizers import keep_tokenizer

    storage = open_buffer(store).storage
    speaker = Tokenizing(model)
    if not keep_tokenizer(storage, speaker):
        raise fail(f"error: the tokenizer of {model} has no fast form (tokenizer.json), which is what a store keeps")
    print_rows([{"tokenizer": speaker.tokenizer_fingerprint}], as_json)


def _report(result: "Imported") -> None:
    if result.known:
        say(f"in the buffer already: {_some(result.known)}")
    if result.repeats:
        say(f"the same content is in the buffer under other labels, and comes in again: {_some(result.repeats)}")
    if result.present:
        say(f"{result.present} rows of sessions that have grown are in the buffer already, and stay")
    if result.annotations:
        say(f"{result.annotations} annotations of rows added")
    if result.superseded:
        say(f"{result.superseded} rows were removed: new ones go on from them")
    if result.skipped:
        say(f"skipped, no format fits: {_some(result.skipped)}")
    if result.rows:
        done = "would be appended" if result.dry_run else f"appended; version {result.version}"
        say(
            f"{result.rows} rows {done}: {result.messages} messages, {result.calls} calls, {result.tokens} tokens, "
            f"{result.successes} successes, {result.unscored} unscored"
        )
        for format, files in groupby(sorted(result.files, key=_format_of), _format_of):
            evidence_of_files = list(files)
            why = sorted({file_evidence["evidence"] for file_evidence in evidence_of_files} - {""})
            say(f"read as {format} from {len(evidence_of_files)} files" + (f" ({_some(why)})" if why else ""))
    if result.ignored:
        say("ignored: " + _some([f"{key} {count}" for key, count in result.ignored.items()]))
    for text, count in result.remarks.items():
        say(f"{text}: {count}")
    what = "would be set aside" if result.dry_run else "are set aside; `agentrl buffer quarantine` lists them"
    if result.unreadable:
        say(f"{len(result.unreadable)} records cannot be read and {what}")
        for record in result.unreadable[:SHOWN]:
            say(f"  {record['place']}: {record['reason']}")
    if result.quarantined:
        say(f"{result.quarantined} rows break the contract and {what}")
    if result.fingerprint:
        say(f"import {result.fingerprint}; `agentrl buffer forget {result.fingerprint[:12]}` undoes it")


def _format_of(file: dict[str, Any]) -> str:
    return str(file["format"])


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


@command(app)
def forget(
    fingerprint: Annotated[str, typer.Argument(help="Of an import or of one of its files, or the beginning of it")],
    store: Store = "store",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Undo an import: remove its rows from the buffer, unless an artifact reads them. It can be imported again."""
    from dataclasses import asdict

    from agentrl.datastore.upkeep import forget as run

    done = run(open_buffer(store), fingerprint, dry_run=dry_run)
    if as_json:
        say_json(asdict(done) | {"dry_run": dry_run})
    else:
        say(f"{done.rows} rows of import {done.fingerprint} {'would go' if dry_run else 'are gone'}")


@command(app)
def export(
    path: Location,
    format: Format,
    rows: Rows,
    secrets: OnSecrets = None,
    annotations: Annotated[
        bool, typer.Option("--with-annotations", help="Records say what people and judges said of their rows")
    ] = False,
    force: Replace = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Say what trajectories lose in another format, then write them in it. Formats of training sets take the train
    split unless --split says otherwise; the others take all rows."""
    from agentrl.datastore.formats import named
    from agentrl.datastore.formats.annotated import said_of
    from agentrl.datastore.formats.exports import export_rows, held_secrets, losses
    from agentrl.datastore.redaction.rows import unread_tokens
    from agentrl.flows.commands._selections import left_out, selected
    from agentrl.pipelines.file.library import search_in

    search_in([Path.cwd()])  # a format of the user's own
    wanted = on_secrets(secrets, "redact", "refuse")
    buffer = open_buffer(rows.store)
    split = rows.split_or("train" if named(format).training else None)
    ids = selected(buffer, rows, split)
    left = left_out(buffer, rows, split)
    if left and not as_json:
        say(f"{left} rows of other splits than {split} are left out; --split all takes them")
    lost = losses(buffer, ids, format)
    if lost and not as_json:
        say(f"{format} cannot hold, of {len(ids)} rows: " + ", ".join(f"{what} {n}" for what, n in lost.items()))
    if dry_run:
        held = held_secrets(buffer, ids, said_of(buffer, ids) if annotations else {}) if wanted else None
        if held and not as_json:
            kinds = "".join(f", {kind} {n}" for kind, n in sorted(held.places.items()))
            say(f"{len(held.rows)} rows hold secrets{kinds}")
            if held.unread:
                say(unread_tokens(held.unread))
        if as_json:
            say_json(
                {
                    "path": str(path),
                    "format": format,
                    "rows": len(ids),
                    "records": 0,
                    "other_splits": left,
                    "loses": lost,
                    **(
                        {"secrets": dict(held.places), "rows_with_secrets": len(held.rows), "unread": held.unread}
                        if held
                        else {}
                    ),
                }
            )
        return
    result = export_rows(buffer, ids, path, format, force=force, secrets=wanted, annotations=annotations)
    result.loses = lost
    if as_json:
        say_json(result.as_dict() | {"other_splits": left})
    else:
        with_them = f" with {result.annotations} annotations" if annotations else ""
        say(f"{result.records} records of {result.rows} rows written to {path}{with_them}")
        if result.redacted is not None:
            counts = ", ".join(f"{kind} {number}" for kind, number in result.redacted.items()) or "none"
            say(f"secrets replaced: {counts}")
        if result.unread:
            say(unread_tokens(result.unread))
