"""The Prefect server of one run, if the user has none: a child on loopback whose output goes to a log file.

Prefect can start such a server by itself, but then its notices and the traces of its end reach the terminal.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from agentrl.schemas.installation import python_path

START_TIMEOUT_S = 120.0

LOCK = "start.lock"

"""The folder of our packages. It comes first when the server starts, so that no module of the user's shadows ours."""

WAITS, STARTS = "waits for another run that starts Prefect", "starts"
"""Lines of the server's log, which :meth:`PrefectServer.wait` looks for."""

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_TASKS_DEFAULT_NO_CACHE": "true",
}
"""Set before Prefect is imported, if the user has not set them."""


class PrefectServerError(RuntimeError):
    """The server did not start. The message names its log."""


def prepare() -> None:
    """Set what Prefect reads from the environment when it is imported; what the user has set stays."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def users_server() -> bool:
    """Whether the user has named a Prefect server, by environment or by their active Prefect profile."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    home = Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect"))
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    if not profiles.is_file():
        return False
    known = tomllib.loads(profiles.read_text())
    active = os.environ.get("PREFECT_PROFILE", known.get("active", ""))
    return bool(known.get("profiles", {}).get(active, {}).get("PREFECT_API_URL"))


def unreachable() -> str:
    """Why the server that the user has named cannot be used; empty if it answers."""
    prepare()
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        error = client.api_healthcheck()
        return f"the Prefect server at {client.api_url} does not answer: {error}" if error else ""


class PrefectServer:
    """A server that is starting. It ends when :meth:`stop` is called, and when this process dies in any way."""

    def __init__(self, log: Path) -> None:
        self.home = Path(os.environ["PREFECT_HOME"])
        self.log = log
        self.home.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        alive_read, self._alive = os.pipe()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentrl.flows.server", str(self.port), str(alive_read), str(self.home)],
                pass_fds=[alive_read],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
        os.close(alive_read)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def wait(self, say: Callable[[str], None]) -> None:
        """Wait until the server answers. Raises PrefectServerError if it dies or does not answer in time.

        Runs on one store start Prefect one after the other. If this one waits for its turn, ``say`` is called with a
        text, and the wait does not count as time.
        """
        from urllib.error import URLError
        from urllib.request import urlopen

        deadline, announced = time.monotonic() + START_TIMEOUT_S, False
        while time.monotonic() < deadline:
            if not announced and (announced := self._waits()):
                say(f"{WAITS} on this store (lock {self.home / LOCK})")
            if announced and self._waits():
                deadline = time.monotonic() + START_TIMEOUT_S
            if self._process.poll() is not None:
                raise PrefectServerError(
                    f"the Prefect server ended at its start (exit code {self._process.returncode}); "
                    f"see {self.log}, or run with --no-prefect"
                )
            with contextlib.suppress(URLError, OSError), urlopen(f"{self.url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.05)
        raise PrefectServerError(f"the Prefect server did not answer within {START_TIMEOUT_S:.0f} s; see {self.log}")

    def _waits(self) -> bool:
        text = self.log.read_text(errors="replace")
        return WAITS in text and STARTS not in text.splitlines()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):
            os.close(self._alive)


@contextlib.contextmanager
def serving(home: Path, log: Path) -> Iterator[PrefectServer | None]:
    """A server for this run, already starting, or None if the user has one of their own."""
    prepare()
    if users_server():
        yield None
        return
    os.environ.setdefault("PREFECT_HOME", str(home.absolute()))
    server = PrefectServer(log)
    os.environ["PREFECT_API_URL"] = server.url
    try:
        yield server
    finally:
        del os.environ["PREFECT_API_URL"]
        server.stop()


def main() -> None:
    port, alive, home = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

    def watch() -> None:
        os.read(alive, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    # marks a server without the services that schedule and clean up, which one run does not need
    os.environ.update(PREFECT__SERVER_EPHEMERAL="1", PREFECT__SERVER_FINAL="1", PREFECT_UI_ENABLED="0")
    os.environ.pop("PREFECT_API_URL", None)
    os.chdir(home)  # the name of a folder may hold what means something in a URL, so the URL does not hold it
    os.environ.setdefault("PREFECT_SERVER_DATABASE_CONNECTION_URL", "sqlite+aiosqlite:///prefect.db")
    import uvicorn
    from prefect.server.api.server import create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Two runs must not migrate one database at once."""
            with _turn(home):
                await super().startup(sockets)

    Server(uvicorn.Config(create_app(), host="127.0.0.1", port=port, log_level="error", lifespan="on")).run()


@contextlib.contextmanager
def _turn(home: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(home / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(WAITS, flush=True)
        lock.acquire()
    print(STARTS, flush=True)
    try:
        yield
    finally:
        lock.release()


if __name__ == "__main__":
    main()
