"""One holder at a time, among processes. Locally a file lock, which the system drops when its holder dies. On S3 a
lease: an object created with ``If-None-Match`` and renewed while it is held; a lease that is no longer renewed runs
out, and whoever replaces it does so with ``If-Match``, so only one can."""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from datastore.errors import LockTimeoutError
from datastore.places import LocalPlace, S3Place

LEASE_SECONDS = 60.0
POLL_SECONDS = 0.2


@contextmanager
def hold(place: LocalPlace | S3Place, key: str, timeout: float = -1) -> Iterator[None]:
    """Hold the lock ``key``. ``timeout`` in seconds; negative waits for ever, zero does not wait."""
    if isinstance(place, LocalPlace):
        with _file_lock(place, key, timeout):
            yield
    else:
        with _lease(place, key, timeout):
            yield


@contextmanager
def _file_lock(place: LocalPlace, key: str, timeout: float) -> Iterator[None]:
    from filelock import FileLock, Timeout

    path = place.root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=timeout):
            yield
    except Timeout:
        raise LockTimeoutError(f"{path} is held by another process; wait for it, or stop it") from None


@contextmanager
def _lease(place: S3Place, key: str, timeout: float) -> Iterator[None]:
    owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    deadline = None if timeout < 0 else time.monotonic() + timeout
    while (tag := _acquire(place, key, owner)) is None:
        if deadline is not None and time.monotonic() >= deadline:
            raise LockTimeoutError(f"{place.uri}/{key} is held by another process; wait for it, or stop it")
        time.sleep(POLL_SECONDS)
    stop = threading.Event()
    state = {"tag": tag}

    def renew() -> None:
        while not stop.wait(LEASE_SECONDS / 3):
            renewed = _put(place, key, owner, state["tag"])
            if renewed is None:  # lost, for instance after a long pause of this machine
                return
            state["tag"] = renewed

    thread = threading.Thread(target=renew, daemon=True, name=f"lease {key}")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if (held := place.read(key)) and json.loads(held)["owner"] == owner:
            place.delete(key)


def _acquire(place: S3Place, key: str, owner: str) -> str | None:
    """The lease's tag when it is ours now, else None."""
    import obstore

    if created := _put(place, key, owner, None):
        return created
    try:
        found = obstore.get(place._store, key)
        expires = json.loads(bytes(found.bytes()))["expires"]
    except (FileNotFoundError, obstore.exceptions.NotFoundError):
        return None
    if expires > time.time():
        return None
    return _put(place, key, owner, found.meta["e_tag"])


def _put(place: S3Place, key: str, owner: str, replaces: str | None) -> str | None:
    """Write the lease, as new or in place of the one with tag ``replaces``; None where someone was faster."""
    import obstore

    body = json.dumps({"owner": owner, "expires": time.time() + LEASE_SECONDS}).encode()
    try:
        mode = "create" if replaces is None else {"e_tag": replaces}
        return obstore.put(place._store, key, body, mode=mode)["e_tag"]  # type: ignore[arg-type]
    except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError, FileNotFoundError):
        return None
