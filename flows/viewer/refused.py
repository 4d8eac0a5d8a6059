"""Requests that cannot be answered."""

from collections.abc import Sequence

from agentrl.flows.viewer.wire import Refusal


class RefusedError(Exception):
    """What was asked cannot be answered, and why. The client gets it as :class:`agentrl.flows.viewer.wire.Refusal`."""

    def __init__(
        self,
        error: str,
        *,
        field: str | None = None,
        allowed: Sequence[str] = (),
        following: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(error)
        self.status = status
        self.body = Refusal(error=error, field=field, allowed=list(allowed), next=following)
