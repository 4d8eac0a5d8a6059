"""The experiment of ``methods.py`` about context compression: `rooms`, with walks of up to 30 steps.

Three ways to keep an episode in a context. One policy imitates walks of an expert; for each way a copy of it imitates
them in the form in which it rolls out, and then learns by rejection sampling or GRPO:

- full: the whole walk stands in the context, up to 704 tokens; the ceiling.
- window: 160 tokens. The last step stays, those before are dropped.
- summary: 160 tokens. The policy sums up, and the last step stays. Its summaries are demonstrated: the last rooms.

Summaries are sampled tokens too, so the others get more rollouts: as many as make up for them.
"""

from dataclasses import replace
from typing import Any

from methods import (
    ITERATIONS,
    SAMPLES,
    SMALL,
    TASKS,
    WARM_STEPS,
    Arm,
    Setting,
    Spent,
    curated,
    expert,
    gain,
    imitated,
    of_rollouts,
    seeds,
    table,
)
from methods import online as trained_online

LIMITS = {"max_steps": 30}
ROUNDS = ITERATIONS if SMALL else ITERATIONS // 2
TURN = 24
CUT = {"limit": 104, "keep_last": 1, "segments": 16, "ask": "So far?"}
WAYS: dict[str, dict[str, Any]] = {
    "summary": {"max_turn_tokens": TURN, "max_tokens": 160, "compress": {**CUT, "by": "summary"}},
    "window": {"max_turn_tokens": TURN, "max_tokens": 160, "compress": {**CUT, "by": "drop"}},
    "full": {"max_turn_tokens": TURN, "max_tokens": 704},
}
ENV = "rooms, 30 steps"


def compress() -> bool:
    """Ways to keep an episode in a context, at as many sampled tokens."""
    names = ("warm", "rejection", "GRPO")
    arms = {f"{way}, {name}": Arm(f"{way}, {name}") for way in WAYS for name in names}
    lost: dict[str, int] = dict.fromkeys(WAYS, 0)
    for seed, folder in seeds("compress", arms):
        harness, tasks, shown = expert(ENV, seed, folder)
        start = imitated("whole walks", ENV, harness, tasks, [shown])
        each = 0.0
        for way, sampling in WAYS.items():
            setting = _formed(start, shown, sampling)
            arms[f"{way}, warm"].add(_judged(setting, setting.warm, sampling), Spent())
            some = harness.tasks(setting.tasks.read()[: TASKS * ROUNDS])
            mine = _played(setting, setting.warm, some, sampling, 1).sampled_of_each
            each = each or mine  # of the first way: what a rollout with summaries costs
            samples, rounds = max(1, round(SAMPLES * each / mine)), max(1, round(ROUNDS * each / mine))
            made = _played(setting, setting.warm, some, sampling, samples)
            lost[way] += made.out_of_context
            model, more = curated(setting, [made.good])
            arms[f"{way}, rejection"].add(_judged(setting, model, sampling), made.spent + more)
            model, more, _ = trained_online(setting, iterations=rounds, limits=LIMITS, **sampling)
            arms[f"{way}, GRPO"].add(_judged(setting, model, sampling), more)
    print(f"\ncompress, rooms of up to 30 steps: {TASKS * ROUNDS * SAMPLES:,} rollouts a seed with summaries")
    table(arms)
    print(f"warm rollouts that ran out of segments or context: {lost}")
    gain("compress, full context", arms["window, GRPO"], arms["full, GRPO"])
    return gain("compress, summary", arms["window, GRPO"], arms["summary, GRPO"])


class _Played:
    """Rollouts: the kept ones, and what they cost."""

    def __init__(self, made: Any, harness: Any) -> None:
        from pipelines.stages.trajectories import reject

        self.rows = made["trajectories"]
        self.spent = of_rollouts(self.rows)
        self.sampled_of_each = self.spent.sampled / made.metrics["rows"]
        self.out_of_context = int(made.metrics.get("out_of_context", 0))
        self.good = harness.run(reject, {"keep": 2}, trajectories=[self.rows])["trajectories"]


def _played(setting: Setting, model: Any, tasks: Any, sampling: dict[str, Any], samples: int) -> _Played:
    from pipelines.stages.trajectories import sample

    config = {"samples": samples, "sampling": sampling, "limits": LIMITS}
    return _Played(setting.harness.run(sample, config, model=model, tasks=tasks), setting.harness)


def _formed(setting: Setting, shown: Any, sampling: dict[str, Any]) -> Setting:
    """The policy of whole walks, after as many steps on them in the form in which its own are rolled out."""
    from pipelines.stages.train import sft

    rows = _cut(setting, shown, sampling) if "compress" in sampling else shown
    optimizer = {"lr": 2e-3, "schedule": "cosine", "warmup": 20}
    config = {"steps": WARM_STEPS[ENV] // 2, "batch": 32, "optimizer": optimizer}
    made = setting.harness.run(sft, config, trajectories=[rows], model=setting.warm)
    return replace(setting, warm=made["model"])


def _cut(setting: Setting, shown: Any, sampling: dict[str, Any]) -> Any:
    """The expert's walks in the form in which they are rolled out: rows of one window."""
    from pipelines.stages.segment import segment

    given = sampling["compress"]
    # a segment of rollouts ends with the turn after the limit, and with the summary
    config = {"limit": given["limit"] + TURN, **{name: given[name] for name in ("keep_last", "by", "ask")}}
    return setting.harness.run(segment, config, trajectories=[shown], model=setting.warm)["trajectories"]


def _judged(setting: Setting, model: Any, sampling: dict[str, Any]) -> dict[str, float]:
    """Task -> success of one rollout at temperature 1."""
    from agentrl.rollouts.segments import firsts

    rows = firsts(_played(setting, model, setting.judged, sampling, 1).rows.read())
    return {row.task_id: float(row.scored_success()) for row in rows}
