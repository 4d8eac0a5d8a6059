"""What a better policy teaches at an equal budget; part of :mod:`benchmarks.methods`, which runs them.

- distill: a teacher, and a student that samples: in `words` a larger policy that has imitated an expert who knows all
  words, in `lookup` the warm policy after GRPO. Against supervised training on the teacher's samples, and rejection
  sampling and GRPO of as many sampled tokens.
- self_distill: the warm policy teaches itself, with the answer (`lookup`) or notes (`rooms`) in sight.
- labels: DAgger with that teacher of `words`: its turns in the student's states, against its own rollouts of as many
  tokens, and rejection sampling of as many tokens as student and teacher have together.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from arms import SMALL, Arm, Solved, Spent, gain, table
from branching import STATES, as_online
from courses import COURSES
from methods import (
    CURATED_STEPS,
    ITERATIONS,
    SAMPLES,
    SPLIT,
    TASKS,
    Setting,
    curated,
    expert,
    imitated,
    judged,
    of_rollouts,
    online,
    prepared,
    rejected,
    rollouts,
    seeds,
    successes,
)
from methods_signals import noted

FEW = max(1, ITERATIONS // 3)
LARGER = {"layers": 2, "width": 32} if SMALL else {"layers": 3, "width": 192}
"""Of the teacher in `words`; the student has 2 layers and a width of 128."""
BATCHES = {number: {"iterations": FEW * number, "tasks": max(1, TASKS // number)} for number in (1, 4, 8)}
"""Of so many parts of the batch of GRPO, in as many times the steps."""
TRIED = [(8, 1e-3), (8, 2e-3)]
"""Of distillation in `words`, on dev tasks, after one part at 1e-3, 2e-3 and 4e-3 was 0.289, 0.294 and 0.318 there."""
CHOSEN = (8, 2e-3)
LABEL_STEPS = 3 * CURATED_STEPS


def with_teacher(seed: int, folder: Path) -> tuple[Setting, Any]:
    """The setting of `words`, and a larger policy with its tokenizer that has imitated an expert who knows all words.
    What the teacher cost is not charged: it is given."""
    from agentrl.environments.words import WordsEnvironment
    from agentrl.models.policy import Policy
    from agentrl.models.tiny import TinySize, init_model
    from agentrl.rollouts.demonstrations import demonstrate

    harness, tasks, shown = expert("words", seed, folder)
    setting = imitated("warm", "words", harness, tasks, [shown])
    tokenizer = Policy.load(setting.warm.path).tokenizer
    course = setting.course
    size = TinySize(context=course.context, vocabulary=course.vocabulary, **LARGER)
    blank = harness.model(lambda to: Policy(init_model(tokenizer, seed, size), tokenizer, name="larger").save(to))
    knows = WordsEnvironment(unknown=0, names=course.environment["names"])
    walks = [demonstrate(knows, task, 0.0, 0, f"known-{task.task_id}") for task in setting.tasks.read()]
    teacher = imitated("teacher", "words", harness, tasks, [harness.trajectories(walks)], model=blank).warm
    return setting, teacher


def distill(env: str) -> bool:
    """With SPLIT=dev only GRPO in as many steps is beside it."""
    tried = (TRIED if SPLIT == "dev" else [CHOSEN]) if env == "words" else [(1, COURSES[env].lr)]
    ways = {f"distilled, {FEW * parts} steps, {lr:g}": (parts, lr) for parts, lr in tried}
    plain = {f"GRPO, {FEW * parts} steps": parts for parts in dict.fromkeys(parts for parts, _ in tried)}
    beside = () if SPLIT == "dev" else ("teacher", "rejection", "SFT on its samples")
    arms = {name: Arm(name) for name in ("warm", *beside, *plain, *ways)}
    for seed, folder in seeds(f"distill {env}", arms):
        if env == "words":
            setting, teacher = with_teacher(seed, folder)
        else:
            setting = prepared(env, seed, folder)
            teacher = online(setting)[0]
        arms["warm"].add(judged(setting, setting.warm), Spent())
        for name, (parts, lr) in ways.items():
            arms[name].add(*distilled(setting, BATCHES[parts], lr, teacher=teacher))
        for name, parts in plain.items():
            model, spent, _ = online(setting, **BATCHES[parts])
            arms[name].add(judged(setting, model), spent)
        if not beside:
            continue
        arms["teacher"].add(judged(setting, teacher), Spent())
        tasks = setting.harness.tasks(setting.tasks.read()[: TASKS * FEW])
        wanted = next(iter(arms[name].costs[-1].sampled for name in ways))
        model, spent, _ = rejected(setting, tasks, wanted)
        arms["rejection"].add(judged(setting, model), spent)
        given, cost = rollouts(replace(setting, warm=teacher), tasks, wanted)
        model, more = curated(setting, given)
        arms["SFT on its samples"].add(judged(setting, model), Spent(foreign=cost.sampled, calls=cost.calls) + more)
    print(f"\ndistill, {env}: {TASKS * FEW * SAMPLES:,} rollouts of the student a seed")
    table(arms)
    met = [gain(f"{name}, {env}", arms, before, name) for name in ways for before in plain]
    if not beside:
        return all(met)
    met += [gain(f"{name}, {env}", arms, "rejection", name) for name in ways]
    met += [gain(f"{name}, {env}", arms, "SFT on its samples", name, by="foreign") for name in ways]
    return gain(f"SFT on its samples, {env}", arms, "rejection", "SFT on its samples", by="tokens") and all(met)


def distilled(
    setting: Setting, config: dict[str, Any] | None = None, lr: float | None = None, **inputs: Any
) -> tuple[Solved, Spent]:
    """What the warm policy solves after on-policy distillation, and what that cost."""
    from agentrl.pipelines.stages.grpo import online as stage

    config = {
        "iterations": FEW, "tasks": TASKS, "samples": SAMPLES, "checkpoints": {"last": 0},
        "algorithm": {"type": "distill"}, "checkpoint_every": 1000,
        "optimizer": {"lr": lr or setting.course.lr, "schedule": "linear", "warmup": min(4, FEW // 2)},
        **(config or {}),
    }  # fmt: skip
    result = setting.harness.run(stage, config, model=setting.warm, tasks=setting.tasks, **inputs)
    spent = of_rollouts(result["trajectories"])
    read = Spent(foreign=spent.sampled, trained=spent.sampled)  # the teacher reads what the student sampled
    return judged(setting, result["model"]), spent + read


def self_distill(env: str) -> bool:
    """The policy teaches what it would do with the answer (`lookup`), or notes on an earlier attempt (`rooms`).
    It saw such openings in its demonstrations."""
    from agentrl.pipelines.methods.reflexion.notes import reflect
    from agentrl.pipelines.stages.trajectories import sample

    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO", "taught by itself")}
    for seed, folder in seeds(f"self_distill {env}", arms):
        if env == "lookup":
            harness, tasks, shown = expert(env, seed, folder, hinted=0.15)
            setting = imitated("hinted", env, harness, tasks, [shown])
            taught = distilled(setting, {"teacher_context": "answer"})
        else:
            setting = noted(seed, folder)
            run, some = setting.harness.run, setting.harness.tasks(setting.tasks.read()[: TASKS * FEW])
            setting = replace(setting, tasks=some)
            first = run(sample, {"samples": 1}, model=setting.warm, tasks=some)["trajectories"]
            notes = run(reflect, tasks=some, trajectories=[first])["notes"]
            solved, spent = distilled(setting, {"teacher_context": "notes"}, notes=notes)
            taught = solved, spent + of_rollouts(first)
        arms["warm"].add(judged(setting, setting.warm), Spent())
        arms["taught by itself"].add(*taught)
        some = setting.harness.tasks(setting.tasks.read()[: TASKS * FEW])
        model, more, _ = rejected(setting, some, taught[1].sampled)
        arms["rejection"].add(judged(setting, model), more)
        model, more, _ = online(setting, iterations=FEW + (env == "rooms"))
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\nself_distill, {env}: {TASKS * FEW * SAMPLES:,} rollouts of the student a seed")
    table(arms)
    return gain(f"self_distill, {env}", arms, "GRPO", "taught by itself")


def labels() -> bool:
    """A label is one turn, so labels take three times the steps, of about as many trained tokens. The demonstrations of
    the warm policy are not learned again: they say wrong things of words."""
    from agentrl.pipelines.methods.dagger.correct import correct
    from agentrl.pipelines.stages.trajectories import sample

    names = ("warm", "rejection", "GRPO", "teacher's states", "student's states")
    arms = {name: Arm(name) for name in names}
    for seed, folder in seeds("labels", arms):
        setting, teacher = with_teacher(seed, folder)
        run, tasks = setting.harness.run, setting.harness.tasks(setting.tasks.read()[:STATES])
        arms["warm"].add(judged(setting, setting.warm), Spent())
        rows = run(sample, {"samples": 1}, model=setting.warm, tasks=tasks)["trajectories"]
        made = run(correct, {"mode": "label"}, model=setting.warm, trajectories=[rows], teacher=teacher)
        told = Spent(foreign=int(made.metrics["foreign_tokens"]), calls=int(made.metrics["environment_calls"]))
        model, more = curated(setting, [made["trajectories"]], LABEL_STEPS)
        own = of_rollouts(rows)
        arms["student's states"].add(judged(setting, model), own + told + more)
        others, plain = rollouts(setting, tasks, own.sampled // 2 + told.foreign)  # the nearest number of passes
        model, more = curated(setting, [successes(setting, others)])
        arms["rejection"].add(judged(setting, model), plain + more)
        model, more = as_online(setting, others)
        arms["GRPO"].add(judged(setting, model), more)
        given, cost = as_many(setting, teacher, tasks, told.foreign)
        model, more = curated(setting, [given])
        arms["teacher's states"].add(judged(setting, model), cost + more)
    print(f"\nlabels, words: one rollout of each of {STATES} tasks a seed")
    table(arms)
    met = [gain(f"labels, words, {name}", arms, "rejection", name, by="tokens") for name in names[3:]]
    met.append(gain("labels, words, student's states", arms, "GRPO", "student's states", by="tokens"))
    return gain("labels, words", arms, "teacher's states", "student's states", by="foreign") and all(met)


def as_many(setting: Setting, teacher: Any, tasks: Any, wanted: int) -> tuple[Any, Spent]:
    """Rollouts of a teacher until they have so many tokens, and what they cost."""
    selections, _ = rollouts(replace(setting, warm=teacher), tasks, wanted)
    rows, tokens = [], 0
    for row in (row for selection in selections for row in selection.read()):
        if tokens >= wanted:
            break
        name = f"taught-{len(rows)}"
        rows.append(row.model_copy(update={"trajectory_id": name, "episode_id": name, "group_id": None}))
        tokens += row.n_action_tokens
    return setting.harness.trajectories(rows), Spent(foreign=tokens, calls=sum(row.n_tool_calls for row in rows))
