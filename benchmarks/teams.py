"""The experiment of ``methods.py`` about several agents: a planner says which doors to take in `rooms`, a walker goes.

- teams: GRPO on episodes of both, with joint credit, or with the walker's alternatives after the same plan (marginal
  credit), at as many sampled tokens. Rejection sampling on the joint episodes, and GRPO of a walker alone, beside them.
"""

import json
from typing import Any

from arms import SMALL, Arm, Solved, Spent, gain, measured, table
from branching import STATES, trained
from methods import LR, TASKS, Setting, curated, expert, imitated, judged, online, seeds

PLAN = {"name": "planner", "ask": "plan?"}
PLANS, WALKS = (2, 2) if SMALL else (4, 2)


def teams() -> bool:
    from agentrl.pipelines.stages.train import offline

    arms = {name: Arm(name) for name in ("warm", "rejection", "GRPO, alone", "GRPO, joint", "GRPO, marginal")}
    for seed, folder in seeds("teams", arms):
        setting = shown_both(seed, folder)
        tasks = setting.harness.tasks(setting.tasks.read()[:STATES])
        arms["warm"].add(together(setting, setting.warm), Spent())
        rows, spent = acted(setting, tasks, samples=PLANS, acts=WALKS)
        config = {"algorithm": {"type": "grpo", "credit": "fork_turn"}}
        model, more = trained(setting, offline, config, trajectories=[rows])
        arms["GRPO, marginal"].add(together(setting, model), spent + more)
        each = tokens_of(rows, "planner") + tokens_of(rows, "walker")
        joint, cost = acted(setting, tasks, samples=max(2, round(spent.sampled / len(tasks.read()) / each)))
        config = {"algorithm": {"type": "grpo", "credit": "joint"}}
        model, more = trained(setting, offline, config, trajectories=[joint])
        arms["GRPO, joint"].add(together(setting, model), cost + more)
        model, more = curated(setting, [solved(setting, joint)])
        arms["rejection"].add(together(setting, model), cost + more)
        drawn = max(1, TASKS // 4)
        iterations = max(1, round(spent.sampled / tokens_of(rows, "walker") / drawn / 8))
        model, more, _ = online(setting, tasks=drawn, samples=8, iterations=iterations)
        arms["GRPO, alone"].add(judged(setting, model), more)  # another task: it walks without a plan
    print(f"\nteams, rooms: a planner and a walker, {STATES} tasks a seed, learning rate {LR['offline']}")
    table(arms)
    return gain("teams, rooms", arms, "GRPO, joint", "GRPO, marginal")


def shown_both(seed: int, folder: Any) -> Setting:
    """A model that has imitated both: a planner who names the doors of a shortest way, and a walker who was told. Some
    walks are shown without a plan, so that the model can walk alone. With the steps of one kind of rows it learns none
    of the three: plans were right in 2 of 96 dev tasks, and walks in 4."""
    from agentrl.environments import load_environment
    from agentrl.pipelines.methods.team.speaking import shown
    from agentrl.rollouts.demonstrations import demonstrate
    from agentrl.rollouts.rationalize import literal
    from agentrl.schemas.trajectory import Message, Role

    harness, tasks, walks = expert("rooms", seed, folder)
    rows = []
    for number, task in enumerate(tasks["train"].read()):
        house: Any = load_environment(task.env)
        where = json.loads(task.metadata)
        room, doors = house.house.numbers[where["start"]], list[str]()
        while (goal := house.house.numbers[where["goal"]]) != room:
            doors.append(house.house.shortest(room, goal))
            room = house.house.leads[room][("left", "right", "tunnel").index(doors[-1])]
        plan = " ".join(doors)
        told = demonstrate(house, task, 0.0, seed, f"walker-{number}", literal(shown("planner", plan)))
        messages = [Message(role=Role.USER, content=f"{task.prompt} plan?"), Message(role=Role.ASSISTANT, content=plan)]
        spoke = {"trajectory_id": f"planner-{number}", "episode_id": f"planner-{number}", "messages": messages}
        plain = {"tools": "[]", "n_steps": 1, "n_tool_calls": 0}
        rows += [told, told.model_copy(update={**spoke, **plain})]
    return imitated("team", "rooms", harness, tasks, [walks, harness.trajectories(rows)], kinds=3)


def acted(setting: Setting, tasks: Any, model: Any = None, **config: Any) -> tuple[Any, Spent]:
    """Rollouts of both agents, and what they cost."""
    from agentrl.pipelines.methods.team.team import team

    made = setting.harness.run(team, {"speakers": [PLAN], **config}, model=model or setting.warm, tasks=tasks)
    return made["trajectories"], Spent(int(made.metrics["sampled_tokens"]), 0, int(made.metrics["environment_calls"]))


def together(setting: Setting, model: Any) -> Solved:
    """What one rollout of both agents solves of each task."""

    def play(tasks: Any, temperature: float) -> dict[str, float]:
        rows, _ = acted(setting, tasks, model, samples=1, sampling={"temperature": temperature})
        result = rows.table(["task_id", "agent", "success"]).to_pylist()
        return {row["task_id"]: float(bool(row["success"])) for row in result if row["agent"] == "walker"}

    return measured(play, setting.dev, setting.judged)


def tokens_of(rows: Any, agent: str) -> float:
    """Sampled tokens of a row of one agent, on average."""
    result = rows.table(["agent", "n_action_tokens"]).to_pylist()
    counts = [row["n_action_tokens"] for row in result if row["agent"] == agent]
    return max(1.0, sum(counts) / max(1, len(counts)))


def solved(setting: Setting, rows: Any) -> Any:
    """Both rows of one successful episode of each task."""
    kept: dict[str, list[str]] = {}
    for row in rows.table(["task_id", "episode_id", "success"]).to_pylist():
        mine = kept.setdefault(row["task_id"], [])
        if row["success"] and row["episode_id"] not in mine and not mine:
            mine.append(row["episode_id"])
    chosen = {name for mine in kept.values() for name in mine}
    matches = [row for row in rows.read() if row.episode_id in chosen]
    update = [{"trajectory_id": f"kept-{number}"} for number in range(len(matches))]
    return setting.harness.trajectories([row.model_copy(update=new) for row, new in zip(matches, update, strict=True)])
