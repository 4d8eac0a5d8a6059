"""The experiments of ``methods.py`` about rewards that a policy gives itself, in `words`.

- confidence: GRPO on how sure the policy was, or on what most of a group answered, in the place of the verifier.
- self_rewarding: DPO on what the policy itself prefers of its rollouts, with and without a critic that is told between
  rounds what was right, beside DPO on verified outcomes of as many rollouts.
"""

from dataclasses import replace
from statistics import fmean
from typing import Any

from arms import SMALL, Arm, Spent, gain, table
from courses import COURSES
from methods import (
    BATCH,
    ITERATIONS,
    SAMPLES,
    TASKS,
    Setting,
    expert,
    imitated,
    judged,
    of_rollouts,
    online,
    other_draws,
    prepared,
    seeds,
    trained_tokens,
)

ROUNDS = min(12, ITERATIONS)
"""Iterations of GRPO."""
ALONE = {
    "GRPO": [],
    "GRPO, confidence": [{"type": "confidence", "alone": True}],
    "GRPO, agreement": [{"type": "self_consistency", "alone": True}],
}


MEASURED = {"judged": 256, "dev": 64}
"""Tasks of the second experiment that are judged, and on which a temperature is chosen."""


def confidence(env: str) -> bool:
    arms = {name: Arm(name) for name in ("warm", *ALONE)}
    for seed, folder in seeds(f"confidence {env}", arms):
        setting = prepared(env, seed, folder)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        for name, rewards in ALONE.items():
            model, spent, _ = online(setting, rewards=rewards, iterations=ROUNDS)
            arms[name].add(judged(setting, model), spent)
    print(f"\nconfidence, {env}: {TASKS * ROUNDS * SAMPLES:,} rollouts a seed")
    table(arms)
    met = [gain(f"{name}, {env}", arms, "GRPO", name) for name in ALONE if name != "GRPO"]
    return all(met)


SELF_TASKS, ATTEMPTS, VOTES, DPO_STEPS, TOLD_STEPS = (8, 2, 1, 2, 2) if SMALL else (128, 4, 3, 40, 100)
CRITICS = ("own verdicts", "own verdicts, critic told", "verified")


def self_rewarding(env: str) -> bool:
    arms = {name: Arm(name) for name in ("taught", *CRITICS)}
    ranks: dict[str, list[float]] = {}
    for seed, folder in seeds(f"self_rewarding {env}", arms):
        harness, tasks, shown = expert(env, seed, folder)
        warm = imitated("judging", env, harness, tasks, [shown], context=320)
        measuring = {name: harness.tasks(getattr(warm, name).read()[: MEASURED[name]]) for name in MEASURED}
        warm = replace(warm, **measuring)
        given = harness.tasks(tasks["train"].read()[:SELF_TASKS])
        taught = to_judge(warm, warm.warm, given, [shown])
        arms["taught"].add(judged(warm, taught), Spent())
        for name in CRITICS:
            policy, critic, spent = taught, taught, Spent()
            for number in range(2):
                with other_draws(harness, number):
                    policy, critic, more = one_round(warm, name, policy, critic, given, ranks)
                spent += more
            arms[name].add(judged(warm, policy), spent)
    print(f"\nself_rewarding, {env}: 2 rounds of {SELF_TASKS * ATTEMPTS:,} rollouts a seed")
    table(arms, start="taught")
    for name, measured in ranks.items():
        print(f"AUC within tasks of {name}: {fmean(measured):.3f}")
    met = [gain(f"{name}, {env}", arms, "verified", name, start="taught") for name in CRITICS[:-1]]
    return all(met)


def to_judge(setting: Setting, model: Any, tasks: Any, more: list[Any]) -> Any:
    """A model that has learned to judge from its own rollouts, whose success is known, beside ``more`` rows."""
    from agentrl.pipelines.methods.self_rewarding.judging import judge
    from agentrl.pipelines.stages.trajectories import sample

    rows = setting.harness.run(sample, {"samples": ATTEMPTS}, model=model, tasks=tasks)["trajectories"]
    questions = setting.harness.run(judge, trajectories=[rows])["tasks"]
    return told(setting, model, questions, more, COURSES[setting.env].warm_steps)


def told(setting: Setting, model: Any, questions: Any, more: list[Any], steps: int) -> Any:
    """A model after supervised steps on the right verdicts."""
    from agentrl.pipelines.stages.train import sft
    from agentrl.pipelines.stages.trajectories import synthesize

    shown = setting.harness.run(synthesize, tasks=questions)["trajectories"]
    config = {"steps": steps, "batch": BATCH, "optimizer": {"lr": 2e-3, "schedule": "linear"}}
    return setting.harness.run(sft, config, trajectories=[*more, shown], model=model)["model"]


def one_round(
    setting: Setting, name: str, policy: Any, critic: Any, tasks: Any, ranks: dict[str, list[float]]
) -> tuple[Any, Any, Spent]:
    """The policy and the critic after a round, and what it spent; verdicts count as sampled."""
    from agentrl.pipelines.methods.eto.outcome import outcome
    from agentrl.pipelines.methods.self_rewarding.judging import judge, scores_from_verdicts
    from agentrl.pipelines.stages.train import dpo
    from agentrl.pipelines.stages.trajectories import sample

    run = setting.harness.run
    rows = run(sample, {"samples": ATTEMPTS}, model=policy, tasks=tasks)["trajectories"]
    spent, by = of_rollouts(rows), {}
    if name != "verified":
        critic = critic if "told" in name else policy
        questions = run(judge, trajectories=[rows])["tasks"]
        votes = run(sample, {"samples": VOTES}, model=critic, tasks=questions)["trajectories"]
        scored = run(scores_from_verdicts, {"scorer": "verdicts"}, tasks=[questions], trajectories=[votes])
        ranks.setdefault(name, []).append(scored.metrics.get("auc_within") or 0.5)
        spent, by = spent + of_rollouts(votes), {"scores": [scored["scores"]]}
        if "told" in name:
            critic = told(setting, critic, questions, [], TOLD_STEPS)
    pairs = run(outcome, {"cut": None, **({"scorer": "verdicts"} if by else {})}, trajectories=[rows], **by)["pairs"]
    if not pairs.read():
        return policy, critic, spent
    config = {"beta": 0.1, "nll": 0.2, "steps": DPO_STEPS, "batch": 16}
    made = run(dpo, {**config, "optimizer": {"lr": 2e-4, "schedule": "linear"}}, pairs=[pairs], model=policy)
    return made["model"], critic, spent + Spent(trained=trained_tokens(made))
