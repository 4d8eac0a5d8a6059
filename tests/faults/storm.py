"""One storm: a store, a cast that works on it, chaos for a while, and a verdict.

    python storm.py local|s3 SEED SECONDS

prints what happened, as JSON; with faults the exit code is 1.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos import HERE, Troupe, environment, rage, survivors
from diary import ROWS, entries
from mishaps import VARIABLE

PACE = {"local": 1.0, "s3": 2.5}
"""Actors take longer on S3, and shall come to the end of what they do now and then."""


@dataclass
class Storm:
    """What a storm did and what it found. ``rows`` are those that were acknowledged."""

    place: str
    seed: int
    seconds: float
    kills: int
    stops: int
    terms: int
    line_faults: int
    starts: int
    rows: int
    reads: int
    compactions: int
    vacuumed_files: int
    runs: int
    errors: dict[str, int]
    peak_mib: int
    faults: list[str]


def storm(path: str, seed: int, seconds: float, folder: Path) -> Storm:
    """Let a storm rage for ``seconds`` over a new store under ``folder``."""
    start = time.monotonic()
    with _store(path, seed, folder) as (store, calm, rough, line_faults):
        troupe = Troupe(path, store, folder, seed, environment(folder, rough))
        rage(troupe, seconds, PACE[path])
        left = survivors(folder, patience_s=10)
        faults = [f"process {process.pid} outlives the storm: {' '.join(process.cmdline())[:200]}" for process in left]
        for process in left:
            process.kill()
        faults += _verdict(troupe, environment(folder, calm))
    diary = list(entries(troupe.diaries))
    faults += [f"{entry['actor']}: {entry['text']}" for entry in diary if entry["what"] in ("violation", "crash")]
    done = Counter(entry["what"] for entry in diary)
    return Storm(
        place=path,
        seed=seed,
        seconds=round(time.monotonic() - start),
        kills=troupe.counts["SIGKILL"],
        stops=troupe.counts["SIGSTOP"],
        terms=troupe.counts["SIGTERM"],
        line_faults=sum(line_faults.values()),
        starts=troupe.counts["started"],
        rows=ROWS * len({entry["shard"] for entry in diary if entry["what"] == "acknowledged"}),
        reads=done["read"],
        compactions=sum(
            entry["what"] == "compacted" and entry["files_before"] > entry["files_after"] for entry in diary
        ),
        vacuumed_files=sum(entry["files"] for entry in diary if entry["what"] == "vacuumed"),
        runs=troupe.generation,
        errors=dict(
            Counter(f"{entry['actor'].split('-')[0]} {entry['type']}" for entry in diary if entry["what"] == "error")
        ),
        peak_mib=max((entry["peak_mib"] for entry in diary if entry["what"] == "compacted"), default=0),
        faults=faults,
    )


def _verdict(troupe: Troupe, env: dict[str, str]) -> list[str]:
    command = [str(HERE / "verdict.py"), troupe.store, str(troupe.folder / "plain"), str(troupe.diaries)]
    done = subprocess.run(
        [sys.executable, *command, str(troupe.generation)],
        cwd=troupe.folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    faults = [json.loads(line) for line in done.stdout.splitlines()]
    return faults + ([f"no verdict: {done.stderr[-3000:]}"] if done.returncode else [])


@contextmanager
def _store(path: str, seed: int, folder: Path) -> Iterator[tuple[str, dict[str, str], dict[str, str], Counter[str]]]:
    """The store's name, the environment to see it undisturbed, the one for the storm, and faults of the line."""
    rough = {VARIABLE: str(seed)}
    if path == "local":
        yield str(folder / "store"), {}, rough, Counter()
        return
    with socket.socket() as listener, socket.socket() as two:
        listener.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = listener.getsockname()[1], two.getsockname()[1]
    command = [sys.executable, str(HERE / "s3_server.py"), *map(str, ports), str(seed)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=(folder / "s3.log").open("wb"))
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    calm, rough_line = (keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"} for port in ports)
    line_faults: Counter[str] = Counter()
    try:
        _create_bucket(calm["AWS_ENDPOINT_URL"], keys)
        yield "s3://bucket/store", calm, rough | rough_line, line_faults
    finally:
        server.send_signal(signal.SIGTERM)
        diary, _ = server.communicate(timeout=10)
        line_faults.update(json.loads(diary or b"{}"))


def _create_bucket(url: str, keys: dict[str, str]) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name=keys["AWS_REGION"],
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
    )
    for left in range(100, -1, -1):
        try:
            client.create_bucket(Bucket="bucket")
            return
        except Exception:
            if not left:
                raise
            time.sleep(0.1)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    result = storm(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), folder)
    print(json.dumps(asdict(result), indent=2))
    if result.faults or os.environ.get("KEEP"):
        print(f"kept: {folder}", file=sys.stderr)
        sys.exit(bool(result.faults))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
