"""How rows and trajectories of the buffer are printed."""

import json
import math
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agentrl.flows.display import seconds
from agentrl.pipelines.printable import one_line
from agentrl.schemas.trajectory import Message, Role, Trajectory

if TYPE_CHECKING:
    import polars as pl

COLORS = {Role.SYSTEM: "magenta", Role.USER: "cyan", Role.ASSISTANT: "green", Role.TOOL: "yellow"}
CELL_WIDTH = 60
STRIP_WIDTH = 72
LEAST_S = 0.1
"""Seconds from which on a message says how long it took."""
NARROW = 6
"""Least width of a column, in characters, even if ids fill the terminal."""


def cell(value: Any) -> str:
    """One value as short text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if hasattr(value, "isoformat"):
        return value.isoformat(sep=" ", timespec="seconds")
    text = json.dumps(value, default=str) if isinstance(value, (list, dict)) else str(value)
    text = one_line(text)
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"


def print_rows(console: Console, rows: list[dict[str, Any]], title: str | None = None) -> None:
    """Rows as a table that fits the terminal."""
    if not rows:
        console.print("no rows")
        return
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    needed = 0
    for name in rows[0]:
        number = all(isinstance(row[name], int | float | None) for row in rows)
        width = max(len(one_line(str(row[name]))) for row in rows) if is_id(name) else None
        needed += (width or NARROW) + 1
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(name, justify=justify, overflow="ellipsis", no_wrap=number or bool(width), min_width=width)
    for row in rows:
        table.add_row(*(Text(one_line(str(value)) if is_id(name) else cell(value)) for name, value in row.items()))
    width, console.width = console.width, max(console.width, needed)
    console.print(table, crop=False)
    console.width = width


def is_id(column: str) -> bool:
    """Whether a column holds ids, which people copy and which are therefore never cut."""
    return column == "id" or column.endswith("_id") or column == "fingerprint"


def print_frame(console: Console, frame: "pl.DataFrame", limit: int) -> None:
    print_rows(console, frame.head(limit).to_dicts())
    if frame.height > limit:
        console.print(f"... {frame.height - limit:,} more rows; --limit shows more", style="dim")


def print_trajectory(console: Console, row: Trajectory, tokens: bool = False) -> None:
    """One trajectory: origin, messages and tool calls, reward, and which tokens are trained on."""
    console.print(_header(row))
    for number, message in enumerate(row.messages):
        console.print(_message(row, message, number))
    console.print(_outcome(row))
    if row.input_ids:
        console.print(_strip(row))
        if tokens:
            console.print(_tokens(row))
    else:
        console.print("no token ids: this row can be read, but not trained on as sampled", style="dim")


def _header(row: Trajectory) -> Group:
    facts = {
        "task": f"{row.task_id} ({row.env} {row.env_version}, {row.split}, level {row.level})",
        "stage": f"{row.stage or '-'} {row.fingerprint[:8]} of pipeline {row.pipeline or '-'}, "
        f"run {row.run_id or '-'}, {row.created_at:%Y-%m-%d %H:%M}",
        "policy": f"{row.policy or '-'} version {row.policy_version}, source {row.source}, sampling {row.sampling}",
    }
    if row.parent_id:
        facts["parent"] = row.parent_id + (f", shared up to token {row.fork_at}" if row.fork_at else "")
    if row.tags:
        facts["tags"] = ", ".join(row.tags)
    lines = [Text(row.trajectory_id, style="bold")]
    lines += [Text.assemble((f"{name:<8}", "dim"), value) for name, value in facts.items()]
    return Group(*lines)


def _message(row: Trajectory, message: Message, number: int) -> Panel:
    body = Text()
    if message.reasoning:
        body.append(message.reasoning.strip() + "\n", style="italic dim")
    body.append(message.content)
    for call in message.tool_calls:
        if body:
            body.append("\n")
        body.append("→ ", style="bold")
        body.append(f"{call.name}(", style="bold blue")
        body.append(_arguments(call.arguments))
        body.append(")", style="bold blue")
    title = message.role.value + (f" · {message.name}" if message.name and message.role is Role.TOOL else "")
    took = row.message_seconds[number] if row.message_seconds else None
    title += f" · {seconds(took)}" if took is not None and took >= LEAST_S else ""
    return Panel(
        body,
        title=Text(f"{number} {title}"),
        subtitle=Text(_span(row, message), style="dim"),
        title_align="left",
        subtitle_align="right",
        border_style=COLORS[message.role],
    )


def _arguments(text: str) -> str:
    value = json.loads(text)
    if not isinstance(value, dict):
        return text
    return ", ".join(f"{name}={json.dumps(item, ensure_ascii=False)}" for name, item in value.items())


def _span(row: Trajectory, message: Message) -> str:
    if message.token_start is None or message.token_end is None or not row.input_ids:
        return ""
    mask = row.action_mask[message.token_start : message.token_end]
    parts = [f"tokens {message.token_start}-{message.token_end}", f"trained on {sum(mask)} of {len(mask)}"]
    logprobs = [value for value in row.logprobs[message.token_start : message.token_end] if not math.isnan(value)]
    if logprobs:
        parts.append(f"mean log-prob {sum(logprobs) / len(logprobs):.3f}")
    if message.reward is not None:
        parts.append(f"reward {message.reward:g}")
    return ", ".join(parts)


def _outcome(row: Trajectory) -> Text:
    text = Text()
    word, style = {True: ("✓ success", "bold green"), False: ("✗ failure", "bold red"), None: ("? unscored", "bold")}[
        row.success
    ]
    text.append(word, style=style)
    reward = "none" if row.reward is None else f"{row.reward:g}"
    text.append(f"  reward {reward}  {row.termination.value}  ")
    text.append(f"{row.n_steps} steps, {row.n_tool_calls} tool calls, {row.n_tool_errors} tool errors", style="dim")
    for part in row.reward_components:
        text.append(f"\n  {part.name:<20} {part.value:>8g} x {part.weight:g}")
    return text


def _strip(row: Trajectory) -> Text:
    """The action mask as a strip: a full block means that all its tokens are trained on."""
    mask = row.action_mask
    width = min(STRIP_WIDTH, len(mask))
    text = Text("tokens  ", style="dim")
    for column in range(width):
        part = mask[column * len(mask) // width : (column + 1) * len(mask) // width]
        share = sum(part) / len(part)
        text.append("█" if share > 0.5 else "▄" if share else "·", style="green" if share else "dim")
    text.append(f"  {sum(mask)} of {len(mask)} trained on", style="dim")
    return text


def _tokens(row: Trajectory) -> Text:
    """Token ids one by one; trained ones in green with their log-prob."""
    text = Text()
    for token, trained, logprob in zip(row.input_ids, row.action_mask, row.logprobs, strict=False):
        text.append(f"{token}", style="green" if trained else "dim")
        text.append(f"({logprob:.2f}) " if trained and not math.isnan(logprob) else " ", style="dim")
    return text
