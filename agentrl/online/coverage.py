"""The proof that an online run dropped nothing: a row for each ticket, and what has to hold of all of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

SCHEMA = pa.schema(
    [
        pa.field("ticket", pa.int64(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("batch", pa.int32(), nullable=False),
        pa.field("fills", pa.bool_(), nullable=False),
        pa.field("rows", pa.int32(), nullable=False),
        pa.field("unscored", pa.int32(), nullable=False),
        pa.field("turns", pa.int32(), nullable=False),
        pa.field("version", pa.int32(), nullable=False),
        pa.field("staleness", pa.int32(), nullable=False),
    ]
)
"""``batch`` is the iteration that trained on the ticket's group; ``fills`` is false if it was taken beside those that
make the batch, because its rewards were equal. ``unscored`` of its ``rows`` have no reward. ``turns`` are those of the
agent. ``version`` is that of the oldest weights that sampled it, and ``staleness`` is how many versions later it was
trained on."""


class CoverageError(RuntimeError):
    """A run that dropped, doubled or delayed something. It is a fault of agentrl, not of the data."""


def check(
    tickets: Sequence[Mapping[str, Any]],
    rows: Mapping[int, int],
    per_ticket: int,
    tasks: int | None,
    max_staleness: int,
) -> None:
    """Raises CoverageError unless tickets 0 to N - 1 are each in one batch with ``per_ticket`` rows, the buffer has
    these rows of each (``rows`` by ticket) and of no other, no group is older than ``max_staleness``, and any two of
    the ``tasks`` were drawn equally often, or one of them once more (None: a curriculum drew them)."""
    problems = []
    numbers = sorted(ticket["ticket"] for ticket in tickets)
    if numbers != list(range(len(numbers))):
        twice = [number for number, count in Counter(numbers).items() if count > 1]
        missing = sorted(set(range(max(numbers) + 1)) - set(numbers))
        problems.append(f"tickets {missing[:5]} are in no batch, and {twice[:5]} in more than one")
    short = [ticket["ticket"] for ticket in tickets if ticket["rows"] != per_ticket]
    if short:
        problems.append(f"tickets {short[:5]} have not {per_ticket} rows")
    other = {ticket["ticket"]: ticket["rows"] for ticket in tickets}
    differ = sorted(set(rows.items()) ^ set(other.items()))
    if differ:
        problems.append(f"the buffer has other rows than the batches name, such as those of ticket {differ[0][0]}")
    late = [ticket["ticket"] for ticket in tickets if ticket["staleness"] > max_staleness]
    if late:
        problems.append(f"tickets {late[:5]} are more than {max_staleness} versions old")
    drawn = Counter(ticket["task_id"] for ticket in tickets)
    least = min(drawn.values()) if len(drawn) == tasks else 0
    if tasks is not None and max(drawn.values(), default=0) - least > 1:
        problems.append(f"one task was drawn {max(drawn.values())} times, another {least} times")
    if problems:
        raise CoverageError("; ".join(problems))


def by_age(tickets: pa.Table) -> list[dict[str, int]]:
    """The table in short, a row for each age of groups in versions: how many tickets, and their rows and turns."""
    sums = [("ticket", "count"), ("rows", "sum"), ("unscored", "sum"), ("turns", "sum")]
    ages = tickets.group_by("staleness").aggregate(sums).sort_by("staleness")
    names = {"staleness": "staleness", **{f"{name}_{how}": name for name, how in sums}}
    return ages.select(list(names)).rename_columns(["staleness", "tickets", *list(names.values())[2:]]).to_pylist()


def summary(tickets: Sequence[Mapping[str, Any]], turns_drawn: int) -> dict[str, int | float]:
    """Numbers for the metrics of the stage. ``turns_drawn`` are those of all rollouts in the buffer."""
    turns = sum(ticket["turns"] for ticket in tickets)
    return {
        "tickets": len(tickets),
        "oldest": max((ticket["staleness"] for ticket in tickets), default=0),
        "turns_trained_of_drawn": turns / turns_drawn if turns_drawn else 1.0,
    }
