"""The experiment of ``methods.py`` about calls that do not help: `lookup`, with an expert that has a habit.

Before six of ten of its turns the expert asks for something that the question is not about. So what is useless is
known: the filter's cuts are compared with it. Then one model learns from the rows as they are, which is also the one
whose probabilities decide, and one from the filtered rows, with as many steps; both from the same random weights.
"""

import json
import sys
import tempfile
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from arms import SMALL, line
from courses import COURSES
from methods import BATCH, SEEDS, trained_tokens

from agentrl.environments.lookup import LookupEnvironment
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall

HABIT = 0.6
TAU = 0.1
"""Chosen on train rows of seed 0, between the gains of most useless calls and those of the others; the paper's is 1."""
TRAIN, JUDGED = (16, 4) if SMALL else (512, 256)
LIMITS = {"max_steps": 12}
"""Room for what nobody needs: the longest question takes four turns, and as many with the habit before each."""


class Habit(LookupEnvironment):
    """`lookup` with an expert that never errs, and asks for a dish (or a city, if the question is about a dish) of the
    first person in between. The ids of these calls begin with ``habit``."""

    max_steps = LIMITS["max_steps"]

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        metadata = json.loads(task.metadata)
        first = who = metadata["start"]
        idle = "city" if "dish" in metadata["relations"] else "dish"
        for number, relation in enumerate([*metadata["relations"], None]):
            if random.random() < noise:
                yield _find(f"habit_{number}", first, idle)
            if relation is not None:
                [observation] = yield _find(f"call_{number}", who, relation)
                who = observation.content
        yield Message(role=Role.ASSISTANT, content=who)


def _find(name: str, who: str, relation: str) -> Message:
    call = ToolCall(id=name, name="find", arguments=json.dumps({"who": who, "rel": relation}))
    return Message(role=Role.ASSISTANT, tool_calls=[call])


class Judged(NamedTuple):
    """Of one rollout of each task: success, and calls."""

    solved: dict[str, float]
    calls: dict[str, float]


def filter_calls() -> bool:
    """What the filter takes for useless, against what is; and what is learned from what it leaves."""
    from agentrl.pipelines.harness import Harness

    filters: dict[float, list[dict[str, int]]] = {TAU: [], 1.0: []}
    judged: dict[str, list[Judged]] = {f"{rows}, {at}": [] for at in ("greedy", "T 1") for rows in ("all", "filtered")}
    tokens = {"all": 0, "filtered": 0}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            harness = Harness(Path(folder), seed)
            splits = Habit().tasks({"train": TRAIN, "heldout": JUDGED}, seed)
            tasks, heldout = harness.tasks(splits["train"]), harness.tasks(splits["heldout"])
            shown = _shown(harness, splits["train"], seed)
            blank = harness.model(partial(_save_blank, shown.read(), seed))
            models = {"all": _taught(harness, blank, shown, tokens, "all")}
            for tau in (1.0, TAU):
                filtered = _filtered(harness, models["all"], shown, tasks, tau)
                filters[tau].append(_compared(filtered["calls"].table().to_pylist(), shown.read()))
            models["filtered"] = _taught(harness, blank, filtered["trajectories"], tokens, "filtered")
            for rows, model in models.items():
                for at, temperature in (("greedy", 0.0), ("T 1", 1.0)):
                    judged[f"{rows}, {at}"].append(_played(harness, model, heldout, temperature))
            print(f"useful calls, seed {seed}: {filtered.metrics}", file=sys.stderr, flush=True)
    return _print(filters, judged, tokens)


def _shown(harness: Any, tasks: list[Task], seed: int) -> Any:
    from agentrl.rollouts.demonstrations import demonstrate

    environment = Habit()
    return harness.trajectories(
        demonstrate(environment, task, HABIT, seed, f"shown-{number:05d}") for number, task in enumerate(tasks)
    )


def _save_blank(rows: list[Any], seed: int, path: Path) -> None:
    from agentrl.models.tiny import TinySize, tiny_policy

    tiny_policy([row.messages for row in rows], seed, TinySize(context=256)).save(path)


def _taught(harness: Any, blank: Any, rows: Any, tokens: dict[str, int], name: str) -> Any:
    from agentrl.pipelines.stages.train import sft

    steps = COURSES["lookup"].warm_steps
    optimizer = {"lr": 5e-3, "schedule": "cosine", "warmup": min(20, steps // 2)}
    made = harness.run(sft, {"steps": steps, "batch": BATCH, "optimizer": optimizer}, trajectories=[rows], model=blank)
    tokens[name] += trained_tokens(made)
    return made["model"]


def _filtered(harness: Any, model: Any, rows: Any, tasks: Any, tau: float) -> Any:
    from agentrl.pipelines.methods.toolformer.filter_calls import filter_calls as stage

    config = {"tools": ["find"], "tau": tau}
    return harness.run(stage, config, trajectories=[rows], model=model, tasks=[tasks])


def _compared(calls: list[dict[str, Any]], rows: list[Any]) -> dict[str, int]:
    """How many calls were cut, were useless, and both; and how many there are."""
    turns = {row.trajectory_id: [message for message in row.messages if message.tool_calls] for row in rows}
    useless = [
        turns[call["trajectory_id"]][call["turn"]].tool_calls[call["call"]].id.startswith("habit") for call in calls
    ]
    cut = [not call["kept"] for call in calls]
    both = sum(a and b for a, b in zip(useless, cut, strict=True))
    return {"calls": len(calls), "useless": sum(useless), "cut": sum(cut), "both": both}


def _played(harness: Any, model: Any, tasks: Any, temperature: float) -> Judged:
    from agentrl.pipelines.stages.trajectories import sample

    config = {"samples": 1, "sampling": {"temperature": temperature}, "limits": LIMITS}
    made = harness.run(sample, config, model=model, tasks=tasks)["trajectories"]
    rows = made.table(["task_id", "success", "n_tool_calls"]).to_pylist()
    return Judged(
        {row["task_id"]: float(row["success"]) for row in rows},
        {row["task_id"]: float(row["n_tool_calls"]) for row in rows},
    )


def _print(
    filters: Mapping[float, list[dict[str, int]]], judged: Mapping[str, list[Judged]], tokens: Mapping[str, int]
) -> bool:
    from agentrl.statistics.intervals import wilson
    from agentrl.statistics.sharpening import paired

    print(f"\nfilter_calls, lookup: {TRAIN} rows a seed of an expert with a habit; decay 0.2")
    met = []
    for tau, seeds in filters.items():
        total = {name: sum(seed[name] for seed in seeds) for name in seeds[0]}
        low, high = wilson(total["both"], max(1, total["cut"]))
        precision, recall = total["both"] / max(1, total["cut"]), total["both"] / max(1, total["useless"])
        print(
            f"tau {tau:g}: cut {total['cut']} of {total['calls']} calls, {total['useless']} useless: precision "
            f"{precision:.3f} ({low:.3f} to {high:.3f}), recall {recall:.3f}"
        )
        if tau == TAU:
            met.append(line(f"filter_calls, precision {precision:.3f}, recall {recall:.3f}", precision > 0.9, "> 0.9"))
    print(f"trained tokens: all rows {tokens['all']:,}, filtered {tokens['filtered']:,}")
    for at in ("greedy", "T 1"):
        before, after = judged[f"all, {at}"], judged[f"filtered, {at}"]
        for name, runs in (("all rows", before), ("filtered", after)):
            outcomes = [outcome for run in runs for outcome in run.solved.values()]
            calls = [number for run in runs for number in run.calls.values()]
            low, high = wilson(round(sum(outcomes)), len(outcomes))
            shares = " ".join(f"{sum(run.solved.values()) / len(run.solved):.3f}" for run in runs)
            print(f"{at}, {name:<9} success {sum(outcomes) / len(outcomes):.3f}  {low:.3f} to {high:.3f}  "
                  f"each seed {shares}  calls an episode {sum(calls) / len(calls):.2f}")  # fmt: skip
        for what, pick in (("success", 0), ("calls an episode", 1)):
            contrast = paired([run[pick] for run in before], [run[pick] for run in after])
            figure = f"filter_calls, {at}, {what}: {contrast.mean:+.3f} ({contrast.low:+.3f} to {contrast.high:+.3f})"
            good = contrast.high < 0 if pick else contrast.low > -0.03
            met.append(line(figure, good, "fewer" if pick else "not 0.03 less"))
    return all(met)
