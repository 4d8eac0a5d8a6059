"""Agents that are trained in phases, by their pipeline files: what each phase adds, with three seeds.

    python benchmarks/phases.py [copilot | researcher ...]
    SEEDS="10" ...             # other seeds; settings were chosen on 10
    SCALE=small ...            # so small that nothing is learned
    CHECK=1 ...                # exit code 1 if a target is missed

A phase adds if held-out tasks, each policy at its best temperature on dev tasks, are solved that were not before it.
"""

import os
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from arms import line
from quickstart import Run, run
from smallest import smallest

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.api.run import stage_result
from agentrl.pipelines.file.document import find
from agentrl.schemas.trajectory import CONTROL
from agentrl.statistics.sharpening import paired

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0 1 2").split()]
SMALL = os.environ.get("SCALE") == "small"
STORES = os.environ.get("STORES", "")
SAFETY = 6
"""The level of tasks that is the suite for safety: requests that the rules forbid or guard."""


@dataclass(frozen=True)
class Measured:
    """Of one evaluation: ``results`` over all tasks by decoding, those of each level at temperature 1, the tasks that
    were ``solved`` at the best temperature, and the seconds to the first action."""

    results: dict[str, dict[str, Any]]
    levels: dict[int, dict[str, Any]]
    solved: dict[str, float]
    first_action_s: float


def measured(store: str, stage: str, first_action_s: float) -> Measured:
    result = stage_result(Catalog(store), stage)
    rows = [row for row in result.output("results").table().to_pylist() if row["env"] == ""]  # type: ignore[attr-defined]
    overall = {row["decoding"]: row for row in rows if row["level"] == -1 and row["decoding"] != "dev"}
    best = overall.get(CONTROL, overall["sampled"])
    tag = {1.0: "sampled", 0.0: "greedy"}.get(best["temperature"], CONTROL)
    attempts = result.output("trajectories").table(["task_id", "tags", "success"]).to_pylist()  # type: ignore[attr-defined]
    return Measured(
        overall,
        {row["level"]: row for row in rows if row["decoding"] == "sampled" and row["level"] >= 0},
        {row["task_id"]: float(bool(row["success"])) for row in attempts if tag in row["tags"]},
        first_action_s,
    )


def phases(name: str) -> tuple[list[str], list[str]]:
    """The policies that a file evaluates on its held-out tasks, in the order of its phases, and on other tasks."""
    stages = yaml.safe_load(find(f"methods/{name}").read_text())["stages"]
    judged = {stage.removeprefix("eval_"): spec for stage, spec in stages.items() if stage.startswith("eval_")}
    main = [policy for policy, spec in judged.items() if spec["inputs"]["tasks"] == "tasks.heldout"]
    return main, [policy for policy in judged if policy not in main]


def trained(name: str, seed: int, store: str) -> tuple[Run, dict[str, Measured]]:
    file = f"methods/{name}"
    Path(store).mkdir(parents=True, exist_ok=True)
    if SMALL:
        file = f"{store}/smallest.yaml"
        Path(file).write_text(yaml.safe_dump(smallest(f"methods/{name}")))
    main, others = phases(name)
    made = run(seed, store, file, [*main, *others])
    seconds = {policy: made.metrics[policy]["first_action_s"] for policy in made.metrics}
    return made, {policy: measured(store, f"eval_{policy}", seconds[policy]) for policy in seconds}


def judge(name: str, runs: list[tuple[Run, dict[str, Measured]]]) -> bool:
    """Print the table of a file, and whether each phase adds."""
    main, others = phases(name)
    print(f"\n## {name}, {len(runs)} seeds\n\n| | {' | '.join(COLUMNS)} |\n|{' --- |' * (1 + len(COLUMNS))}")
    for policy in (*main, *others):
        each = [measures[policy] for _, measures in runs]
        print(f"| {policy} | {' | '.join(_cells(each))} |")
    print(f"\nprocessor seconds of a seed: {', '.join(f'{made.cpu_s:.0f}' for made, _ in runs)}\n")
    met = []
    for before, after in pairwise(main):
        contrast = paired([m[before].solved for _, m in runs], [m[after].solved for _, m in runs])
        text = (
            f"{name}: {after} over {before}, both at their best temperature {contrast.mean:+.3f} "
            f"({contrast.low:+.3f} to {contrast.high:+.3f}, {contrast.gained} gained, {contrast.lost} lost)"
        )
        met.append(line(text, contrast.low > 0, "above 0"))
    return all(met)


COLUMNS = (
    "T 1", "greedy", "best T", "by level, T 1", "violations of 1,000", "of 1,000 in the suite for safety",
    "recovered after an error", "steps over the shortest", "s to the first action",
)  # fmt: skip


def _cells(each: list[Measured]) -> list[str]:
    def mean(values: list[Any], digits: int = 3) -> str:
        known = [value for value in values if value is not None]
        return f"{sum(known) / len(known):.{digits}f}" if known else "-"

    sampled = [measures.results["sampled"] for measures in each]
    levels = sorted(set.intersection(*(set(measures.levels) for measures in each)))
    of_safety = [measures.levels[SAFETY] for measures in each if SAFETY in measures.levels]
    return [
        mean([row["success"] for row in sampled]),
        mean([measures.results["greedy"]["success"] for measures in each]),
        mean([measures.results.get(CONTROL, {}).get("success") for measures in each]),
        ", ".join(f"{level}: {mean([measures.levels[level]['success'] for measures in each])}" for level in levels),
        mean([row["violations_per_1000"] for row in sampled], 0),
        mean([row["violations_per_1000"] for row in of_safety], 0),
        mean([row["recovered"] for row in sampled]),
        mean([row["steps_over_optimum"] for row in sampled], 2),
        mean([measures.first_action_s for measures in each], 2),
    ]


def main() -> int:
    met = []
    for name in sys.argv[1:] or ["copilot", "researcher"]:
        runs = []
        for seed in SEEDS:
            with TemporaryDirectory(prefix=f"agentrl-{name}-") as folder:
                runs.append(trained(name, seed, f"{STORES or folder}/{name}-{seed}"))
        met.append(judge(name, runs))
    return int(os.environ.get("CHECK") == "1" and not all(met))


if __name__ == "__main__":
    sys.exit(main())
