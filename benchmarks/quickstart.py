"""The quickstart with three seeds, each in a fresh store: held-out success after each training stage, time and memory.

make quickstart-seeds                    # writes the table of docs/quickstart.md
SEEDS="0 1 2 3 4" python benchmarks/quickstart.py
SCALE=small python benchmarks/quickstart.py      # one seed
CHECK=1 ...                              # exit code 1 if a target is missed
"""

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "quickstart.md"
BEGIN, END = "<!-- seeds: begin -->", "<!-- seeds: end -->"
POLICIES = ["warm", "star", "dpo", "grpo"]
MINUTES, GIB = 5.0, 3.0


def memory_of(process: psutil.Process) -> float:
    """Resident memory of a process and all its descendants, in GiB; shared pages count once for each."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**30


def run(seed: int, store: str) -> tuple[dict[str, dict[str, Any]], float, float]:
    """Metrics of each policy's evaluation, minutes, and peak memory in GiB."""
    command = [sys.executable, "-m", "flows.cli", "run", "quickstart", "--jobs", "2", "--store", store, "--set"]
    started, peak = time.monotonic(), 0.0
    child = psutil.Popen([*command, f"seed={seed}"], cwd=ROOT)
    while child.poll() is None:
        peak = max(peak, memory_of(child))
        time.sleep(0.2)
    minutes = (time.monotonic() - started) / 60
    if child.returncode:
        raise SystemExit(f"seed {seed}: the run failed")
    metrics = {}
    for policy in POLICIES:
        show = [sys.executable, "-m", "flows.cli", "show", f"eval_{policy}", "--store", store, "--json"]
        shown = subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True)
        metrics[policy] = json.loads(shown.stdout)["metrics"]
    return metrics, minutes, peak


def verdicts(median: dict[str, dict[str, float]], minutes: float, peak: float) -> list[tuple[str, str, bool]]:
    """(what was measured, its target, whether it was met)."""
    found = [
        (f"warm {median['warm']['success']:.3f}", "0.25 to 0.55", 0.25 <= median["warm"]["success"] <= 0.55),
        (f"final {median['grpo']['success']:.3f}", "0.90 or more", median["grpo"]["success"] >= 0.90),
        (f"slowest run {minutes:.1f} minutes", f"{MINUTES:.0f} or less", minutes <= MINUTES),
        (f"peak memory {peak:.2f} GiB", f"under {GIB:.0f}", peak < GIB),
    ]
    for before, after in pairwise(POLICIES):
        low = median[before]["success_low"]
        what = f"{after} {median[after]['success']:.3f}"
        found.append((what, f"not below {before}'s interval, {low:.3f}", median[after]["success"] >= low))
    return found


def main() -> int:
    seeds = [0] if os.environ.get("SCALE") == "small" else [int(s) for s in os.environ.get("SEEDS", "0 1 2").split()]
    results = {}
    for seed in seeds:
        with TemporaryDirectory(prefix="agentrl-quickstart-") as store:
            results[seed] = run(seed, store)
    lines = ["| seed | " + " | ".join(POLICIES) + " | minutes | peak GiB |", "| --- " * (len(POLICIES) + 3) + "|"]
    for seed, (metrics, minutes, peak) in results.items():
        cells = [
            f"{m['success']:.3f} ({m['success_low']:.3f} to {m['success_high']:.3f}), greedy {m['greedy']:.3f}"
            for m in metrics.values()
        ]
        lines.append(f"| {seed} | " + " | ".join(cells) + f" | {minutes:.1f} | {peak:.2f} |")
    median = {
        policy: {
            key: statistics.median(m[policy][key] for m, _, _ in results.values()) for key in ("success", "success_low")
        }
        for policy in POLICIES
    }
    cells = [f"**{median[policy]['success']:.3f}**" for policy in POLICIES]
    lines.append("| median | " + " | ".join(cells) + " | | |")
    checks = verdicts(median, max(r[1] for r in results.values()), max(r[2] for r in results.values()))
    table = "\n".join(lines)
    judged = "\n".join(f"- {what}; target {target}: {'met' if met else 'MISSED'}" for what, target, met in checks)
    print(f"\n{table}\n\n{judged}")
    if PAGE.exists() and len(seeds) >= 3:
        text = PAGE.read_text()
        head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        PAGE.write_text(f"{head}\n{table}\n\n{judged}\n{tail}")
    return int(os.environ.get("CHECK") == "1" and not all(met for _, _, met in checks))


if __name__ == "__main__":
    sys.exit(main())
