"""What grows with the data and what must not: memory and time at 200,000 rows of a hundred million tokens.

    python benchmarks/scale.py                 200,000 trajectories, about 100 M tokens
    SCALE=small python benchmarks/scale.py     under a minute
    CHECK=1 ...                                exit code 1 if a target is missed

Each line is a figure, its target and `met` or `MISSED`.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import scale_training

missed: list[str] = []


def report(what: str, figure: str, target: str = "", met: bool | None = None) -> None:
    """Print one line, and remember it if its target is missed."""
    verdict = "" if met is None else ("met" if met else "MISSED")
    if verdict == "MISSED":
        missed.append(what)
    print(f"{what:<72} {figure:>14}  {target:<10} {verdict}", flush=True)


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="bench-scale-"))
    small = os.environ.get("SCALE") == "small"
    try:
        report(f"load average at the start, {os.cpu_count()} cores", f"{os.getloadavg()[0]:.1f}")
        scale_training.measure(folder, small, report)
        report("load average at the end", f"{os.getloadavg()[0]:.1f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(missed) and os.environ.get("CHECK") == "1")


if __name__ == "__main__":
    sys.exit(main())
