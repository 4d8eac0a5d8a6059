"""Layers on questions (WebShaper): how many expansions of the scripted expander become tasks, and how hard they are for
an agent that errs at a tenth of its turns.

    PYTHONPATH=. python benchmarks/layers.py        # 3 seeds, below two minutes
"""

import json
from statistics import fmean

from agentrl.environments.propose import Propose
from agentrl.environments.search_qa.environment import SearchQA
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.statistics.intervals import wilson

SEEDS, TASKS, LAYERS, NOISE = (0, 1, 2), 200, 3, 0.1


def expanded(ask: Propose, tasks: list[Task], seed: int, noise: float) -> list[Task]:
    """What became of one proposal for each task."""
    rows = [
        demonstrate(ask, ask.asking([task], f"p{number}"), noise, seed, f"r{number}")
        for number, task in enumerate(tasks)
    ]
    made = [json.loads(row.final_state)["made"] for row in rows]
    return [Task.model_validate(task) for task in made if task]


def main() -> None:
    world, ask = SearchQA(), Propose("search_qa", tools=True)
    layers = {seed: world.tasks({"train": TASKS}, seed)["train"] for seed in SEEDS}
    given = 0
    for layer in range(LAYERS + 1):
        every = [(seed, task) for seed, tasks in layers.items() for task in tasks]
        kept = f"{len(every)} of {given} proposals" if layer else f"{len(every)} questions"
        rows = [
            [demonstrate(world, task, noise, seed, "d") for seed, task in every] for noise in (0.0, NOISE)
        ]  # fmt: skip
        sure, erring = (sum(bool(row.success) for row in of_noise) for of_noise in rows)
        low, high = wilson(erring, len(every))
        print(
            f"layer {layer}: {kept}, {fmean(task.level for _, task in every):.2f} hops, the expert solves {sure} in "
            f"{fmean(row.n_tool_calls for row in rows[0]):.2f} calls; one that errs {erring / len(every):.3f} "
            f"({low:.3f} to {high:.3f})",
            flush=True,
        )
        given = len(every)
        if layer == 0:
            wrong = sum(len(expanded(ask, tasks, seed, 1.0)) for seed, tasks in layers.items())
            print(f"proposals at random: {wrong} of {given} become tasks", flush=True)
        layers = {seed: expanded(ask, tasks, seed, 0.0) for seed, tasks in layers.items()}


if __name__ == "__main__":
    main()
