"""Locks among processes. Locally a lock is a file lock, which the system drops when its holder dies.

On S3 it is a lease: an object that its holder rewrites every few seconds. A waiter takes it over, by a conditional put,
after the object stayed the same for ``LEASE_SECONDS`` of the waiter's own monotonic clock, so no two clocks are
compared. If a holder was stopped for so long, the check that :func:`hold` yields tells it, because its own conditional
put is refused. If a holder died on this machine, it is replaced at once, because its file lock
(:mod:`agentrl.datastore.storage.ownership`) is free.

A file goes when its lock is released: whoever opened it before sees that it has no name any more, and begins again. An
object stays, so that every change is a conditional put; :func:`tidy` removes those that nobody has touched for long.
"""

import json
import os
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from agentrl.datastore.errors import LeaseLostError, LockTimeoutError
from agentrl.datastore.storage import ownership as owners
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage, make_folder

if TYPE_CHECKING:
    from filelock import BaseFileLock

LEASE_SECONDS = 60.0
POLL_SECONDS = 0.2
QUIET_SECONDS = 5.0
"""After this many seconds of waiting, a warning says for what."""

UNUSED = timedelta(hours=1)
"""A lease that was not renewed for so long is nobody's: all who wanted it could have taken it over."""

_seen: dict[str, tuple[str, float]] = {}
"""Leases of others that this process waits for, or waited for: their tags, and since when they are the same."""

Check = Callable[[], None]
"""Raises LeaseLostError if the lock is not held any more; on S3 that costs one conditional put."""


@contextmanager
def hold(storage: LocalStorage | S3Storage, key: str, timeout: float = -1) -> Iterator[Check]:
    """Hold the lock ``key`` and yield the check that it is still held.

    ``timeout`` in seconds; negative waits for ever, with a warning after :data:`QUIET_SECONDS`; zero does not wait.
    Raises LockTimeoutError when the time is over.
    """
    with ExitStack() as stack:
        if timeout < 0:
            try:
                check = stack.enter_context(_held(storage, key, QUIET_SECONDS))
            except LockTimeoutError as error:
                warnings.warn(f"waiting: {error}", stacklevel=3)
                check = stack.enter_context(_held(storage, key, timeout))
        else:
            check = stack.enter_context(_held(storage, key, timeout))
        yield check


@contextmanager
def _held(storage: LocalStorage | S3Storage, key: str, timeout: float) -> Iterator[Check]:
    if isinstance(storage, LocalStorage):
        lock = _file_lock(storage, key, timeout)
        try:
            yield _always
        finally:
            (storage.root / key).unlink(missing_ok=True)  # while it is held
            lock.release()
    else:
        lease = _Lease(storage, key)
        lease.acquire(timeout)
        try:
            yield lease.renew
        finally:
            lease.release()


def _always() -> None:
    """A file lock is never lost while its holder lives."""


def _file_lock(storage: LocalStorage, key: str, timeout: float) -> "BaseFileLock":
    """The lock, acquired."""
    from filelock import FileLock, Timeout

    path = storage.root / key
    make_folder(path.parent)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        raise LockTimeoutError(f"{path} is held by another process; wait for it, or stop it") from None
    return lock


class _Lease:
    """One lease of this process."""

    def __init__(self, storage: S3Storage, key: str) -> None:
        self._storage, self._key = storage, key
        self._tag: str | None = None
        self._lost = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True, name=f"lease {key}")
        self._holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "owner": owners.me(storage.working_folder()),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),  # for people to read; the code does not use it
        }

    def acquire(self, timeout: float) -> None:
        deadline = None if timeout < 0 else time.monotonic() + timeout
        while True:
            looked = time.monotonic()
            lease = self._storage.tagged(self._key)
            if lease is None:
                free, tag, holder = True, None, {}
            else:
                tag, holder = lease[1], _holder(lease[0])
                free = (
                    not holder
                    or _died_here(self._storage, holder)
                    or looked - self._unchanged_since(tag) >= LEASE_SECONDS
                )
            if free and (taken := self._put(self._holder, tag)):
                self._tag = taken
                self._thread.start()
                return
            if deadline is not None and time.monotonic() >= deadline:
                held_by = f"{holder.get('host')}, process {holder.get('pid')}, since {holder.get('since')}"
                raise LockTimeoutError(f"{self._storage.uri}/{self._key} is held by {held_by}; wait for it, or stop it")
            time.sleep(POLL_SECONDS)

    def _unchanged_since(self, tag: str) -> float:
        """When this process saw the lease for the first time as it is now, on the monotonic clock."""
        name = f"{self._storage.uri}/{self._key}"
        if _seen.get(name, ("", 0.0))[0] != tag:
            _seen[name] = (tag, time.monotonic())
        return _seen[name][1]

    def renew(self) -> None:
        """Renew the lease. Raises LeaseLostError if it is not ours any more."""
        with self._lock:
            if not self._lost:
                taken = self._put(self._holder, self._tag)
                self._lost, self._tag = taken is None, taken or self._tag
            if self._lost:
                raise LeaseLostError(
                    f"{self._storage.uri}/{self._key} was taken over by another process, because this one did not "
                    f"renew it for {LEASE_SECONDS:.0f} s (it was stopped, or cut off from the store)"
                )

    def _keep(self) -> None:
        while not self._stop.wait(LEASE_SECONDS / 3):
            try:
                self.renew()
            except LeaseLostError as error:
                warnings.warn(str(error), stacklevel=1)
                return
            except Exception as error:  # the store may be back before the lease runs out
                warnings.warn(f"{self._storage.uri}/{self._key} could not be renewed: {error}", stacklevel=1)

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        if not self._lost:
            try:
                self._put({}, self._tag)
            except Exception as error:
                warnings.warn(
                    f"{self._storage.uri}/{self._key} could not be released ({error}); "
                    f"others wait {LEASE_SECONDS:.0f} s",
                    stacklevel=1,
                )

    def _put(self, holder: dict[str, Any], tag: str | None) -> str | None:
        return self._storage.put_if(self._key, _body(holder), tag)


def tidy(storage: LocalStorage | S3Storage) -> None:
    """Remove what locks leave behind: files of killed holders, and leases that nobody has touched for :data:`UNUSED`.
    Leases of processes that died on this machine are released. The caller holds a lock, so that on S3 the newest one
    tells the time."""
    if isinstance(storage, LocalStorage):
        for name in storage.children("locks")[1]:
            with suppress(LockTimeoutError), _held(storage, f"locks/{name}", 0):
                pass
        return
    leases = dict(storage.listing("locks"))
    for key, changed in leases.items():
        if max(leases.values()) - changed > UNUSED:
            storage.delete(key)
        elif (lease := storage.tagged(key)) and _died_here(storage, _holder(lease[0])):
            storage.put_if(key, _body({}), lease[1])


def _body(holder: dict[str, Any]) -> bytes:
    return json.dumps({**holder, "beat": uuid.uuid4().hex}).encode()  # each version has a tag of its own


def _died_here(storage: S3Storage, holder: dict[str, Any]) -> bool:
    if holder.get("host") != socket.gethostname():
        return False
    return owners.state(storage.working_folder(), str(holder.get("owner"))) is owners.Owner.DEAD


def _holder(body: bytes) -> dict[str, Any]:
    """Who holds a lease; empty if it was released. A lease whose body cannot be read counts as held until it is old."""
    try:
        holder = json.loads(body)
    except ValueError:
        return {"host": "unknown"}
    if not isinstance(holder, dict):
        return {"host": "unknown"}
    return {name: value for name, value in holder.items() if name != "beat"}
