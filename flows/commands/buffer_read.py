"""Commands that look into the buffer: query, show, stats, history, diff, quarantine, schema."""

import json
from datetime import datetime
from typing import Annotated

import typer

from agentrl.flows.commands._common import fail, open_buffer, print_rows
from agentrl.flows.options import At, Json, Limit, Store, command
from agentrl.flows.terminal import console, say_json

app = typer.Typer()

MAX_VERSION = 2**63 - 1


def version(text: str | None) -> int | datetime | None:
    """A version number or a time as the store takes it; times without a zone are local."""
    if text is None:
        return None
    try:
        if text.isascii() and text.isdigit():
            number = int(text) if len(text) < 20 else MAX_VERSION + 1
            if number <= MAX_VERSION:
                return number
        else:
            return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        pass
    raise fail(f"error: --at {text[:80]!r} is neither a version number nor a time such as 2026-01-31T12:00")


@command(app)
def query(
    sql: Annotated[str, typer.Argument(help="SQL over the views trajectories, steps, tool_calls and annotations")],
    store: Store = "store",
    at: At = None,
    limit: Limit = 50,
    unsafe: Annotated[
        bool, typer.Option("--unsafe-sql", help="Allow read_csv(...) and the like: they read files")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer a SQL query; `agentrl buffer schema` lists the views and their columns."""
    frame = open_buffer(store).sql(sql, version=version(at), unsafe=unsafe)
    if as_json:
        say_json(json.loads(frame.write_json()))
        return
    from agentrl.flows.commands._render import print_frame

    print_frame(console(), frame, limit)


@command(app)
def show(
    trajectory_id: Annotated[str, typer.Argument(help="A row's id, as `agentrl buffer query` prints it")],
    store: Store = "store",
    tokens: Annotated[bool, typer.Option("--tokens", help="Print every token id with its log-prob")] = False,
    as_json: Json = False,
) -> None:
    """Show one trajectory: messages, tool calls, rewards, and which tokens are trained on."""
    row = open_buffer(store).get(trajectory_id)
    if as_json:
        say_json(json.loads(row.model_dump_json()))
        return
    from agentrl.flows.commands._render import print_trajectory

    print_trajectory(console(), row, tokens)


@command(app)
def stats(store: Store = "store", at: At = None, as_json: Json = False) -> None:
    """Count rows, tasks, tokens and success by stage."""
    numbers = open_buffer(store).stats(version(at))
    if as_json:
        say_json(numbers)
        return
    from agentrl.flows.commands._render import print_rows

    out = console()
    print_rows(out, numbers.pop("stages"))
    out.print("  ".join(f"{name} {value:,}" for name, value in numbers.items()), style="dim")


@command(app)
def history(store: Store = "store", limit: Limit = 20, as_json: Json = False) -> None:
    """List the commits of the buffer, newest first."""
    commits = open_buffer(store).history(limit)
    if as_json:
        say_json(commits)
        return
    from agentrl.flows.commands._render import print_rows

    print_rows(console(), [commit | {"fingerprint": (commit["fingerprint"] or "-")[:8]} for commit in commits])


@command(app)
def quarantine(store: Store = "store", limit: Limit = 20, as_json: Json = False) -> None:
    """List the rows that appends, and the records that imports, have set aside, with the reasons."""
    buffer = open_buffer(store)
    rows, records = buffer.quarantined(), buffer.unreadable()
    if as_json:
        say_json({"rows": json.loads(rows.write_json()), "records": records})
        return
    if rows.height or not records:
        print_rows(rows.head(limit).select("trajectory_id", "row", "problems").to_dicts(), as_json)
    if records:
        print_rows([{name: record[name] for name in ("place", "reason")} for record in records[:limit]], as_json)


@command(app)
def diff(
    old: Annotated[str, typer.Argument(help="A version number or a time")],
    new: Annotated[str | None, typer.Argument(help="Another; default the newest")] = None,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """List the rows added and removed between two versions, by stage run."""
    before = version(old)
    assert before is not None
    print_rows(open_buffer(store).diff(before, version(new)).to_dicts(), as_json)


@command(app)
def schema(
    view: Annotated[str | None, typer.Argument(help="trajectories, steps or tool_calls; default all")] = None,
    as_json: Json = False,
) -> None:
    """Describe every column of the views that queries see."""
    from agentrl.datastore.read.describe import VIEWS, described

    if view is not None and view not in VIEWS:
        raise fail(f"error: there is no view {view!r}; there are: {', '.join(VIEWS)}")
    rows = [row for row in described() if view in (None, row["view"])]
    if as_json:
        say_json(rows)
        return
    from rich.table import Table

    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("view", "column", "type", "meaning"):
        table.add_column(name, no_wrap=name != "meaning")
    for row in rows:
        short = row["type"] if len(row["type"]) < 25 else row["type"].partition("(")[0]
        table.add_row(row["view"], row["column"], short, row["meaning"])
    console().print(table)
