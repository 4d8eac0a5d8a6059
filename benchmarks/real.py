"""A real small model with three seeds, each in a fresh store: what DPO and GRPO add, greedily, to the control
for sharpening of the policy that they start from, its best temperature, chosen on dev tasks; and what a tiny model
learns of its successes.

make bench-real                          # after make smollm; hours of processor time, minutes of a GPU
SEEDS="0" FILES="chain_sum" python benchmarks/real.py
TUNE=1 ...                               # choose each arm's rate first, on dev tasks of another seed; families alone
PROFILE=lora ...                         # adapters of low rank
BESIDE=9 JOBS=3 ...                      # runs at once, and stages of each at once: on a GPU
STORES=folder ...                        # stores that stay, so that a benchmark that was stopped goes on
CHECK=1 ...                              # exit code 1 if a target is missed

A line for each figure, with its target and `met` or `MISSED`.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil
from quickstart import ROOT, Run, run
from ruamel.yaml import YAML

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.api.run import stage_result

FILES = os.environ.get("FILES", "chain_sum math_tools words_smollm words_distilled").split()
SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "0 1 2").split()]
TUNED_ON = 10
"""The seed on whose dev tasks rates are chosen."""
RATES = [1 / 3, 1.0, 3.0]
"""Times the rate of the file."""
PROFILE = os.environ.get("PROFILE", "")
BESIDE, JOBS = int(os.environ.get("BESIDE", "1")), os.environ.get("JOBS", "2")
STORES = os.environ.get("STORES", "")
LEARNED = ["longer", "rejected", "dpo", "grpo"]
BY_REWARD = ["dpo", "grpo"]
AMONG = [("rejected", "longer"), ("grpo", "longer"), ("grpo", "rejected"), ("dpo", "rejected")]
P, HOURS, FAMILIES = 0.05, 4.0, 2

Outcomes = Mapping[str, bool]


class Bed(NamedTuple):
    """What is compared in a file: the policy that arms start from, and others measured and probed before them; the
    arms; and pairs of an arm and the one that it should exceed."""

    start: str
    before: list[str]
    arms: list[str]
    among: list[tuple[str, str]]

    @property
    def rewarded(self) -> bool:
        """Whether arms learn from rewards: these files are families, and their rates are tuned."""
        return not set(BY_REWARD).isdisjoint(self.arms)


BEDS = {
    "chain_sum": Bed("warm", ["shots"], LEARNED, AMONG),
    "math_tools": Bed("warm", ["base"], LEARNED, AMONG),
    "words_smollm": Bed("warm", ["base"], LEARNED, AMONG),
    "words_distilled": Bed("pupil", [], ["longer", "alone", "taught"], [("taught", "alone"), ("taught", "longer")]),
}


def outcomes(store: str, stage: str, decoding: str) -> Outcomes:
    """Whether each held-out task was solved, by its id."""
    table = stage_result(Catalog(store), stage).output("trajectories").table(["task_id", "tags", "success"])  # type: ignore[attr-defined]
    return {row["task_id"]: bool(row["success"]) for row in table.to_pylist() if decoding in row["tags"]}


def changed(before: Outcomes, after: Outcomes) -> tuple[int, int]:
    """How many tasks were gained, and how many lost."""
    if before.keys() != after.keys():
        raise SystemExit("the two evaluations are of other tasks, and cannot be compared")
    gained = sum(after[task] and not before[task] for task in before)
    return gained, sum(before[task] and not after[task] for task in before)


@contextmanager
def folder_of(name: str, seed: int) -> Iterator[Path]:
    """Where the store of a run lies: below :data:`STORES`, or until the run has ended."""
    if STORES:
        folder = Path(STORES).resolve() / f"{name}{PROFILE}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with TemporaryDirectory(prefix=f"agentrl-{name}-") as temporary:
        yield Path(temporary)


def line(text: str, met: bool) -> bool:
    print(f"{text}  {'met' if met else 'MISSED'}", flush=True)
    return met


def stages_of(name: str) -> dict[str, Any]:
    """The stages of a pipeline file, with what :data:`PROFILE` changes."""
    document = YAML(typ="safe").load(ROOT / "pipelines" / "specs" / "real" / f"{name}.yaml")
    stages: dict[str, Any] = document["stages"]
    if PROFILE:
        for stage, change in document["profiles"][PROFILE]["stages"].items():
            stages[stage]["with"]["optimizer"] |= change["with"]["optimizer"]
    return stages


def rates_on_dev(name: str) -> dict[str, float]:
    """The rate of each arm that solves most dev tasks of :data:`TUNED_ON` greedily; of several, the lowest."""
    stages = stages_of(name)
    tried = {}
    for arm in LEARNED:
        rate = stages[arm]["with"]["optimizer"]["lr"]
        evaluation = {**stages[f"eval_{arm}"], "inputs": {"tasks": "tasks.dev"}}
        for number, factor in enumerate(RATES):
            changed_rate = {**stages[arm]["with"]["optimizer"], "lr": float(f"{rate * factor:.2g}")}
            trial = f"{arm}{number}"
            tried[trial] = arm, changed_rate["lr"]
            stages[trial] = {**stages[arm], "with": {**stages[arm]["with"], "optimizer": changed_rate}}
            stages[f"eval_{trial}"] = {**evaluation, "inputs": {"tasks": "tasks.dev", "model": trial}}
    needed = [stage for stage in stages if not stage.startswith(("probe_", "report", "eval_", "few", "shots"))]
    kept = [*(stage for stage in needed if stage not in LEARNED), *(f"eval_{trial}" for trial in tried)]
    with folder_of(f"tuned-{name}", TUNED_ON) as folder:
        path = ROOT / "build" / f"tuned-{name}{PROFILE}.yaml"
        document = {"name": f"tuned_{name}", "seed": 0, "execution": {"env": {"OMP_NUM_THREADS": "1"}}}
        with path.open("w") as file:
            YAML(typ="safe").dump(document | {"stages": {stage: stages[stage] for stage in kept}}, file)
        done = run(TUNED_ON, f"{folder}/store", str(path), list(tried), ["--jobs", JOBS])
        path.unlink()
    chosen: dict[str, tuple[float, float]] = {}
    for trial, (arm, rate) in tried.items():
        greedy = done.metrics[trial]["greedy"]
        sampled = done.metrics[trial]["success"]
        print(f"{name}, dev tasks of seed {TUNED_ON}, {arm} at {rate:g}: {greedy:.3f} greedily, {sampled:.3f} at 1")
        if arm not in chosen or greedy > chosen[arm][0]:
            chosen[arm] = greedy, rate
    rates = {arm: rate for arm, (_, rate) in chosen.items()}
    print(f"{name}: rates chosen on dev tasks: {rates}; {done.wall_s:.0f} s by the clock", flush=True)
    return rates


def measured(name: str, seed: int, tuned: "Future[dict[str, float]] | None") -> tuple[Run, dict[str, Outcomes]]:
    """A run of a pipeline file, and the outcome of each held-out task: greedily for each policy, and for ``control``,
    which is that of the policy that arms start from."""
    bed = BEDS[name]
    measures = [*bed.before, bed.start, *bed.arms]
    probes = [f"probe_{policy}" for policy in (*bed.before, bed.start)] if bed.before and seed == SEEDS[0] else []
    more = ["--jobs", JOBS, *(["--profile", PROFILE] if PROFILE else [])]
    for stage in [*(f"eval_{policy}" for policy in measures), *probes]:
        more += ["--until", stage]
    for arm, rate in tuned.result().items() if tuned else []:
        more += ["--set", f"stages.{arm}.with.optimizer.lr={rate:g}"]
    with folder_of(name, seed) as folder:
        store = f"{folder}/store"
        done = run(seed, store, f"real/{name}", measures, more)
        at = done.metrics[bed.start]["control_temperature"]
        solved = {arm: outcomes(store, f"eval_{arm}", "greedy") for arm in bed.arms}
        for probe in probes:
            passes = stage_result(Catalog(store), probe).summary
            print(f"{name}, seed {seed}, {probe}: pass@64 {passes['pass@64']:.3f} of {passes['n_tasks']} dev tasks")
        solved["control"] = outcomes(store, f"eval_{bed.start}", {0.0: "greedy", 1.0: "sampled"}.get(at, "control"))
    for arm, metrics in done.metrics.items():
        kept = ("success", "greedy", "control", "control_temperature")
        shown = {key: round(metrics[key], 3) for key in kept if key in metrics}
        print(f"{name}, seed {seed}, {arm}: {shown}", flush=True)
    for arm in bed.arms:
        gained, lost = changed(solved["control"], solved[arm])
        print(f"{name}, seed {seed}, {arm} over the control of {bed.start}: {gained} gained, {lost} lost", flush=True)
    print(f"{name}, seed {seed}: {done.wall_s:.0f} s by the clock, {done.cpu_s:.0f} CPU s", flush=True)
    return done, solved


def judge(name: str, runs: list[tuple[Run, dict[str, Outcomes]]]) -> bool:
    """What the arms of all seeds together add; returns whether rewards add something."""
    from agentrl.statistics.paired import mcnemar

    def pooled(before: str, after: str) -> tuple[int, int, str]:
        both = [changed(solved[before], solved[after]) for _, solved in runs]
        gained, lost = sum(pair[0] for pair in both), sum(pair[1] for pair in both)
        tasks = sum(len(solved[before]) for _, solved in runs)
        return gained, lost, f"{gained} gained, {lost} lost of {tasks}, p {mcnemar(gained, lost):.2g}"

    adds, bed = False, BEDS[name]
    for arm in bed.arms:
        gained, lost, counts = pooled("control", arm)
        text = f"{name}: {arm}, greedy over the control of {bed.start}: {counts}"
        if arm in BY_REWARD:
            adds |= line(f"{text}, target p < {P}", gained > lost and mcnemar(gained, lost) < P)
        else:
            print(text, flush=True)
    for after, before in bed.among:
        gained, lost, counts = pooled(before, after)
        text = f"{name}: {after} over {before}, both greedy: {counts}"
        if bed.rewarded:
            print(text, flush=True)
        else:
            line(f"{text}, target p < {P}", gained > lost and mcnemar(gained, lost) < P)
    hours = sum(done.cpu_s for done, _ in runs) / 3600
    wall = max(done.wall_s for done, _ in runs)
    line(f"{name}: {hours:.2f} CPU hours, target at most {HOURS:g}; the longest run {wall:.0f} s", hours <= HOURS)
    return adds


def judged() -> Iterator[bool]:
    """Whether rewards add something, for each file whose runs all ended well; what failed is printed."""
    with ThreadPoolExecutor(BESIDE) as pool:
        rewarded = [name for name in FILES if BEDS[name].rewarded]
        tuned = {name: pool.submit(rates_on_dev, name) for name in rewarded if os.environ.get("TUNE") == "1"}
        runs = {name: [pool.submit(measured, name, seed, tuned.get(name)) for seed in SEEDS] for name in FILES}
        for name, seeds in runs.items():
            if failed := [str(error) for seed in seeds if (error := seed.exception())]:
                print(f"{name}: {len(failed)} of {len(seeds)} runs failed: {failed[0]}", flush=True)
            ended = [seed.result() for seed in seeds if not seed.exception()]
            adds = bool(ended) and judge(name, ended) and not failed
            if name in rewarded:
                yield adds


def end_runs(*_: object) -> None:
    """End the runs under way too: their workers would go on, and hold a GPU's memory."""
    for child in psutil.Process().children():
        child.terminate()
    os._exit(128 + signal.SIGTERM)


def main() -> int:
    signal.signal(signal.SIGTERM, end_runs)
    if not (ROOT / "build" / "smollm" / "config.json").is_file():
        raise SystemExit("there is no build/smollm; make smollm")
    started = time.monotonic()
    matches = list(judged())
    print(f"{time.monotonic() - started:.0f} s in all")
    enough = not matches or line(
        f"families in which DPO or GRPO adds: {sum(matches)} of {len(matches)}, target {FAMILIES}",
        sum(matches) >= FAMILIES,
    )
    return int(os.environ.get("CHECK") == "1" and not enough)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
