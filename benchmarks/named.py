"""The experiments of ``methods.py`` about methods of named systems.

- toolrl: GRPO on the agreement with the calls of the expert's successes, and on success alone, on the tasks that have
  such calls (`words`).
- agenttuning: a policy that has learned one family of tasks learns another, from its rows alone and mixed with the old
  ones by a share; what it solves of both.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from arms import SMALL, Arm, Spent, gain, table
from methods import BATCH, ITERATIONS, JUDGED, SAMPLES, SEEDS, TASKS, expert, imitated, judged, online, seeds

REWARDS = [{"type": "tool_match", "weight": 3.0, "outcome": True}, {"type": "format", "weight": 1.0}]


def toolrl(env: str) -> bool:
    from agentrl.pipelines.methods.toolrl.reference import with_calls

    arms = {name: Arm(name) for name in ("warm", "GRPO", "ToolRL")}
    named = []
    for seed, folder in seeds(f"toolrl {env}", arms):
        harness, tasks, shown = expert(env, seed, folder)
        setting = imitated("warm", env, harness, tasks, [shown])
        made = harness.run(with_calls, tasks=setting.tasks, trajectories=[shown])
        named.append(int(made.metrics["with_calls"]))
        setting = replace(setting, tasks=made["tasks"])
        arms["warm"].add(judged(setting, setting.warm), Spent())
        for name, more in (("GRPO", {}), ("ToolRL", {"rewards": REWARDS})):
            model, spent, _ = online(setting, **more)
            arms[name].add(judged(setting, model), spent)
    print(f"\ntoolrl, {env}: {TASKS * ITERATIONS * SAMPLES:,} rollouts a seed, of {named} tasks that have calls")
    table(arms)
    return gain(f"toolrl, {env}", arms, "GRPO", "ToolRL")


OLD: dict[str, Any] = {"type": "math", "levels": [1], "largest": 30}
STEPS = 2 if SMALL else 200
SIZE = {"vocabulary": 1024, "digits": 4, "context": 256}
SHARES = (None, 0.5, 0.2)


def agenttuning() -> bool:
    """Success on tasks of both families, at temperature 0. The agents' rows are those of `lookup`."""
    names = {None: "agents' rows alone", **{share: f"mixed, share {share}" for share in SHARES if share}}
    both: dict[str, list[tuple[float, float]]] = {name: [] for name in ("before", *names.values())}
    for seed in SEEDS:
        with TemporaryDirectory() as folder:
            harness, tasks, agent = expert("lookup", seed, Path(folder))
            tuned, old = _tuned(harness, agent, names)
            for name, model in tuned.items():
                both[name].append((solved(harness, model, tasks["heldout"]), solved(harness, model, old)))
    print("\nagenttuning: agents' tasks (lookup) and general ones (math, level 1), greedily: means, and each seed")
    for name, pairs in both.items():
        means = " and ".join(f"{fmean(values):.3f}" for values in zip(*pairs, strict=True))
        print(f"{name:20} {means}   {', '.join(f'{new:.3f} {old:.3f}' for new, old in pairs)}")
    return True


def _tuned(harness: Any, agent: Any, names: dict[float | None, str]) -> tuple[dict[str, Any], Any]:
    """The policy before it saw more than a few agents' rows, and after it was tuned on them in each way; and held-out
    tasks of the old family."""
    from agentrl.pipelines.methods.agenttuning.mix import mix
    from agentrl.pipelines.stages.tasks import generate
    from agentrl.pipelines.stages.train import sft
    from agentrl.pipelines.stages.trajectories import synthesize

    sizes = {"train": 24 if SMALL else 768, "dev": 4, "heldout": min(JUDGED, 256)}
    old = harness.run(generate, {"env": OLD, **sizes})
    rows = harness.run(synthesize, {"noise": 0.0}, tasks=old["train"])["trajectories"]

    def mixed(share: float) -> Any:
        return harness.run(mix, {"share": share}, agent=[agent], general=[rows])["trajectories"]

    def learned(given: Any, lr: float, **more: Any) -> Any:
        optimizer = {"lr": lr, "schedule": "cosine", "warmup": min(20, STEPS // 2)}
        config = {"steps": STEPS, "batch": BATCH, "optimizer": optimizer}
        model = {} if "model" in more else {"model": {"init": "tiny", "size": SIZE}}
        return harness.run(sft, config | model, trajectories=[given], **more)["model"]

    before = learned(mixed(0.01), 5e-3)  # one vocabulary for both
    tuned = {"before": before}
    for share, name in names.items():
        tuned[name] = learned(agent if share is None else mixed(share), 2e-3, model=before)
    return tuned, old["heldout"]


def solved(harness: Any, model: Any, tasks: Any) -> float:
    """The share of tasks that a policy solves greedily."""
    from agentrl.pipelines.stages.trajectories import sample

    config = {"samples": 1, "sampling": {"temperature": 0.0}}
    rows = harness.run(sample, config, model=model, tasks=tasks)["trajectories"].table(["success"])
    return fmean(float(value) for value in rows["success"].to_pylist())
