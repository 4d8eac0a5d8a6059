"""``agentrl schedule``: deployments on the user's Prefect server, and the message if there is none."""

from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from agentrl.flows.server import unreachable, users_server
from agentrl.flows.terminal import console, say, say_json
from agentrl.pipelines.plan.plan import Plan
from agentrl.schemas.installation import missing

VERBS = ("list", "pause", "resume", "delete")

NO_SERVER = """error: schedules need a Prefect server that keeps running, and none is named. In two other terminals:
  prefect server start
  PREFECT_API_URL=http://127.0.0.1:4200/api prefect worker start --pool agentrl
then here: export PREFECT_API_URL=http://127.0.0.1:4200/api"""


def _refuse(message: str) -> int:
    say(message, stderr=True)
    return 2


def _reachable() -> str | None:
    """None, or why the server cannot be used."""
    if not users_server():
        return NO_SERVER
    if why := missing("prefect", "prefect"):
        return f"error: schedules need Prefect; {why}"
    why = unreachable()
    return f"error: {why}" if why else None


def check_cron(cron: str, timezone: str | None = None) -> str | None:
    """None, or what is wrong with a cron line or its time zone. A line that never comes true would make Prefect's
    scheduler fail, again and again."""
    from prefect._vendor.croniter import CroniterBadDateError, croniter
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        if error.errors()[0]["loc"] == ("timezone",):
            return f"error: --timezone {timezone!r} is no IANA name; give one such as Europe/Berlin"
        return f'error: --cron {cron!r}: {error.errors()[0]["msg"]}; five fields are needed, e.g. "0 2 * * *"'
    try:
        croniter(cron, datetime.now(UTC)).get_next()
    except CroniterBadDateError:
        return f"error: --cron {cron!r}: never comes; give a day and a month that go together"
    return None


def scheduled(plan: Plan, name: str, cron: str, timezone: str | None, pool: str | None) -> tuple[str, str]:
    """Create or update a schedule, and return its full name and its work pool.

    Raises ValueError with the message for the user if it cannot be."""
    if problem := _reachable() or check_cron(cron, timezone):
        raise ValueError(problem)
    from agentrl.flows.deploy import DEFAULT_POOL, deploy

    pool = pool or DEFAULT_POOL
    try:
        return deploy(plan, name, pool, cron, timezone), pool
    except LookupError as error:
        raise ValueError(f"error: {error.args[0]}") from None


def create(plan: Plan, name: str, cron: str, timezone: str | None, pool: str | None, as_json: bool) -> int:
    """As :func:`scheduled`, and say so. Returns the exit code."""
    try:
        full, pool = scheduled(plan, name, cron, timezone, pool)
    except ValueError as error:
        return _refuse(str(error))
    if as_json:
        say_json({"name": full, "schedule": cron, "pool": pool})
    else:
        say(f"{full} runs at {cron} ({timezone or 'UTC'}) in work pool {pool}")
        say(f"a worker must run there: prefect worker start --pool {pool}")
    return 0


def manage(verb: str, name: str | None, as_json: bool) -> int:
    """List, pause, resume or delete. Returns the exit code."""
    if problem := _reachable():
        return _refuse(problem)
    from agentrl.flows import deploy

    if verb == "list":
        _print_list(deploy.deployments(), as_json)
        return 0
    if not name:
        return _refuse(f"error: agentrl schedule {verb} NAME; `agentrl schedule list` shows the names")
    try:
        {"pause": deploy.pause, "resume": deploy.resume, "delete": deploy.delete}[verb](name)
    except LookupError as error:
        return _refuse(f"error: {error.args[0]}")
    done = {"pause": "paused", "resume": "resumed", "delete": "deleted"}[verb]
    say_json({"name": name, "done": done}) if as_json else say(f"{name}: {done}")
    return 0


def _print_list(deployed: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        say_json(deployed)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "schedule", "state", "pool", "store"):
        table.add_column(column)
    for deployment in deployed:
        state = "paused" if deployment["paused"] else "active" if deployment["schedule"] else "on demand"
        table.add_row(
            deployment["name"],
            deployment["schedule"] or "",
            state,
            deployment["pool"] or "",
            deployment["parameters"].get("store", ""),
        )
    console().print(table if deployed else "no schedules")
