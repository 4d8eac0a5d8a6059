"""The stage that tables evaluations by what tasks are about: their tags, and the subgoals that they are made of."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from agentrl.pipelines.handles import Table, Tasks, Trajectories
from agentrl.pipelines.parts.common import count
from agentrl.pipelines.parts.stored_tasks import KnownTasks, TaskKey, key_of
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rollouts.segments import by_attempt, whole
from agentrl.schemas.task import Task
from agentrl.statistics.intervals import wilson_of_tasks

DECODINGS = ("sampled", "greedy")
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("policy", "decoding", "split", "tag")]
    + [(name, pa.int64()) for name in ("attempts", "successes")]
    + [(name, pa.float64()) for name in ("success", "low", "high")]
    + [(name, pa.int64()) for name in ("tried", "reached")]
    + [("share_reached", pa.float64())]
)


class TagsConfig(StageConfig):
    pass


class TaskTags(NamedTuple):
    """What the metadata of a task say that it is about: ``tags`` in any order, and names of its ``subgoals`` in the
    order in which they are reached."""

    tags: frozenset[str]
    subgoals: tuple[str, ...]


class Tally:
    """Counts of the rollouts of one policy in one decoding, by tag."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[TaskKey, list[bool]]] = defaultdict(lambda: defaultdict(list))
        self.tried, self.reached = Counter[str](), Counter[str]()

    def add(self, task: TaskKey, about: TaskTags, success: bool, reached: Sequence[Any]) -> None:
        """One rollout; ``reached`` says of each subgoal what reached it, None if nothing did."""
        for tag in about.tags:
            self.outcomes[tag][task].append(success)
        for name, by in zip(about.subgoals, reached, strict=False):
            self.tried[name] += 1
            if by is None:
                return
            self.reached[name] += 1

    def rows(self) -> Iterator[dict[str, Any]]:
        for tag, by_task in sorted(self.outcomes.items()):
            outcomes = list(by_task.values())
            attempts, successes = sum(map(len, outcomes)), sum(map(sum, outcomes))
            low, high = wilson_of_tasks(outcomes)
            share = {"success": successes / attempts, "low": low, "high": high}
            row: dict[str, Any] = {"tag": tag, "attempts": attempts, "successes": successes, **share}
            if tried := self.tried[tag]:
                row |= {"tried": tried, "reached": self.reached[tag], "share_reached": self.reached[tag] / tried}
            yield row


@stage("evaluate.tags", version=1)
def tags(
    context: Context,
    config: TagsConfig,
    attempts: list[Trajectories],
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
) -> Table:
    """Success of evaluations by each tag of their tasks, and how often a policy reaches each subgoal.

    A task has the ``tags`` and the named ``subgoals`` of its metadata, each name a tag too. A row for each policy,
    decoding, split and tag: policy, decoding, split, tag, attempts, successes, success, low, high (Wilson 95 %, by the
    effective number of attempts if tasks were attempted several times); and of subgoals: tried (rollouts that had
    reached all subgoals before it), reached, and share_reached, of these. Unscored rows, rows of other decodings and
    rows of tasks that have no tag are left out and counted. ``tasks`` are needed if the store has two of one id.
    """
    known = KnownTasks(attempts, tasks)
    abouts: dict[TaskKey, TaskTags] = {}
    tallies: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
    left_out: Counter[str] = Counter()
    for selection in attempts:
        for row in map(whole, by_attempt(selection.read())):
            decoding = next((name for name in DECODINGS if name in row.tags), None)
            if decoding is None or row.success is None:
                left_out["other_decodings" if decoding is None else "unscored"] += 1
                continue
            task = known.of(row)
            key = key_of(task)
            about = abouts.get(key) or abouts.setdefault(key, about_of(task))
            left_out["without_tags"] += not about.tags
            policy = row.policy.partition("/")[0]
            tallies[policy, decoding, row.split].add(key, about, row.success, reached_by(row.final_state))
    count(context, left_out)
    tagged = [
        {"policy": policy, "decoding": decoding, "split": split, **row}
        for (policy, decoding, split), tally in tallies.items()
        for row in tally.rows()
    ]
    context.metrics.update(tags=len({row["tag"] for row in tagged}))
    return context.table(pa.Table.from_pylist(tagged, SCHEMA))


def about_of(task: Task) -> TaskTags:
    """Raises ValueError if ``tags`` or ``subgoals`` in the metadata are no lists of texts."""
    metadata = json.loads(task.metadata)
    given = metadata if isinstance(metadata, dict) else {}
    named = {name: given.get(name) or [] for name in TaskTags._fields}
    for name, values in named.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(
                f"{name} in the metadata of task {task.task_id} is {values!r:.80}; make it a list of texts"
            )
    return TaskTags(frozenset([*named["tags"], *named["subgoals"]]), tuple(named["subgoals"]))


def reached_by(final_state: str) -> Sequence[Any]:
    """What reached each subgoal of a rollout, by its final state; nothing if its environment does not say."""
    state = json.loads(final_state)
    subgoals = state.get("subgoals") if isinstance(state, dict) else None
    return subgoals if isinstance(subgoals, list) else []


def by_tag(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tables of a report from rows of :func:`tags`, greedy ones: tags by policies, of success and of subgoals. Nothing
    without rows."""
    greedy = [row for row in rows if row["decoding"] == "greedy"]
    first = next((row["split"] for row in greedy), "")
    tables = []
    for what, key in (("Success", "success"), ("Share of tries that reached the subgoal", "share_reached")):
        cells: dict[str, dict[str, float]] = defaultdict(dict)
        for row in greedy:
            if row[key] is not None:
                column = row["policy"] if row["split"] == first else f"{row['policy']}, {row['split']}"
                cells[row["tag"]][column] = row[key]
        columns = list(dict.fromkeys(column for each in cells.values() for column in each))
        lines = [
            [tag, *(f"{cells[tag][column]:.2f}" if column in cells[tag] else "" for column in columns)] for tag in cells
        ]
        if lines:
            tables.append({"title": f"{what} by tag, greedy", "columns": ["tag", *columns], "rows": lines})
    return tables
