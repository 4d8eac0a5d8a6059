"""Connections of our servers: requests that do not arrive, and answers that nobody reads, end after a time. It needs
uvicorn.

uvicorn has a time-out only for connections that wait for their next request, and no limit for a request's head. The
time of a body is :func:`agentrl.recorder.app.body_of`'s.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 20.0
"""Seconds in which the head of a request arrives, from its first byte on, or from when a connection is made."""
LARGEST_HEAD = 64 * 2**10
"""Bytes of a request before its body."""
STALLED_S = 60.0
"""Seconds in which a client reads what was sent."""

_Base: Any = AutoHTTPProtocol


class Connection(_Base):
    """One client's connection. ``send`` of an application returns after all that was sent before has left this
    process, since nothing is held back."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, self._give_up)
        self._write_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # the head of a request is there
            self._head_bytes = 0
            self._head_timer = _stopped(self._head_timer)
            return
        self._head_bytes += len(data)
        answered_early = self.cycle is not None and self.cycle.more_body  # this may be the body of a refused request
        if self._head_bytes > LARGEST_HEAD and not answered_early:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._refuse(b"408 Request Timeout")
        else:
            self.transport.close()

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _stopped(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _stopped(self._head_timer)
        self._write_timer = _stopped(self._write_timer)
        super().connection_lost(exc)


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer, in place of this one."""
    if timer is not None:
        timer.cancel()
    return None
