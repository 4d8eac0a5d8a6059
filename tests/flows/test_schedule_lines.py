"""Cron lines that never come, and time zones that there are not, are refused before a server has them."""

import pytest

from agentrl.flows.schedules import check_cron


@pytest.mark.parametrize(
    ("cron", "timezone", "message"),
    [
        ("0 2 * * *", "Europe/Berlin", None),
        ("0 0 29 2 *", None, None),
        ("0 0 31 2 *", None, "--cron '0 0 31 2 *': never comes"),
        ("0 0 31 4,6,9,11 *", None, "never comes"),
        ("every day", None, "five fields are needed"),
        ("0 2 * * *", "Mars", "--timezone 'Mars' is no IANA name"),
    ],
)
def test_a_schedule_that_cannot_come_is_refused(cron: str, timezone: str | None, message: str | None) -> None:
    result = check_cron(cron, timezone)
    assert (result is None) if message is None else message in (result or "")
