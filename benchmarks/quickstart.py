"""The quickstart with twenty seeds, each in a fresh store: what each stage learns, and whether it is more than
sharpening.

make quickstart-seeds                            # writes benchmarks/results/quickstart.md, after each seed
SEEDS="0 1 2" python benchmarks/quickstart.py
SCALE=small python benchmarks/quickstart.py      # one seed
JOBS=2 ...                                       # seeds beside each other; seconds by the clock then say little
CHECK=1 ...                                      # exit code 1 if a target is missed

The seeds, 100 to 119, were written down before any of them was run, and settings were chosen on dev and compositional
tasks of seeds 0 to 15.

A stage adds something if its policy, greedy, solves more held-out tasks than its predecessor does at the best
temperature, which was chosen on dev tasks: that is the control for sharpening. The test is McNemar's, paired and exact.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow.parquet as pq

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "results" / "quickstart.md"
PICTURE = ROOT / "docs" / "images" / "quickstart.svg"
FIXED = list(range(100, 120))
POLICIES = ["warm", "star", "grpo"]
EVALUATIONS = [*POLICIES, "compositional_warm", "compositional"]
MOST_AFTER_WARM, LEAST_AT_END, LEAST_SEEDS, ALPHA = 0.35, 0.90, 15, 0.05
CPU_S, WALL_S, GIB = 90.0, 60.0, 3.0
IDLE = 0.2
"""Cores that others may use, if seconds by the clock are to count."""

Outcomes = Mapping[str, bool]


@dataclass(frozen=True)
class Run:
    """Metrics of each evaluation, seconds of the whole command by the clock and of all its processes, peak GiB, and
    cores that others used meanwhile. ``greedy`` and ``control`` are outcomes by policy and task, ``words`` the share of
    greedy tries of the last policy in which a word was taken for the right relation."""

    metrics: dict[str, dict[str, Any]]
    wall_s: float
    cpu_s: float
    gib: float
    others: float = 0.0
    greedy: dict[str, Outcomes] = field(default_factory=dict)
    control: dict[str, Outcomes] = field(default_factory=dict)
    words: dict[str, float] = field(default_factory=dict)

    def over_control(self, before: str, after: str) -> tuple[int, int, float]:
        """Tasks that ``after`` gained and lost, greedy, over the control of ``before``, and McNemar's p."""
        from agentrl.statistics.paired import mcnemar

        old, new = self.control[before], self.greedy[after]
        if old.keys() != new.keys():
            raise SystemExit(f"{before} and {after} were measured on different tasks")
        gained, lost = sum(new[task] > old[task] for task in old), sum(new[task] < old[task] for task in old)
        return gained, lost, mcnemar(gained, lost)


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory_of(process: psutil.Process) -> float:
    """Resident memory of a process and all its descendants, in GiB; shared pages count once for each."""
    total = 0
    for item in descendants(process):
        try:
            total += item.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**30


def busy() -> float:
    """Processor seconds that all programs of this machine have used."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def run(
    seed: int, store: str, pipeline: str = "quickstart", policies: Sequence[str] = EVALUATIONS, more: Sequence[str] = ()
) -> Run:
    """One run of a pipeline file, with ``more`` options, and the metrics of the evaluation of each of its
    ``policies``."""
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", pipeline, "--jobs", "2", "--store", store, *more]
    started, before, peak = time.monotonic(), busy(), 0.0
    log = Path(store).with_suffix(".log")
    with log.open("w") as out:
        child = psutil.Popen([*command, "--set", f"seed={seed}"], cwd=ROOT, stdout=out, stderr=out)
        while (ended := os.wait4(child.pid, os.WNOHANG))[0] == 0:
            peak = max(peak, memory_of(child))
            time.sleep(0.2)
    wall, used = time.monotonic() - started, ended[2]
    cpu = used.ru_utime + used.ru_stime
    others = max(0.0, busy() - before - cpu) / wall
    if ended[1]:
        raise SystemExit(f"{pipeline}, seed {seed}: the run failed\n{log.read_text()[-2000:]}")
    metrics = {}
    for policy in policies:
        show = [sys.executable, "-m", "agentrl.flows.cli", "show", f"eval_{policy}", "--store", store, "--json"]
        shown = subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True)
        metrics[policy] = json.loads(shown.stdout)["metrics"]
    return Run(metrics, wall, cpu, peak, others)


def with_outcomes(made: Run, folder: str) -> Run:
    """A run with the outcomes of its policies on held-out tasks, from its store."""
    import agentrl

    rows = agentrl.Store(folder).sql(
        "select stage, task_id, tags, success from trajectories where stage like 'eval_%'"
    ).to_dicts()  # fmt: skip
    for policy, measured in made.metrics.items():
        chosen = {0.0: "greedy", 1.0: "sampled"}.get(measured.get("control_temperature", 0.0), "control")
        ours = [row for row in rows if row["stage"] == f"eval_{policy}" and "dev" not in row["tags"]]
        for result, tag in ((made.greedy, "greedy"), (made.control, chosen)):
            result[policy] = {row["task_id"]: bool(row["success"]) for row in ours if tag in row["tags"]}
    return made


def learned(seed: int) -> Run:
    """The quickstart with one seed, and the outcome of each held-out task."""
    with TemporaryDirectory(prefix="agentrl-quickstart-") as folder:
        made = with_outcomes(run(seed, f"{folder}/store"), f"{folder}/store")
        [artifact] = Path(folder).glob("store/artifacts/tags/**/table.parquet")
        for row in pq.read_table(artifact).to_pylist():
            if (row["policy"], row["decoding"], row["split"]) == (POLICIES[-1], "greedy", "heldout"):
                made.words[row["tag"]] = row["share_reached"]
    return made


def verdicts(runs: dict[int, Run]) -> list[tuple[str, str, bool]]:
    """(what was measured, its target, whether it was met)."""
    matches = []
    for where, first, last in (("held-out", "warm", "grpo"), ("compositional", *EVALUATIONS[-2:])):
        warm = max(runs, key=lambda seed: runs[seed].metrics[first]["greedy"])
        end = min(runs, key=lambda seed: runs[seed].metrics[last]["greedy"])
        high, low = runs[warm].metrics[first]["greedy"], runs[end].metrics[last]["greedy"]
        matches += [
            (
                f"{where}, greedy after the warm start: {high:.3f} at most (seed {warm})",
                f"{MOST_AFTER_WARM} at most on each seed",
                high <= MOST_AFTER_WARM,
            ),
            (
                f"{where}, greedy at the end: {low:.3f} at least (seed {end})",
                f"{LEAST_AT_END:.2f} or more on each seed",
                low >= LEAST_AT_END,
            ),
        ]
    needed = -(-LEAST_SEEDS * len(runs) // len(FIXED))
    for before, after in pairwise(POLICIES):
        adds = sum(gains(run, before, after) for run in runs.values())
        text = f"{after} adds over the control of {before} on {adds} of {len(runs)} seeds"
        matches.append((text, f"{needed} or more", adds >= needed))
    cpu, peak = max(run.cpu_s for run in runs.values()), max(run.gib for run in runs.values())
    matches += [
        (f"most processor seconds: {cpu:.0f}", f"under {CPU_S:.0f}", cpu < CPU_S),
        (f"peak memory {peak:.2f} GiB", f"under {GIB:.0f}", peak < GIB),
    ]
    idle = [run.wall_s for run in runs.values() if run.others < IDLE]
    text = (
        f"slowest run with two idle cores: {max(idle):.0f} s, of {len(idle)}" if idle else "no run had two idle cores"
    )
    return [*matches, (text, f"under {WALL_S:.0f} s by the clock", bool(idle) and max(idle) < WALL_S)]


def gains(run: Run, before: str, after: str) -> bool:
    gained, lost, p = run.over_control(before, after)
    return gained > lost and p < ALPHA


def table(runs: dict[int, Run]) -> str:
    """Each seed: success greedy, the control of each policy that has a successor, and what came next over it."""
    heads = [f"{policy}{what}" for policy in POLICIES[:-1] for what in ("", ", control")] + [POLICIES[-1]]
    heads += ["compositional warm", "compositional grpo", "hardest word", "s", "CPU s", "GiB"]
    lines = [f"| seed | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for seed, run in runs.items():
        cells = []
        for number, policy in enumerate(POLICIES):
            m = run.metrics[policy]
            own = f"{m['greedy']:.3f}"
            if number:
                gained, lost, p = run.over_control(POLICIES[number - 1], policy)
                own += f" (+{gained} -{lost}{'' if gains(run, POLICIES[number - 1], policy) else f', p {p:.2g}'})"
            cells += [own, f"{m['control']:.3f} at {m['control_temperature']:g}"]
        last = run.metrics["grpo"]
        cells[-2] = f"**{last['greedy']:.3f}** ({last['greedy_low']:.3f} to {last['greedy_high']:.3f})" + cells[-2][5:]
        word = min(run.words, key=lambda name: run.words[name])
        cells[-1:] = [f"{run.metrics[name]['greedy']:.3f}" for name in EVALUATIONS[-2:]]
        cells += [f"{word} {run.words[word]:.2f}", f"{run.wall_s:.0f}", f"{run.cpu_s:.0f}", f"{run.gib:.2f}"]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join([*lines, *summary(runs)])


def summary(runs: dict[int, Run]) -> list[str]:
    """The rows of medians and worst seeds."""

    def values(name: str, key: str) -> list[float]:
        return [run.metrics[name][key] for run in runs.values()]

    matches = []
    for name, of in (("median", statistics.median), ("lowest", min), ("highest", max)):
        cells = [f"{of(values(policy, key)):.3f}" for policy in POLICIES for key in ("greedy", "control")][:-1]
        cells += [f"{of(values(name, 'greedy')):.3f}" for name in EVALUATIONS[-2:]]
        times = [f"{of([getattr(run, what) for run in runs.values()]):.0f}" for what in ("wall_s", "cpu_s")]
        matches.append(f"| {name} | {' | '.join(cells)} | | {' | '.join(times)} | |")
    return matches


INTRODUCTION = """# The quickstart over seeds

`make quickstart-seeds` writes this page. Success, greedy, on 256 held-out tasks after each training stage, and on 128
whose chains of relations occur in no other split. A *control* is the policy at the temperature of 0, 0.3, 0.6 and 1
that was best on dev tasks, on the same held-out tasks. (+gained -lost) are tasks over the control of the stage before;
a p is shown if McNemar's exact test does not reject at 5 %, or if more were lost. *Hardest word*: the word of a
question that the last policy takes for the right relation least often, and how often. The seeds were written down
before any of them was run; settings were chosen on dev and compositional tasks of others.
"""


def page(runs: dict[int, Run], seeds: Sequence[int]) -> str:
    checks = [f"- {what}; target {target}: {'met' if met else 'MISSED'}" for what, target, met in verdicts(runs)]
    others = statistics.median(run.others for run in runs.values())
    load = f"Other programs used {others:.1f} of {psutil.cpu_count()} cores beside the median run."
    return "\n".join(["", table(runs), "", f"{len(runs)} of {len(seeds)} seeds were run. {load}", "", *checks, ""])


def draw(runs: dict[int, Run], path: Path) -> None:
    """Success of each policy, greedy, on every seed and as their mean, and the mean of the controls, as SVG."""
    import matplotlib

    from agentrl.pipelines.stages.report import BLUE, GREY, ORANGE, _axes

    figure, axes = _axes(f"Held-out success on {len(runs)} seeds, greedy", "success")
    for run in runs.values():
        axes.plot([run.metrics[policy]["greedy"] for policy in POLICIES], color=GREY, alpha=0.35, linewidth=0.8)
    means = {
        key: [statistics.fmean(run.metrics[policy][key] for run in runs.values()) for policy in POLICIES]
        for key in ("greedy", "control")
    }
    axes.plot(means["greedy"], "o-", color=BLUE, label="mean")
    for position, level in enumerate(means["control"][:-1]):
        label = None if position else "control: at the best temperature, no training"
        axes.hlines(level, position, position + 1, color=ORANGE, linestyle="--", label=label)
    axes.set_xticks(range(len(POLICIES)), POLICIES)
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="center right")
    with matplotlib.rc_context({"svg.hashsalt": "agentrl"}):
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight", facecolor="white")


def main() -> int:
    chosen, jobs = os.environ.get("SEEDS"), int(os.environ.get("JOBS", "1"))
    seeds = [0] if os.environ.get("SCALE") == "small" else [int(s) for s in chosen.split()] if chosen else FIXED
    runs: dict[int, Run] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for seed, item in zip(seeds, pool.map(learned, seeds), strict=True):
            runs[seed] = item
            print(page(runs, seeds), flush=True)
            if seeds == FIXED:
                PAGE.write_text(INTRODUCTION + page(runs, seeds))
                draw(runs, PICTURE)
    return int(os.environ.get("CHECK") == "1" and not all(met for _, _, met in verdicts(runs)))


if __name__ == "__main__":
    sys.exit(main())
