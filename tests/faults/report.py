"""``benchmarks/results/faults.md``: what the storms of one run did and what they found."""

import platform
from datetime import UTC, datetime
from pathlib import Path

import psutil
from storm import Storm

FILE = Path(__file__).parents[2] / "benchmarks/results/faults.md"

COLUMNS = {
    "storms": lambda them: len(them),
    "seconds": lambda them: sum(storm.seconds for storm in them),
    "kill -9": lambda them: sum(storm.kills for storm in them),
    "SIGSTOP": lambda them: sum(storm.stops for storm in them),
    "SIGTERM": lambda them: sum(storm.terms for storm in them),
    "processes": lambda them: sum(storm.starts for storm in them),
    "faults of the line": lambda them: sum(storm.line_faults for storm in them),
    "rows acknowledged": lambda them: sum(storm.rows for storm in them),
    "reads": lambda them: sum(storm.reads for storm in them),
    "compactions": lambda them: sum(storm.compactions for storm in them),
    "files vacuumed": lambda them: sum(storm.vacuumed_files for storm in them),
    "pipeline runs": lambda them: sum(storm.runs for storm in them),
    "peak of a compactor, MiB": lambda them: max(storm.peak_mib for storm in them),
    "faults found": lambda them: sum(len(storm.faults) for storm in them),
}


def text(storms: list[Storm]) -> str:
    places = list(dict.fromkeys(storm.place for storm in storms))
    seeds = [storm.seed for storm in storms]
    lines = [
        "# Storms over the store",
        "",
        f"Written by `make test-faults` on {datetime.now(UTC):%Y-%m-%d}, on {psutil.cpu_count()} cores, Python "
        f"{platform.python_version()}, seeds {min(seeds)} to {max(seeds)}.",
        "What a storm is, and what counts as a fault, is said in [the contributor's page](../../CONTRIBUTING.md).",
        "",
        "| | " + " | ".join(places) + " |",
        "|---|" + "---:|" * len(places),
    ]
    for name, count in COLUMNS.items():
        values = [count([storm for storm in storms if storm.place == position]) for position in places]
        lines.append(f"| {name} | " + " | ".join(f"{value:,.0f}" for value in values) + " |")
    refused = {error for storm in storms for error in storm.errors}
    if refused:
        lines += ["", "What actors were refused and tried again:", ""]
        for error in sorted(refused):
            lines.append(f"- {error}: {sum(storm.errors.get(error, 0) for storm in storms):,}")
    faults = [(storm, fault.strip().splitlines()[-1][:300]) for storm in storms for fault in storm.faults]
    if faults:
        lines += ["", "Faults:", "", *(f"- {item.place}, seed {item.seed}: {fault}" for item, fault in faults)]
    return "\n".join(lines) + "\n"


def write(storms: list[Storm]) -> None:
    FILE.write_text(text(storms))
