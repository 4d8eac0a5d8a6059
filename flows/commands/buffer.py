"""Query, curate, search, exchange and look after the trajectory buffer."""

import json
from datetime import datetime
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
