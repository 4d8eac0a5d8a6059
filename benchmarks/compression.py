"""The experiment of ``methods.py`` about context compression: `rooms`, with walks of up to 30 steps.

Three ways to keep an episode in a context. One policy imitates walks of an expert; for each way a copy of it imitates
them in the form in which it rolls out, and then learns by rejection sampling or GRPO:

- full: the whole walk stands in the context, up to 704 tokens; the ceiling.
- window: 160 tokens. The last step stays, those before are dropped.
- summary: 160 tokens. The policy sums up, and the last step stays. Its summaries are demonstrated: the last rooms.

Summaries are sampled tokens too, so the others get more rollouts: as many as make up for them.

segment: policies of the window that have imitated the expert's walks that fit, all of them as far as they fit, or all
of them in segments, on as many tokens; and what the first one learns by rejection sampling and GRPO.

An expert writes a walk before anybody knows whether it fits. So every arm is charged for all walks.
"""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arms import SMALL, Arm, Solved, Spent, gain, measured, table
from branching import of_expert
from courses import COURSES
from methods import (
    BATCH,
    ITERATIONS,
    SAMPLES,
    TASKS,
    Setting,
    curated,
    expert,
    imitated,
    of_rollouts,
    seeds,
    successes,
)
from methods import online as trained_online

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

LIMITS = {"max_steps": 4 if SMALL else 30}
ROUNDS = ITERATIONS if SMALL else ITERATIONS // 2
TURN = 24
CUT = {"limit": 104, "keep_last": 1, "segments": 16, "ask": "So far?"}
WAYS: dict[str, dict[str, Any]] = {
    "summary": {"max_turn_tokens": TURN, "max_tokens": 160, "compress": {**CUT, "by": "summary"}},
    "window": {"max_turn_tokens": TURN, "max_tokens": 160, "compress": {**CUT, "by": "drop"}},
    "full": {"max_turn_tokens": TURN, "max_tokens": 704},
}
ENV = "rooms, 30 steps"
LONGER = 2
"""Times the course's steps, from which on rows that fit gain nothing more on dev tasks."""


def compress() -> bool:
    """Ways to keep an episode in a context, at as many sampled tokens."""
    names = ("warm", "rejection", "GRPO")
    arms = {f"{way}, {name}": Arm(f"{way}, {name}") for way in WAYS for name in names}
    lost: dict[str, int] = dict.fromkeys(WAYS, 0)
    for seed, folder in seeds("compress", arms):
        harness, tasks, shown = expert(ENV, seed, folder)
        start = imitated("whole walks", ENV, harness, tasks, [shown])
        each, given = 0.0, of_expert(start, shown)
        for way, sampling in WAYS.items():
            setting = _formed(start, shown, sampling)
            arms[f"{way}, warm"].add(_judged(setting, setting.warm, sampling), given)
            some = harness.tasks(setting.tasks.read()[: TASKS * ROUNDS])
            once = _played(setting, setting.warm, some, sampling, 1)
            mine = of_rollouts(once["trajectories"]).sampled / len(some.read())
            each = each or mine  # of the first way: what a rollout with summaries costs
            samples, rounds = max(1, round(SAMPLES * each / mine)), max(1, round(ROUNDS * each / mine))
            made = _played(setting, setting.warm, some, sampling, samples)
            lost[way] += int(made.metrics.get("out_of_context", 0))
            good = successes(setting, [made["trajectories"]])
            model, more = curated(setting, [good])
            spent = given + of_rollouts(made["trajectories"]) + more
            arms[f"{way}, rejection"].add(_judged(setting, model, sampling), spent)
            model, more, _ = trained_online(setting, iterations=rounds, limits=LIMITS, **sampling)
            arms[f"{way}, GRPO"].add(_judged(setting, model, sampling), given + more)
    print(f"\ncompress, rooms of up to 30 steps: {TASKS * ROUNDS * SAMPLES:,} rollouts a seed with summaries")
    table(arms, start="window, warm")
    print(f"warm rollouts that ran out of segments or context: {lost}")
    met = []
    for way in ("full", "summary"):
        for name in names[1:]:
            before, after = f"window, {name}", f"{way}, {name}"
            met.append(gain(f"compress, {after}", arms, before, after, start="window, warm"))
    return any(met)


def segment() -> bool:
    """All policies are given the same walks, and learn from as many tokens of them."""
    ways = ("rows that fit", "rows cut off", "segments")
    arms = {name: Arm(name) for name in ("untrained", *ways, "rejection", "GRPO")}
    sampling = WAYS["window"]
    for seed, folder in seeds("segment", arms):
        harness, tasks, shown = expert(ENV, seed, folder)
        start = imitated("whole walks", ENV, harness, tasks, [shown])
        rows = _rows_of_window(start, shown, sampling)
        print(f"segment, seed {seed}: {_sizes(rows)} of {len(shown.ids())} walks", file=sys.stderr, flush=True)
        given = of_expert(start, shown)
        blank = harness.model(_untrained(start).save)
        each = {name: _tokens(start, row) for name, row in rows.items()}
        policies = {}
        for name, row in rows.items():
            kinds = LONGER * min(each.values()) / each[name]
            policies[name] = imitated(name, ENV, harness, tasks, [row], kinds=kinds, model=blank)
            taught = Spent(trained=policies[name].taught)
            arms[name].add(_judged(policies[name], policies[name].warm, sampling), given + taught)
        setting = policies["rows that fit"]
        arms["untrained"].add(_judged(setting, blank, sampling), Spent())
        some = harness.tasks(setting.tasks.read()[: TASKS * ROUNDS])
        made = _played(setting, setting.warm, some, sampling, SAMPLES)["trajectories"]
        model, more = curated(setting, [successes(setting, [made])])
        arms["rejection"].add(_judged(setting, model, sampling), given + of_rollouts(made) + more)
        model, more, _ = trained_online(setting, iterations=ROUNDS, limits=LIMITS, **sampling)
        arms["GRPO"].add(_judged(setting, model, sampling), given + more)
    print(f"\nsegment, rooms of up to 30 steps: walks of an expert in a window of {sampling['max_tokens']} tokens")
    table(arms, start="untrained")
    met = [gain("segment", arms, before, "segments", by="trained", start="untrained") for before in ways[:2]]
    return all(met)


def _rows_of_window(setting: Setting, shown: Any, sampling: dict[str, Any]) -> dict[str, Any]:
    """The expert's walks that fit the window; all of them, those that do not fit up to their last step that does; and
    all of them in segments."""
    cut = _cut(setting, shown, sampling)
    whole, given = set(shown.ids()) & set(cut.ids()), setting.harness.trajectories
    fitting = [row for row in shown.read() if row.trajectory_id in whole]
    first = [row for row in cut.read() if row.trajectory_id not in whole and not row.segment]
    copies = {
        name: [row.model_copy(update={"trajectory_id": f"{name}-{n}"}) for n, row in enumerate(rows)]
        for name, rows in (("fits", fitting), ("off", [*fitting, *first]))
    }
    return {"rows that fit": given(copies["fits"]), "rows cut off": given(copies["off"]), "segments": cut}


def _sizes(rows: dict[str, Any]) -> str:
    return ", ".join(f"{len(row.ids())} {name}" for name, row in rows.items())


def _tokens(setting: Setting, rows: Any) -> float:
    """Tokens of a row that are trained on, on average; rows of the expert are text."""
    return of_expert(setting, rows).foreign / max(1, len(rows.ids()))


def _untrained(setting: Setting) -> "Policy":
    """A policy of the setting's size, whose tokenizer is that of the setting too: segments have tokens."""
    from agentrl.models.policy import Policy, load_tokenizer
    from agentrl.models.tiny import TinySize, init_model

    tokenizer, size = load_tokenizer(setting.warm.path), TinySize(context=COURSES[ENV].context)
    return Policy(init_model(tokenizer, setting.harness.seed, size), tokenizer, name="untrained")


def _played(setting: Setting, model: Any, tasks: Any, sampling: dict[str, Any], samples: int) -> Any:
    from agentrl.pipelines.stages.trajectories import sample

    config = {"samples": samples, "sampling": sampling, "limits": LIMITS}
    return setting.harness.run(sample, config, model=model, tasks=tasks)


def _formed(setting: Setting, shown: Any, sampling: dict[str, Any]) -> Setting:
    """The policy of whole walks, after half as many steps on them in the form in which its own are rolled out."""
    from agentrl.pipelines.stages.train import sft

    rows = _cut(setting, shown, sampling) if "compress" in sampling else shown
    steps = COURSES[ENV].warm_steps // 2
    optimizer = {"lr": 2e-3, "schedule": "cosine", "warmup": min(20, steps // 2)}
    config = {"steps": steps, "batch": BATCH, "optimizer": optimizer}
    made = setting.harness.run(sft, config, trajectories=[rows], model=setting.warm)
    return replace(setting, warm=made["model"])


def _cut(setting: Setting, shown: Any, sampling: dict[str, Any]) -> Any:
    """The expert's walks in the form in which they are rolled out: rows of one window."""
    from agentrl.pipelines.methods.compress.segment import segment

    given = sampling["compress"]
    # a segment of rollouts ends with the turn after the limit, and with the summary
    config = {"limit": given["limit"] + TURN, **{name: given[name] for name in ("keep_last", "by", "ask")}}
    return setting.harness.run(segment, config, trajectories=[shown], model=setting.warm)["trajectories"]


def _judged(setting: Setting, model: Any, sampling: dict[str, Any]) -> Solved:
    """What one rollout solves of each task."""
    from agentrl.rollouts.segments import firsts

    def play(tasks: Any, temperature: float) -> dict[str, float]:
        made = _played(setting, model, tasks, {**sampling, "temperature": temperature}, 1)
        return {row.task_id: float(row.scored_success()) for row in firsts(made["trajectories"].read())}

    return measured(play, setting.dev, setting.judged)
