"""Query, curate, search, exchange and look after the trajectory buffer."""

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from datastore.buffer import TrajectoryBuffer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Query, curate, search, exchange and look after the trajectory buffer.",
)

Store = Annotated[str, typer.Option(envvar="AGENTRL_STORE", help="Folder or s3://bucket/prefix")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
At = Annotated[str | None, typer.Option("--at", help="A version number, or a time such as 2026-01-31T12:00")]
Limit = Annotated[int, typer.Option(min=1, help="Rows to print")]


def _buffer(store: str) -> "TrajectoryBuffer":
    from datastore.buffer import TrajectoryBuffer

    return TrajectoryBuffer(store)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str, allow_nan=True))


def _version(text: str | None) -> int | datetime | None:
    """A version number or a time as the store takes it; times without a zone are local."""
    if text is None or text.isdecimal():
        return None if text is None else int(text)
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise typer.BadParameter(
            f"--at {text!r} is neither a version number nor a time such as 2026-01-31T12:00"
        ) from None


@app.command()
def query(
    sql: Annotated[str, typer.Argument(help="SQL over the views trajectories, steps and tool_calls")],
    store: Store = "store",
    at: At = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Answer a SQL query."""
    frame = _buffer(store).sql(sql, version=_version(at))
    if as_json:
        typer.echo(frame.write_json())
        return
    from flows.commands._render import print_frame

    print_frame(_console(), frame, limit)


@app.command()
def show(
    trajectory_id: str,
    store: Store = "store",
    tokens: Annotated[bool, typer.Option("--tokens", help="Print every token id with its log-prob")] = False,
    as_json: Json = False,
) -> None:
    """Show one trajectory: messages, tool calls, rewards, and which tokens are trained on."""
    row = _buffer(store).get(trajectory_id)
    if as_json:
        typer.echo(row.model_dump_json(indent=2))
        return
    from flows.commands._render import print_trajectory

    print_trajectory(_console(), row, tokens)


@app.command()
def stats(store: Store = "store", at: At = None, as_json: Json = False) -> None:
    """Count rows, tasks, tokens and success by stage."""
    found = _buffer(store).stats(_version(at))
    if as_json:
        _print_json(found)
        return
    from flows.commands._render import print_rows

    console = _console()
    print_rows(console, found.pop("stages"))
    console.print("  ".join(f"{name} {value:,}" for name, value in found.items()), style="dim")


@app.command()
def history(store: Store = "store", limit: Limit = 20, as_json: Json = False) -> None:
    """List the commits of the buffer, newest first."""
    commits = _buffer(store).history(limit)
    if as_json:
        _print_json(commits)
        return
    from flows.commands._render import print_rows

    print_rows(_console(), [commit | {"fingerprint": (commit["fingerprint"] or "-")[:8]} for commit in commits])


def _console() -> Any:
    from rich.console import Console

    return Console()


Name = Annotated[str, typer.Option(help="Name of the selection in the catalog")]
Where = Annotated[str | None, typer.Option(help="SQL over the scalar columns, as in: success and env = 'lookup'")]
Selection = Annotated[str | None, typer.Option(help="A selection: the stage that made it, or stage/fingerprint")]
Embedder = Annotated[str, typer.Option(help="sentence-transformers model or path, or the embedded default")]
Seed = Annotated[int, typer.Option(help="Seed of everything random")]


def _print_rows(rows: list[dict[str, Any]], as_json: bool, title: str | None = None) -> None:
    if as_json:
        _print_json(rows)
        return
    from flows.commands._render import print_rows

    print_rows(_console(), rows, title)


@app.command()
def search(
    text: Annotated[str, typer.Argument(help="What the task is about")],
    store: Store = "store",
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Results")] = 5,
    where: Where = None,
    method: Annotated[str, typer.Option(help="dense, lexical or hybrid")] = "hybrid",
    diverse: Annotated[float | None, typer.Option(min=0, max=1, help="MMR: 1 is relevance alone")] = None,
    per_task: Annotated[int | None, typer.Option(min=1, help="At most this many rows of one task")] = None,
    embedder: Embedder = "embedded",
    as_json: Json = False,
) -> None:
    """Find the trajectories whose tasks are nearest to a text."""
    if method not in ("dense", "lexical", "hybrid"):
        raise typer.BadParameter(f"--method {method!r}: allowed are dense, lexical, hybrid")
    options = {"where": where, "method": method, "diverse": diverse, "per_task": per_task}
    found = _buffer(store).search(text, k, embedder=embedder, **options)
    columns = found.columns if as_json else ["trajectory_id", "score", "success", "reward", "n_steps", "prompt"]
    _print_rows(found.select(columns).to_dicts(), as_json)


@app.command()
def index(
    store: Store = "store",
    embedder: Embedder = "embedded",
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Start over, with a newly fitted default embedder")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring the search index up to date: only prompts that are new are embedded."""
    from dataclasses import asdict

    from datastore.retrieval.index import SearchIndex

    state = asdict(SearchIndex(_buffer(store), embedder).refresh(rebuild))
    _print_rows([state], as_json)


@app.command()
def experience(
    prompt: Annotated[str, typer.Argument(help="The task to find demonstrations for")],
    store: Store = "store",
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Demonstrations")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Budget, estimated at four characters a token")] = 1024,
    embedder: Embedder = "embedded",
    as_json: Json = False,
) -> None:
    """Turn the best matching successful runs into demonstrations, never from held-out splits."""
    found = _buffer(store).experience(prompt, k=k, max_tokens=max_tokens, embedder=embedder)
    if as_json:
        _print_json([{"trajectory_id": one.trajectory_id, "tokens": one.tokens, "text": one.text} for one in found])
        return
    for one in found:
        typer.echo(f"--- {one.trajectory_id}, about {one.tokens} tokens\n{one.text}\n")
    if not found:
        typer.echo("no successful run of another task of the train split fits")


@app.command()
def curate(
    file: Annotated[Path, typer.Argument(help="A YAML file with rules; see docs/buffer.md")],
    store: Store = "store",
    where: Where = None,
    selection: Selection = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the funnel, publish nothing")] = False,
    name: Name = "curated",
    as_json: Json = False,
) -> None:
    """Narrow trajectories by rules to a selection, and print the funnel."""
    from dataclasses import asdict

    from datastore.curation.curate import curate as apply
    from flows.commands._selections import publish, rules, selected

    chosen = rules(file)
    buffer = _buffer(store)
    ids = selected(buffer, where, selection)
    result = apply(buffer, chosen.rules, ids=ids, seed=chosen.seed, embedder=chosen.embedder)
    fingerprint = None
    if not dry_run:
        config = chosen.model_dump(mode="json") | {"where": where, "selection": selection}
        fingerprint = publish(buffer, name, "trajectories.curate", config, chosen.seed, result.ids, result.weights)
    if as_json:
        _print_json(
            {"rows": len(result.ids), "fingerprint": fingerprint, "funnel": [asdict(level) for level in result.funnel]}
        )
        return
    levels = [{"rule": level.rule, "before": level.before, "after": level.after} for level in result.funnel]
    _print_rows(levels, as_json)
    for level in result.funnel:
        for example in level.examples:
            typer.echo(
                f"  {level.rule.split()[0]} dropped {example['trajectory_id']}"
                f" (reward {_number(example['reward'])}): {example['prompt'][:60]}"
            )
    where_to = f"selection {name}/{fingerprint[:8]}" if fingerprint else "a dry run, nothing was published"
    typer.echo(f"{len(result.ids)} rows; {where_to}")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


@app.command()
def sample(
    n: Annotated[int, typer.Argument(min=1, help="Rows to draw")],
    store: Store = "store",
    strategy: Annotated[
        str, typer.Option(help="uniform, success_first, prioritized, recency, diversity, curriculum")
    ] = ("uniform"),
    where: Where = None,
    selection: Selection = None,
    seed: Seed = 0,
    name: Name = "sampled",
    as_json: Json = False,
) -> None:
    """Draw training rows into a selection."""
    import polars as pl

    from datastore.sampling import SAMPLERS
    from datastore.writer import SCALARS
    from flows.commands._selections import publish, selected

    if strategy not in SAMPLERS:
        raise typer.BadParameter(f"--strategy {strategy!r}: allowed are {', '.join(SAMPLERS)}")
    buffer = _buffer(store)
    ids = set(selected(buffer, where, selection))
    rows = buffer.scan().select(SCALARS).filter(pl.col("trajectory_id").is_in(list(ids))).collect()
    drawn = SAMPLERS[strategy](rows, n, seed)
    config = {"strategy": strategy, "n": n, "where": where, "selection": selection}
    fingerprint = publish(buffer, name, f"sampling.{strategy}", config, seed, drawn.ids, drawn.weights)
    if as_json:
        _print_json({"fingerprint": fingerprint, "ids": drawn.ids, "weights": drawn.weights})
    else:
        typer.echo(f"{len(drawn.ids)} rows; selection {name}/{fingerprint[:8]}")


@app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="File or folder")],
    format: Annotated[str, typer.Option("--format", "-f", help="See docs/formats.md")],
    store: Store = "store",
    env: Annotated[str | None, typer.Option(help="Environment of all rows")] = None,
    split: Annotated[str | None, typer.Option(help="Split of all rows")] = None,
    stage: Annotated[str, typer.Option(help="Stage name of the rows")] = "import",
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Set bad rows aside and append the rest")] = False,
    as_json: Json = False,
) -> None:
    """Append a file of another format. Importing the same file twice changes nothing."""
    from dataclasses import asdict

    from datastore.formats import import_file

    on_error: Any = "quarantine" if quarantine else "raise"
    result = import_file(_buffer(store), path, format, stage=stage, env=env, split=split, on_error=on_error)
    if as_json:
        _print_json(asdict(result))
    elif result.skipped:
        typer.echo(f"{path} is in the buffer already")
    else:
        aside = f", {result.quarantined} set aside in quarantine" if result.quarantined else ""
        typer.echo(f"{result.rows} rows appended{aside}; version {result.version}")


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="File or folder to write")],
    format: Annotated[str, typer.Option("--format", "-f", help="See docs/formats.md")],
    store: Store = "store",
    where: Where = None,
    selection: Selection = None,
    as_json: Json = False,
) -> None:
    """Write trajectories in another format."""
    from datastore.formats import export_file
    from flows.commands._selections import selected

    buffer = _buffer(store)
    count = export_file(buffer, selected(buffer, where, selection), path, format)
    if as_json:
        _print_json({"path": str(path), "format": format, "records": count})
    else:
        typer.echo(f"{count} records written to {path}")


@app.command()
def quarantine(store: Store = "store", limit: Limit = 20, as_json: Json = False) -> None:
    """List the rows that appends have set aside, with the reasons."""
    rows = _buffer(store).quarantined()
    if as_json:
        typer.echo(rows.write_json())
    else:
        _print_rows(rows.head(limit).select("trajectory_id", "row", "problems").to_dicts(), as_json)


@app.command()
def diff(
    old: Annotated[str, typer.Argument(help="A version number or a time")],
    new: Annotated[str | None, typer.Argument(help="Another; default the newest")] = None,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """List the rows added and removed between two versions, by stage run."""
    before = _version(old)
    assert before is not None
    _print_rows(_buffer(store).diff(before, _version(new)).to_dicts(), as_json)


@app.command()
def compact(store: Store = "store", as_json: Json = False) -> None:
    """Merge small files. No row changes, and old versions stay readable."""
    from datastore.upkeep import compact as run

    _print_rows([dict(run(_buffer(store)))], as_json)


@app.command()
def vacuum(
    store: Store = "store",
    retention_hours: Annotated[float, typer.Option(min=0, help="Keep all versions younger than this")] = 168.0,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it only list")] = False,
    as_json: Json = False,
) -> None:
    """Remove files that no artifact and no recent version needs."""
    from datastore.upkeep import vacuum as run

    dead = run(_buffer(store), retention_hours=retention_hours, dry_run=not yes)
    if as_json:
        _print_json({"removed": yes, "files": dead})
    else:
        typer.echo(f"{len(dead)} files {'removed' if yes else 'can go; --yes removes them'}")


@app.command()
def check(
    store: Store = "store",
    drop: Annotated[bool, typer.Option("--drop", help="Take missing and corrupt files out of the table")] = False,
    as_json: Json = False,
) -> None:
    """Find missing or corrupt files, broken rows and orphans, and say what to do. Exit code 1 where there are any."""
    from dataclasses import asdict

    from datastore.upkeep import check as run
    from datastore.upkeep import drop_unreadable

    buffer = _buffer(store)
    if drop:
        dropped = drop_unreadable(buffer)
        typer.echo(
            f"{len(dropped.files)} files taken out; {len(dropped.shards)} shards can be appended again", err=True
        )
    findings = [asdict(one) for one in run(buffer)]
    if as_json:
        _print_json(findings)
    else:
        for one in findings:
            typer.echo(f"{one['kind']}: {one['what']}\n    {one['advice']}")
        typer.echo(f"{len(findings)} findings" if findings else "all files, rows and artifacts are sound")
    if findings:
        raise typer.Exit(1)


@app.command()
def migrate(store: Store = "store", as_json: Json = False) -> None:
    """Bring a table of an older schema to this one."""
    from datastore.upkeep import migrate as run

    _print_rows([dict(run(_buffer(store)))], as_json)
