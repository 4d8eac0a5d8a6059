"""Errors of the store. Each message names what was asked, what is there, and the next step; the command line prints
it as it is and exits with code 2."""

import re
from collections.abc import Sequence

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def one_line(reason: object) -> str:
    """An error's text in one line, without colours and arrows: native libraries write a line for each cause."""
    lines = (line.strip(" \t↳") for line in _COLOUR.sub("", str(reason)).splitlines())
    return ": ".join(line.rstrip(":") for line in lines if line) or "unknown error"


class StoreError(ValueError):
    """A request to the store cannot be fulfilled. The message says why."""


class UnfinishedError(StoreError):
    """Part of the work is done, and the message says which part is not. The command line exits with code 1."""


class NoBufferError(StoreError):
    """There is no trajectory buffer at this place."""

    def __init__(self, uri: str) -> None:
        super().__init__(f"there is no trajectory buffer at {uri}; check --store, or run a pipeline or an import first")


class NewerSchemaError(StoreError):
    """The table was written by a newer version of this package."""

    def __init__(self, uri: str, stored: int, known: int) -> None:
        super().__init__(
            f"the buffer at {uri} has schema_version {stored}, this package knows versions up to {known}; "
            "upgrade agentrl, or point --store at another store"
        )


class OlderSchemaError(StoreError):
    """The table was written by an older version and must be migrated before it is appended to."""

    def __init__(self, uri: str, stored: int, known: int) -> None:
        super().__init__(
            f"the buffer at {uri} has schema_version {stored}, this package writes version {known}; "
            "run `agentrl buffer migrate` first"
        )


class CorruptError(StoreError):
    """A file of the table cannot be read."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(
            f"{what} cannot be read: {one_line(reason)}; `agentrl buffer check` says what is damaged and what to do"
        )


class VersionGoneError(StoreError):
    """Files of an older version were removed, so that it cannot be read any more."""

    def __init__(self, version: int, newest: int | None) -> None:
        super().__init__(
            f"version {version} of the buffer cannot be read any more: a vacuum removed files of it; the newest is "
            f"version {newest}, and `--retention-hours` of `agentrl buffer vacuum` says how long old ones stay"
        )


class UnknownTrajectoryError(StoreError, KeyError):
    """No row has this ``trajectory_id``."""

    def __init__(self, missing: Sequence[str], near: Sequence[str]) -> None:
        self.missing = list(missing)
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        hint = f"; did you mean {', '.join(near)}?" if near else "; `agentrl buffer stats` lists the stages"
        super().__init__(f"no trajectory {missing[0]!r}{more} in the buffer{hint}")

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class InvalidRowsError(StoreError):
    """Rows that break the contract of a trajectory. ``problems`` holds (row number, trajectory_id, field, reason)."""

    def __init__(self, problems: Sequence[tuple[int, str, str, str]]) -> None:
        self.problems = list(problems)
        lines = [f"row {row} ({name}): {field}: {reason}" for row, name, field, reason in self.problems[:10]]
        if len(self.problems) > 10:
            lines.append(f"... and {len(self.problems) - 10} more")
        super().__init__(
            "rows break the contract of a trajectory, nothing was written:\n  "
            + "\n  ".join(lines)
            + '\nfix them, or append with on_error="quarantine" to set them aside'
        )


class LockTimeoutError(StoreError):
    """Someone else holds the lock for longer than the caller wants to wait."""


class LeaseLostError(StoreError):
    """A lock on S3 was held, and another process has taken it over since."""
