"""Another process that publishes, for tests that stop or kill it.

    python catalog_worker.py STORE WHAT LEASE_SECONDS

WHAT says when it stops itself (SIGSTOP): ``staged`` before its files are at their place, ``checked`` between the check
of its lease and the manifest; ``killed`` is as ``staged`` but for SIGKILL. Prints ``stopping`` before, and at the end
whose manifest counts.
"""

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl.datastore import Catalog
from agentrl.datastore.errors import LeaseLostError
from agentrl.datastore.storage import lease
from agentrl.schemas.manifest import Ingredients, Kind, Manifest, OutputRecord


def manifest(run_id: str, fingerprint: str = "f1", stage: str = "expert", **changes: Any) -> Manifest:
    ingredients = Ingredients(scheme=1, stage=stage, uses="x", uses_version="1", config={}, seed=0, inputs={}, code={})
    return Manifest(
        fingerprint=fingerprint,
        ingredients=ingredients.model_copy(update=changes),
        outputs={"data": OutputRecord(kind=Kind.FOLDER, path="data", digest=run_id)},
        run_id=run_id,
        created_at=datetime.now(UTC),
        duration_s=1.0,
    )


def fill(catalog: Catalog, run_id: str, files: int = 3, fingerprint: str = "f1", stage: str = "expert") -> Path:
    """A staged attempt whose files all say who wrote them."""
    folder = catalog.staging(stage, fingerprint)
    (folder / "data").mkdir()
    for number in range(files):
        (folder / f"data/{number}.txt").write_text(run_id)
    return folder


def started(store: str, what: str, lease_s: float = 1.5) -> "subprocess.Popen[str]":
    """A worker that has stopped or killed itself."""
    command = [sys.executable, __file__, store, what, str(lease_s)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    assert process.stdout
    assert process.stdout.readline() == "stopping\n"
    return process


def stop(number: signal.Signals) -> None:
    print("stopping", flush=True)
    os.kill(os.getpid(), number)


def main() -> None:
    store, what, seconds = sys.argv[1:4]
    lease.LEASE_SECONDS = float(seconds)
    catalog = Catalog(store)
    with catalog.lock("expert", "f1") as check:
        folder = fill(catalog, "worker")
        if what == "staged":
            stop(signal.SIGSTOP)
        if what == "killed":
            stop(signal.SIGKILL)

        def checked() -> None:
            check()
            if what == "checked":
                stop(signal.SIGSTOP)

        try:
            print(catalog.publish(manifest("worker"), folder, check=checked).run_id, flush=True)
        except LeaseLostError:
            print("lost", flush=True)


if __name__ == "__main__":
    main()
