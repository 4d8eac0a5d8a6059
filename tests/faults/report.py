"""``benchmarks/results/faults.md``: what the storms of one run did and what they found."""

import platform
from datetime import UTC, datetime
from pathlib import Path

import psutil
from storm import Storm

FILE = Path(__file__).parents[2] / "benchmarks/results/faults.md"

COLUMNS = {
    "storms": lambda them: len(them),
    "seconds": lambda them: sum(one.seconds for one in them),
    "kill -9": lambda them: sum(one.kills for one in them),
    "SIGSTOP": lambda them: sum(one.stops for one in them),
    "SIGTERM": lambda them: sum(one.terms for one in them),
    "processes": lambda them: sum(one.starts for one in them),
    "faults of the line": lambda them: sum(one.line_faults for one in them),
    "rows acknowledged": lambda them: sum(one.rows for one in them),
    "reads": lambda them: sum(one.reads for one in them),
    "compactions": lambda them: sum(one.compactions for one in them),
    "files vacuumed": lambda them: sum(one.vacuumed_files for one in them),
    "pipeline runs": lambda them: sum(one.runs for one in them),
    "peak of a compactor, MiB": lambda them: max(one.peak_mib for one in them),
    "faults found": lambda them: sum(len(one.faults) for one in them),
}


def text(storms: list[Storm]) -> str:
    places = list(dict.fromkeys(one.place for one in storms))
    lines = [
        "# Storms over the store",
        "",
        f"Written by `make test-faults` on {datetime.now(UTC):%Y-%m-%d}, on {psutil.cpu_count()} cores, Python "
        f"{platform.python_version()}, seeds {min(one.seed for one in storms)} to {max(one.seed for one in storms)}.",
        "What a storm is, and what counts as a fault, is said in [the contributor's page](../../CONTRIBUTING.md).",
        "",
        "| | " + " | ".join(places) + " |",
        "|---|" + "---:|" * len(places),
    ]
    for name, count in COLUMNS.items():
        values = [count([one for one in storms if one.place == place]) for place in places]
        lines.append(f"| {name} | " + " | ".join(f"{value:,.0f}" for value in values) + " |")
    refused = {error for one in storms for error in one.errors}
    if refused:
        lines += ["", "What actors were refused and tried again:", ""]
        for error in sorted(refused):
            lines.append(f"- {error}: {sum(one.errors.get(error, 0) for one in storms):,}")
    faults = [(one, fault.strip().splitlines()[-1][:300]) for one in storms for fault in one.faults]
    if faults:
        lines += ["", "Faults:", "", *(f"- {one.place}, seed {one.seed}: {fault}" for one, fault in faults)]
    return "\n".join(lines) + "\n"


def write(storms: list[Storm]) -> None:
    FILE.write_text(text(storms))
