"""What a worker and all that it starts print, on its way to the log of a stage.

The guard above the worker reads it from a pipe and writes it to the log without secrets: it sees what Python prints,
what is written to the descriptors without Python, and what programs print that the stage starts. What a crash leaves in
the pipe is written too.
"""

import os
import struct
import threading
from contextlib import suppress
from fcntl import ioctl
from multiprocessing import Pipe
from termios import FIONREAD

from agentrl.pipelines.secrets import StreamRedactor, revealed, tell_of_secrets

_PIECE = 1 << 16


class Printed:
    """Made before a worker and its guard part. Then one calls the methods of the worker, the other those of the
    guard."""

    def __init__(self) -> None:
        self._readable, self._writable = os.pipe()
        self._worker, self._guard = Pipe()
        self._lock = threading.Lock()
        self._redactor = StreamRedactor()
        self._log: int | None = None
        self._lost = 0

    # the worker

    def begin(self) -> None:
        """Let this process, and all that it starts, print into the pipe."""
        os.close(self._readable)
        self._guard.close()
        os.dup2(self._writable, 1)
        os.dup2(self._writable, 2)
        os.close(self._writable)
        os.set_inheritable(self._worker.fileno(), False)
        tell_of_secrets(lambda value: self._ask("secret", value))

    def to(self, log: str) -> None:
        """Write what is printed from here on to this log."""
        self._ask("log", log, answered=True)

    def written(self) -> None:
        """Return when all that was printed is in the log."""
        self._ask("written", "", answered=True)

    def _ask(self, what: str, value: str, *, answered: bool = False) -> None:
        with self._lock, suppress(OSError, EOFError):  # without its guard, this process ends
            self._worker.send((what, value))
            if answered:
                self._worker.recv()

    # the guard

    @property
    def descriptors(self) -> list[int]:
        """What the guard waits for."""
        return [descriptor for descriptor in (self._readable, self._guard.fileno()) if descriptor >= 0]

    def guard(self) -> None:
        """Begin as the guard."""
        os.close(self._writable)
        self._worker.close()
        os.set_blocking(self._readable, False)

    def forward(self) -> None:
        """Do what the worker asked for, then write what it printed. In this order: a secret is told before it is
        printed."""
        with suppress(OSError, EOFError):
            while self._guard.poll():
                what, value = self._guard.recv()
                if what == "secret":
                    revealed(value)
                    continue
                self._forward_all()
                if what == "log":
                    with suppress(OSError):  # then it goes on in the log before
                        self._open(value)
                self._guard.send(None)
        self._forward_piece()

    def end(self) -> None:
        """Write what is left, when the worker and all that it started are gone."""
        self.forward()
        self._forward_all()

    def _forward_all(self) -> None:
        """All that is in the pipe now; what is printed meanwhile is for later, or an endless writer would hold the
        worker."""
        left = struct.unpack("i", ioctl(self._readable, FIONREAD, b"\0\0\0\0"))[0]
        while left > 0 and (piece := self._forward_piece()):
            left -= piece
        self._write(self._redactor.end())

    def _forward_piece(self) -> int:
        try:
            piece = os.read(self._readable, _PIECE)
        except BlockingIOError:
            return 0
        self._write(self._redactor.feed(piece))
        return len(piece)

    def _open(self, log: str) -> None:
        before, self._log = self._log, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if before is not None:
            os.close(before)

    def _write(self, text: bytes) -> None:
        """Write to the log. A stage does not stop because its log's disk is full: what is lost is counted, and the
        log says so when there is room again."""
        if not text:
            return
        if self._lost:
            text = b"\n[%d bytes of output were lost: the log could not be written]\n" % self._lost + text
        while text:
            try:
                text = text[os.write(2 if self._log is None else self._log, text) :]
            except OSError:
                self._lost += len(text)
                return
            self._lost = 0
