"""The experiments of ``methods.py`` about continued rows: what they gain over whole rollouts of as many sampled tokens.

- slicing: GRPO on stored rows of levels that take several turns, whole rows or by the values of their turns
  (`bisect`).
- pairs: DPO on pairs of steps, from continuations at uncertain turns, by values of such turns, or from whole rollouts.
- eto, ipr: preferences of an expert's walks, and of its turns, over the policy's own.
- dagger: as many turns of an adviser, on its own states or on the student's; success, and recovery after a planted
  wrong turn.
- tree: GRPO on whole rollouts, four of each task, or on trees of as many sampled tokens.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from arms import SMALL, Arm, Solved, Spent, gain, measured, table
from methods import (
    BATCH,
    ITERATIONS,
    SAMPLES,
    SPLIT,
    TASKS,
    Setting,
    curated,
    judged,
    of_rollouts,
    online,
    prepared,
    rejected,
    rollouts,
    seeds,
    successes,
)

STATES, STEPS, JOINED_STEPS = (8, 2, 2) if SMALL else (192, 40, 200)
"""Tasks whose rollouts are looked at; training steps of offline methods, and on demonstrations and what is new."""


def settings(
    experiment: str, *tables: dict[str, Arm], env: str = "rooms", levels: frozenset[int] = frozenset()
) -> Iterator[tuple[Setting, Any]]:
    """A setting for each seed, and the first :data:`STATES` of its tasks; the warm policy is judged. With ``levels``,
    tasks and what is judged are of these; the warm policy has learned all levels."""
    for seed, folder in seeds(experiment, *tables):
        setting = prepared(env, seed, folder)
        setting = of_levels(setting, levels) if levels else setting
        tables[0]["warm"].add(judged(setting, setting.warm), Spent())
        yield setting, setting.harness.tasks(setting.tasks.read()[:STATES])


def of_levels(setting: Setting, levels: frozenset[int]) -> Setting:
    """A setting whose tasks, those that are judged, and dev tasks are of these levels."""
    given = setting.harness.tasks
    named = {"tasks": setting.tasks, "judged": setting.judged, "dev": setting.dev}
    of = {name: given([task for task in item.read() if task.level in levels]) for name, item in named.items()}
    return replace(setting, **of)


def as_online(setting: Setting, rows: list[Any]) -> tuple[Any, Spent]:
    """The warm policy after GRPO on as many fresh rollouts as these selections hold."""
    tasks = TASKS if SMALL else TASKS // 4
    iterations = max(1, round(sum(len(row.ids()) for row in rows) / tasks / SAMPLES))
    model, spent, _ = online(setting, iterations=iterations, tasks=tasks)
    return model, spent


def of_continuations(made: Any) -> Spent:
    return Spent(int(made.metrics["sampled_tokens"]), 0, int(made.metrics["environment_calls"]), 0)


def trained(setting: Setting, stage: Any, config: dict[str, Any], **inputs: Any) -> tuple[Any, Spent]:
    """The warm policy after :data:`STEPS` steps of a stage, and the tokens in the rows that it was trained on."""
    course = setting.course
    optimizer = {"lr": course.dpo_lr if stage.name == "train.dpo" else course.offline_lr, "schedule": "linear"}
    config = {"steps": STEPS, "batch": BATCH, "optimizer": optimizer, **config}
    try:
        made = setting.harness.run(stage, config, model=setting.warm, **inputs)
    except ValueError as error:
        if not any(name in str(error) for name in ("nothing to train on", "value no turn")):
            raise
        print(f"{stage.name}: {error}; the warm policy is judged", flush=True)
        return setting.warm, Spent()
    counts = [sum(row["mask"]) for row in made["rows"].table().select(["mask"]).to_pylist()]
    return made["model"], Spent(trained=round(STEPS * BATCH * sum(counts) / max(1, len(counts))))


LONG = {"rooms": frozenset(range(4, 9)), "words": frozenset({2, 3})}
"""Levels of tasks that take several turns."""


def slicing(env: str) -> bool:
    """What one learns from stored rows of long walks if forks say which turn lost."""
    from agentrl.pipelines.methods.slicing.steps import value
    from agentrl.pipelines.stages.train import offline
    from agentrl.pipelines.stages.trajectories import sample

    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO", "GRPO, whole rows", "GRPO, values")}
    for setting, tasks in settings(f"slicing {env}", arms, env=env, levels=LONG[env]):
        run = setting.harness.run
        tasks = setting.harness.tasks(tasks.read()[: STATES // 2])  # forks are many, and charged
        rows = run(sample, {"samples": SAMPLES // 2}, model=setting.warm, tasks=tasks)["trajectories"]
        steps = run(value, {"where": "bisect", "k": 2 if SMALL else 8}, model=setting.warm, trajectories=[rows])
        cost = of_rollouts(rows) + of_continuations(steps)
        config = {"algorithm": {"type": "grpo", "credit": "values"}}
        model, more = trained(
            setting, offline, config, trajectories=[rows, steps["trajectories"]], steps=[steps["steps"]]
        )
        arms["GRPO, values"].add(judged(setting, model), cost + more)
        others, spent = rollouts(setting, tasks, cost.sampled)
        model, more = trained(setting, offline, {"algorithm": {"type": "grpo"}}, trajectories=grouped(setting, others))
        arms["GRPO, whole rows"].add(judged(setting, model), spent + more)
        model, more = as_online(setting, others)
        arms["GRPO"].add(judged(setting, model), more)
        good = successes(setting, others)
        model, more = curated(setting, [good])
        arms["rejection"].add(judged(setting, model), spent + more)
    print(f"\nslicing, {env} of levels {min(LONG[env])} to {max(LONG[env])}: rollouts of {STATES // 2} tasks a seed")
    table(arms)
    return gain(f"slicing, {env}", arms, "GRPO, whole rows", "GRPO, values")


def grouped(setting: Setting, selections: list[Any]) -> list[Any]:
    """The rows of several runs of one policy as groups of their tasks."""
    rows = [row for selection in selections for row in selection.read()]
    update = [{"trajectory_id": f"g-{n}", "episode_id": f"g-{n}", "group_id": None} for n in range(len(rows))]
    return [setting.harness.trajectories([row.model_copy(update=new) for row, new in zip(rows, update, strict=True)])]


def pairs(env: str) -> bool:
    """Pairs of steps from four continuations of the least certain turn, or from whole rollouts, each step worth the
    mean reward through it; or of steps that are worth what four continuations before and after each of the two least
    certain turns say. These are so many that fewer tasks have as many tokens."""
    from agentrl.pipelines.methods.agentq.pairs import agentq
    from agentrl.pipelines.methods.fork.fork import fork
    from agentrl.pipelines.methods.slicing.steps import value
    from agentrl.pipelines.stages.train import dpo
    from agentrl.pipelines.stages.trajectories import sample

    names = ("warm", "rejection", "GRPO", "DPO, whole rollouts", "DPO, continuations", "DPO, values")
    arms = {name: Arm(name) for name in names}
    for setting, tasks in settings(f"pairs {env}", arms, env=env):
        run = setting.harness.run
        rows = run(sample, {"samples": 2}, model=setting.warm, tasks=tasks)["trajectories"]
        forked = run(fork, {"at": "uncertain", "turns": 1, "k": 4}, model=setting.warm, trajectories=[rows])
        cost = of_rollouts(rows) + of_continuations(forked)
        config = {"margin": 0.25, "per_task": 8}
        made = run(agentq, config, trajectories=[rows, forked["trajectories"]])
        print(f"pairs of continuations: {made.metrics}", file=sys.stderr, flush=True)
        model, more = trained(setting, dpo, {"beta": 0.1}, pairs=[made["pairs"]])
        arms["DPO, continuations"].add(judged(setting, model), cost + more)
        few = setting.harness.tasks(tasks.read()[: STATES * 2 // 9])
        rows = run(sample, {"samples": 8}, model=setting.warm, tasks=few)["trajectories"]
        valued = run(value, {"where": "uncertain", "turns": 2, "k": 4}, model=setting.warm, trajectories=[rows])
        made = run(agentq, {**config, "apart": False}, trajectories=[rows], values=[valued["steps"]])
        print(f"pairs by values: {made.metrics}", file=sys.stderr, flush=True)
        model, more = trained(setting, dpo, {"beta": 0.1}, pairs=[made["pairs"]])
        arms["DPO, values"].add(judged(setting, model), of_rollouts(rows) + of_continuations(valued) + more)
        others, spent = rollouts(setting, tasks, cost.sampled)
        made = run(agentq, config, trajectories=others)
        model, more = trained(setting, dpo, {"beta": 0.1}, pairs=[made["pairs"]])
        arms["DPO, whole rollouts"].add(judged(setting, model), spent + more)
        model, more = as_online(setting, others)
        arms["GRPO"].add(judged(setting, model), more)
        model, more = curated(setting, [successes(setting, others)])
        arms["rejection"].add(judged(setting, model), spent + more)
    print(f"\npairs, {env}: rollouts of {STATES} tasks a seed")
    table(arms)
    met = gain(f"pairs, {env}", arms, "DPO, whole rollouts", "DPO, continuations")
    return gain(f"pairs, {env}, values", arms, "DPO, whole rollouts", "DPO, values") and met


def of_expert(setting: Setting, rows: Any) -> Spent:
    """What an expert wrote, in tokens of the policy."""
    from agentrl.chat.codec import tokenize
    from agentrl.models.policy import Policy

    policy = Policy.load(setting.warm.path)
    return Spent(foreign=sum(tokenize(row, policy.codec, "").n_action_tokens for row in rows.read()))


def eto() -> bool:
    """Three rounds of preferences, the expert's walks over the policy's failures, against what these walks and as many
    rollouts give otherwise."""
    from agentrl.pipelines.methods.eto.outcome import outcome
    from agentrl.pipelines.stages.train import dpo
    from agentrl.pipelines.stages.trajectories import sample, synthesize

    arms = {name: Arm(name) for name in ("warm", "expert", "rejection", "GRPO", "ETO, one round", "ETO")}
    for setting, tasks in settings("eto", arms):
        run, now, spent, result = setting.harness.run, setting, Spent(), list[Any]()
        perfect = run(synthesize, tasks=tasks)["trajectories"]
        shown = of_expert(setting, perfect)
        for beta in (0.1,) if SMALL else (0.1, 0.5, 0.5):
            result.append(run(sample, {"samples": 4}, model=now.warm, tasks=tasks)["trajectories"])
            pairs = run(outcome, trajectories=[perfect, result[-1]], model=now.warm)["pairs"]
            model, more = trained(now, dpo, {"beta": beta, "nll": 0.2}, pairs=[pairs])
            now, spent = replace(setting, warm=model), spent + of_rollouts(result[-1]) + more
            if len(result) == 1:
                arms["ETO, one round"].add(judged(setting, model), spent + shown)
        arms["ETO"].add(judged(setting, now.warm), spent + shown)
        others, plain = rollouts(setting, tasks, spent.sampled)
        good = successes(setting, others)
        for name, given, cost in (("expert", [perfect], shown), ("rejection", [good, perfect], shown + plain)):
            model, more = curated(setting, given)
            arms[name].add(judged(setting, model), cost + more)
        model, more = as_online(setting, result)
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\neto, rooms: the expert's walks and 12 rollouts of {STATES} tasks a seed")
    table(arms)
    return gain("eto, rooms", arms, "rejection", "ETO")


def ipr() -> bool:
    """Preferences of the expert's turns over the policy's, by continuations, and of its walks, against what these walks
    and as many tokens of rollouts give otherwise."""
    from agentrl.pipelines.methods.agentq.pairs import agentq
    from agentrl.pipelines.methods.eto.outcome import outcome
    from agentrl.pipelines.methods.fork.fork import fork
    from agentrl.pipelines.methods.slicing.steps import value
    from agentrl.pipelines.stages.train import dpo
    from agentrl.pipelines.stages.trajectories import synthesize

    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO", "IPR")}
    for setting, tasks in settings("ipr", arms):
        run, warm, some = setting.harness.run, setting.warm, setting.harness.tasks(tasks.read()[: STATES // 4])
        perfect = run(synthesize, tasks=some)["trajectories"]
        shown = of_expert(setting, perfect)
        acted = run(fork, {"at": "all", "k": 1}, model=warm, trajectories=[perfect])
        both = [perfect, acted["trajectories"]]
        valued = run(value, {"where": "all", "k": 5}, model=warm, trajectories=both)
        config = {"margin": 0.01, "apart": False, "per_task": 8}
        steps = run(agentq, config, trajectories=both, values=[valued["steps"]], model=warm)
        print(f"ipr: {steps.metrics}", file=sys.stderr, flush=True)
        [item], more = rollouts(setting, some, 1)
        spent = of_continuations(acted) + of_continuations(valued) + more
        pairs = [steps["pairs"], run(outcome, trajectories=[perfect, item], model=warm)["pairs"]]
        model, more = trained(setting, dpo, {"beta": 0.1, "nll": 0.2}, pairs=pairs)
        arms["IPR"].add(judged(setting, model), spent + shown + more)
        others, plain = rollouts(setting, tasks, spent.sampled)
        good = successes(setting, others)
        model, more = curated(setting, [good, perfect])
        arms["rejection"].add(judged(setting, model), plain + shown + more)
        model, more = as_online(setting, others)
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\nipr, rooms: the expert's walks of {STATES // 4} tasks a seed")
    table(arms)
    return gain("ipr, rooms", arms, "rejection", "IPR")


def dagger() -> bool:
    """As many turns of an adviser: on the walks of the expert itself, or in the states of the student.

    All learn from the demonstrations of the warm policy and what is new (D and D_i), in as many steps: on labels of
    lost states alone, a policy forgets the ways that it knew.
    """
    from agentrl.pipelines.methods.dagger.correct import correct
    from agentrl.pipelines.stages.trajectories import sample, synthesize

    names = ("warm", "rejection", "GRPO", "expert's states", "student's states")
    arms, recovered = ({name: Arm(name) for name in names} for _ in range(2))

    def add(setting: Setting, name: str, model: Any, spent: Spent) -> None:
        arms[name].add(judged(setting, model), spent)
        recovered[name].add(recovery(setting, model), spent)

    for setting, tasks in settings("dagger", arms, recovered):
        recovered["warm"].add(recovery(setting, setting.warm), Spent())
        run = setting.harness.run
        rows = run(sample, {"samples": 1}, model=setting.warm, tasks=tasks)["trajectories"]
        walks = run(synthesize, tasks=setting.tasks)["trajectories"]

        def joined(selections: list[Any], setting: Setting = setting, walks: Any = walks) -> tuple[Any, Spent]:
            return curated(setting, [walks, *selections], JOINED_STEPS, lr=2e-3)

        labels = run(correct, {"mode": "label"}, model=setting.warm, trajectories=[rows])
        told = Spent(foreign=int(labels.metrics["foreign_tokens"]), calls=int(labels.metrics["environment_calls"]))
        model, more = joined([labels["trajectories"]])
        add(setting, "student's states", model, of_rollouts(rows) + told + more)
        turns, shown = len(labels["trajectories"].ids()), list[Any]()
        for walk in walks.read():
            if turns > 0:
                shown.append(walk.model_copy(update={"trajectory_id": f"w-{len(shown)}"}))
                turns -= walk.n_steps
        model, more = joined([setting.harness.trajectories(shown)])
        calls = sum(walk.n_tool_calls for walk in shown)
        add(setting, "expert's states", model, Spent(foreign=told.foreign, calls=calls) + more)
        others, spent = rollouts(setting, tasks, of_rollouts(rows).sampled + told.foreign)
        add(setting, "GRPO", *as_online(setting, others))
        model, more = joined([successes(setting, others)])
        add(setting, "rejection", model, spent + more)
    print(f"\ndagger, rooms: walks of {STATES} tasks a seed")
    table(arms)
    print("dagger, rooms: success after a planted wrong turn")
    table(recovered)
    better = gain("dagger, rooms", arms, "expert's states", "student's states", by="foreign")
    met = gain("dagger, recovery", recovered, "expert's states", "student's states", by="foreign")
    return met and better


def recovery(setting: Setting, model: Any) -> Solved:
    """Success after a planted wrong turn: the first door leads away from the goal, then the policy acts."""
    from agentrl.pipelines.methods.fork.fork import fork
    from agentrl.rollouts.demonstrations import demonstrate

    house, count = _astray(), itertools.count()

    def play(tasks: Any, temperature: float) -> dict[str, float]:
        name = f"astray-{model.name}-{next(count)}"
        walks = [demonstrate(house, task, 0.0, 0, f"{name}-{task.task_id}") for task in tasks.read()]
        planted = setting.harness.trajectories(walks)
        config = {"at": [1], "k": 1, "measure": True, "sampling": {"temperature": temperature}}
        made = setting.harness.run(fork, config, model=model, trajectories=[planted], tasks=[tasks])
        result = made["trajectories"].table(["task_id", "success"]).to_pylist()
        return {row["task_id"]: float(bool(row["success"])) for row in result}

    return measured(play, setting.dev, setting.judged)


def _astray() -> Any:
    """`rooms` with an expert who goes through a door that leads as far from the goal as any, and gives up."""
    from agentrl.environments.rooms.environment import Rooms, RoomsConfig
    from agentrl.environments.rooms.house import DOORS
    from agentrl.schemas.trajectory import Message, Role, ToolCall

    class Astray(Rooms):
        def demonstrate(self, task: Any, noise: float, random: Random) -> Iterator[Message]:
            where, house = json.loads(task.metadata), self.house
            ahead = house.distances(house.numbers[where["goal"]])
            behind = dict(zip(DOORS, house.leads[house.numbers[where["start"]]], strict=True))
            farthest = max(ahead[room] for room in behind.values())
            door = random.choice([door for door, room in behind.items() if ahead[room] == farthest])
            call = ToolCall(id="call_0", name="go", arguments=json.dumps({"door": door}))
            yield Message(role=Role.ASSISTANT, content=f"{house.names[behind[door]]}.", tool_calls=[call])
            yield Message(role=Role.ASSISTANT, content="here")

    return Astray(RoomsConfig(spoken=True))


SHAPES = {"rooms": "2 trees, 2 nodes", "words": "2 trees, 2 nodes"}
TREES = {
    "2 trees, 2 nodes": {"samples": 6, "fork": {"trees": 2, "nodes": 2, "rounds": 1}},
    "4 trees, 1 node": {"samples": 8, "fork": {"trees": 4, "nodes": 1, "rounds": 1}},
}


def tree(env: str) -> bool:
    """GRPO on trees, of two whole rollouts and two continuations of each, and on whole rollouts of as many tokens."""
    ways = {f"Tree-GRPO, {name}": way for name, way in TREES.items() if SPLIT == "dev" or name == SHAPES[env]}
    plain = () if SPLIT == "dev" else ("rejection", "GRPO")
    arms = {name: Arm(name) for name in ("warm", *plain, *ways)}
    samples = 4 if env == "rooms" else SAMPLES
    for setting, tasks in settings(f"tree {env}", arms, env=env):
        for name, way in ways.items():
            model, spent, _ = online(setting, tasks=2 * TASKS, **way)
            arms[name].add(judged(setting, model), spent)
        if not plain:
            continue
        model, more, each = rejected(setting, tasks if env == "rooms" else setting.tasks, spent.sampled)
        arms["rejection"].add(judged(setting, model), more)
        model, more, _ = online(setting, tasks=round(spent.sampled / each / samples / ITERATIONS), samples=samples)
        arms["GRPO"].add(judged(setting, model), more)
    print(f"\ntree, {env}: {2 * TASKS} tasks in each of {ITERATIONS} iterations")
    table(arms)
    met = [gain(f"{name}, {env}", arms, before, name) for name in ways for before in plain]
    return all(met)
