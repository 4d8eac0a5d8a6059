"""The pipeline file of each task family with three seeds: held-out success after each training stage, what it gains
over the control for sharpening of the policy that it was trained from, and time.

    python benchmarks/families.py [FAMILY ...]       # writes the tables of docs/results/families.md
    SEEDS="0 1" python benchmarks/families.py shop   # other seeds; the page stays as it is
    SCALE=small python benchmarks/families.py        # the first family, so small that nothing is learned
    JOBS=3 ...                                       # seeds beside each other
    CHECK=1 ...                                      # exit code 1 if a target is missed

The seeds were chosen before any of them was run, and settings on the dev split of others (0 to 9).
"""

import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from quickstart import ALPHA, Run, run, with_outcomes
from smallest import smallest

from agentrl.pipelines.file.document import LIBRARY
from agentrl.statistics.paired import mcnemar

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/results/families.md"
FIXED = [200, 201, 202]
SMALL = os.environ.get("SCALE") == "small"
CPU_S = 180.0
"""Processor seconds of one seed, at most."""


def policies(family: str) -> dict[str, str | None]:
    """The policies that the pipeline file evaluates on held-out tasks, in the order of their training, each with the
    one of them that it was trained from."""
    stages = yaml.safe_load((LIBRARY / f"{family}.yaml").read_text())["stages"]
    names = [name.removeprefix("eval_") for name in stages if name.startswith("eval_")]
    starts = {name: stages[name]["inputs"].get("model") for name in names}
    return {name: start if start in names else None for name, start in starts.items()}


def file_of(family: str, folder: str) -> str:
    """What to run: the pipeline file of a family, or for a look at whether it runs, a small one in a folder."""
    if not SMALL:
        return family
    file = Path(folder, "smallest.yaml")
    file.write_text(yaml.safe_dump(smallest(family)))
    return str(file)


def measured(family: str, seed: int) -> Run:
    """The pipeline file of a family with one seed, in a fresh store, and the outcome of each held-out task."""
    with TemporaryDirectory(prefix=f"agentrl-{family}-") as store:
        return with_outcomes(run(seed, store, file_of(family, store), list(policies(family))), store)


def table(family: str, runs: dict[int, Run]) -> str:
    """A row for each policy: success at temperature 1 with Wilson 95 % intervals, greedily, and at its best temperature
    (the control); and a row for what each solves greedily over the control of the one that it was trained from."""
    heads = [f"seed {seed}" for seed in runs]
    lines = [f"| | {' | '.join(heads)} | mean, or all |", "| --- " * (len(runs) + 2) + "|"]
    for policy, before in policies(family).items():
        matches = [made.metrics[policy] for made in runs.values()]
        cells = [
            f"{m['success']:.3f} ({m['success_low']:.3f} to {m['success_high']:.3f}), greedy {m['greedy']:.3f}, "
            f"control {m['control']:.3f} at {m['control_temperature']:g}"
            for m in matches
        ]
        means = [statistics.mean(m[key] for m in matches) for key in ("success", "greedy", "control")]
        lines.append(
            f"| {policy} | {' | '.join(cells)} | {means[0]:.3f}, greedy {means[1]:.3f}, control {means[2]:.3f} |"
        )
        if before:
            counts = [made.over_control(before, policy) for made in runs.values()]
            cells = [f"+{gained} -{lost}, p {p:.2g}" for gained, lost, p in [*counts, pooled(runs, before, policy)]]
            lines.append(f"| {policy} over the control of {before} | {' | '.join(cells)} |")
    seconds = [made.cpu_s for made in runs.values()]
    cells = [f"{item:.0f}" for item in [*seconds, statistics.mean(seconds)]]
    return "\n".join([*lines, f"| processor seconds | {' | '.join(cells)} |"])


def pooled(runs: dict[int, Run], before: str, after: str) -> tuple[int, int, float]:
    """Held-out tasks of all seeds that a policy gained and lost, greedily, over the control of another; McNemar's p."""
    counts = [made.over_control(before, after) for made in runs.values()]
    gained, lost = sum(count[0] for count in counts), sum(count[1] for count in counts)
    return gained, lost, mcnemar(gained, lost)


def verdicts(family: str, runs: dict[int, Run]) -> list[bool]:
    """Print the lines of a family; which of its targets are met."""
    matches = []
    for after, before in policies(family).items():
        if before is None:
            continue
        gained, lost, p = pooled(runs, before, after)
        figure = f"{family}: {after}, greedily, over the control of {before}: {gained} gained, {lost} lost, p {p:.2g}"
        matches.append(line(figure, gained > lost and p < ALPHA, f"more gained, p below {ALPHA}"))
    slowest = max(made.cpu_s for made in runs.values())
    return [*matches, line(f"{family}: {slowest:.0f} processor seconds", slowest <= CPU_S, f"{CPU_S:.0f} or less")]


def line(figure: str, met: bool, target: str) -> bool:
    print(f"{figure} (target {target}): {'met' if met else 'MISSED'}", flush=True)
    return met


def write(family: str, text: str) -> None:
    """Put a table between the marks of a family."""
    begin, end = f"<!-- {family}: begin -->", f"<!-- {family}: end -->"
    page = PAGE.read_text()
    PAGE.write_text(f"{page[: page.index(begin) + len(begin)]}\n{text}\n{page[page.index(end) :]}")


def main() -> int:
    marked = PAGE.read_text()
    names = sys.argv[1:] or [
        path.stem for path in sorted(LIBRARY.glob("*.yaml")) if f"<!-- {path.stem}: begin" in marked
    ]
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "").split()] or FIXED
    if SMALL:
        names, seeds = names[:1], [0]
    met = []
    for family in names:
        with ThreadPoolExecutor(int(os.environ.get("JOBS", "1"))) as pool:
            runs = dict(zip(seeds, pool.map(partial(measured, family), seeds), strict=True))
        print(f"\n{table(family, runs)}\n", flush=True)
        met += verdicts(family, runs)
        if seeds == FIXED:
            write(family, table(family, runs))
    return int(os.environ.get("CHECK") == "1" and not all(met))


if __name__ == "__main__":
    sys.exit(main())
