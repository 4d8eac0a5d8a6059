"""What stages share that continue stored rows from one of their turns."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from agentrl.advantages.turns import acting, own_turns, turn_spans
from agentrl.chat.codec import tokenize
from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Tasks, Trajectories
from agentrl.pipelines.parts.budget import SamplingConfig
from agentrl.pipelines.parts.common import REWARDS, count, refuse_measured, tagged_as_not_trained
from agentrl.pipelines.parts.outcomes import record_failures
from agentrl.pipelines.parts.shards import Shards
from agentrl.pipelines.parts.stored_tasks import KnownTasks
from agentrl.pipelines.stage import Context, StageConfig
from agentrl.rewards import Rewards
from agentrl.rollouts.compression import SOURCE as SEGMENTED
from agentrl.rollouts.limits import Limits
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.rollouts.continuations import ForkPoint
    from agentrl.rollouts.runner import Attempt, RolloutRunner

NODES_AT_ONCE = 128
"""States whose continuations are appended together: a killed run resumes at the next ones."""

NO_TAGS: Mapping[str, Sequence[str]] = MappingProxyType({})

Where = Literal["all", "failed", "uncertain"]

TaskRow = tuple[Trajectory, Task]


class ContinuingConfig(StageConfig):
    """How stored rows are continued."""

    k: int = Field(8, ge=1, description="continuations of each state")
    turns: int = Field(2, ge=1, description="for uncertain: at most this many turns of each row")
    sampling: SamplingConfig = SamplingConfig()
    rewards: Rewards = Field([], description=REWARDS)
    engine: TokenEngineChoice = DEFAULT_ENGINE
    limits: Limits = Limits()


def rows_to_continue(
    context: Context,
    trajectories: Sequence[Trajectories],
    tasks: Sequence[Tasks],
    policy: "Policy | None",
    measured: bool | None = None,
) -> list[TaskRow]:
    """Rows of selections with their tasks. Text is tokenised, unless an endpoint goes on (no ``policy``). Rows that are
    tagged as not trained on, and those without a turn, such as of an environment that failed at once, are left out and
    counted. ``measured`` says that nothing will be trained on what is made of them, None that the stage has no such
    setting.

    Raises ValueError that names a row of another tokenizer than the policy's, or without its task, or of another split
    than train unless it is measured, or a later segment of an episode.
    """
    known = KnownTasks(trajectories, tasks)
    rows, left = [], Counter(not_trained=sum(map(tagged_as_not_trained, trajectories)), no_turns=0)
    for row in (row_chosen for selection in trajectories for row_chosen in selection.trained_on()):
        if not acting(row.messages):
            left["no_turns"] += 1
            continue
        row = tokenize(row, policy.codec, policy.tokenizer_fingerprint) if policy else row
        if row.segment and ('"compress"' in row.sampling or row.source == SEGMENTED):
            raise ValueError(
                f"{row.trajectory_id} is a later segment of its episode, whose beginning it lacks, so it cannot be "
                "continued; leave such rows out by trajectories.select with where: segment = 0"
            )
        if policy and (wrong := policy.wrote(row.trajectory_id, row.tokenizer)):
            raise ValueError(wrong)
        if row.source == "team":
            raise ValueError(
                f"{row.trajectory_id} is of the agent {row.agent} of a team, whose opening is not that of the task, so "
                "it cannot be continued; alternatives of who acts last are made by trajectories.team with acts"
            )
        rows.append((row, known.of(row).model_copy(update={"split": row.split})))
    if not measured:
        remedy = "" if measured is None else ", or set measure: true, so that no stage trains on what is made"
        refuse_measured({row.trajectory_id: row.split for row, _ in rows}, remedy)
    count(context, left)
    return rows


def chosen_turns(row: Trajectory, where: Where, most: int) -> list[int]:
    """Numbers of a row's own turns: all, those of a row that is not known to have succeeded, or the ``most`` whose
    tokens were least likely on average.

    Raises ValueError that names the row if log-probs are needed and it has none.
    """
    turns = own_turns(row)
    if where == "all" or (where == "failed" and not row.success):
        return turns
    if where == "failed":
        return []
    spans = turn_spans(row.messages, row.action_mask)
    surprise = {turn: -fmean(row.logprobs[slice(*spans[turn])]) for turn in turns}
    if any(math.isnan(value) for value in surprise.values()):
        raise ValueError(f"{row.trajectory_id} has no log-probs, so its uncertain turns are not known; take all")
    return sorted(sorted(turns, key=lambda turn: (-surprise[turn], turn))[:most])


class Continuations:
    """The continuations of states, which are sampled once each and appended to the buffer. Those whose replay went
    otherwise than before are left out, unless they are to ``go_on`` in spite of that. With ``turns``, each is cut after
    so many of its own. Their rows and shards are numbered from ``first`` and ``shard`` on, and tagged ``tag``; their
    first turns are ``replaced``."""

    def __init__(
        self,
        context: Context,
        runner: "RolloutRunner",
        samples: int,
        source: str = "forked",
        turns: int | None = None,
        first: int = 0,
        shard: int = 0,
        tag: str = "",
        replaced: Literal["", "default", "none"] = "",
        go_on: bool = False,
    ) -> None:
        self._context, self._runner, self._samples, self._source = context, runner, samples, source
        self._turns, self._tag, self._replaced, self._go_on = turns, tag, replaced, go_on
        self._shards = Shards(context)
        self._known = set(context.row_ids())
        self._rows: dict[str, list[Trajectory]] = {}
        self._number, self._shard = first, shard
        self.sampled = self.calls = 0

    def of(self, nodes: "Iterable[ForkPoint]") -> dict[str, list[Trajectory]]:
        """The continuations of all states so far, by their names, those of these states too."""
        self._rows.update(self._drawn([point for point in nodes if point.name not in self._rows], 0))
        return self._rows

    def again(self, nodes: "Iterable[ForkPoint]") -> dict[str, list[Trajectory]]:
        """New continuations of states that have some, by their names, for what may not depend on those: as many, of the
        same groups."""
        return self._drawn(nodes, self._samples)

    def _drawn(self, nodes: "Iterable[ForkPoint]", index: int) -> dict[str, list[Trajectory]]:
        """Continuations of states, whose numbers in their groups begin at ``index``."""
        from agentrl.rollouts.continuations import attempts

        waiting = list({point.name: point for point in nodes}.values())
        rows_of_point: dict[str, list[Trajectory]] = {}
        for start in range(0, len(waiting), NODES_AT_ONCE):
            part = waiting[start : start + NODES_AT_ONCE]
            wanted = attempts(part, self._samples, self._context.trajectory_id, self._number, index)
            rows_of_point.update(self._sample(wanted))
        return rows_of_point

    def whole(
        self, tasks: Sequence[Task], hints: Sequence[str] = (), tags: Sequence[Sequence[str]] = ()
    ) -> list[list[Trajectory]]:
        """Whole rollouts of tasks, a list for each. ``hints`` are templates for
        :func:`agentrl.rollouts.rationalize.with_hint`, and ``tags`` say in the rows what they were shown."""
        from agentrl.rollouts.runner import tickets

        rows_of_task: list[list[Trajectory]] = []
        for start in range(0, len(tasks), NODES_AT_ONCE):
            part = tasks[start : start + NODES_AT_ONCE]
            wanted = tickets(part, self._samples, self._context.trajectory_id, self._number)
            of = {name: start + index // self._samples for index, name in enumerate(wanted)}
            if hints:
                wanted = {name: replace(attempt, hint=hints[of[name]]) for name, attempt in wanted.items()}
            made = self._sample(wanted, {name: tags[index] for name, index in of.items()} if tags else {})
            self._rows.update(made)
            rows_of_task += made.values()
        return rows_of_task

    def finish(self) -> None:
        """Append what waits, and put what was spent into the metrics."""
        self._shards.finish(self._shard)
        record_failures(self._context, self._runner)
        self._context.metrics.update(states=len(self._rows), sampled_tokens=self.sampled, environment_calls=self.calls)

    def _sample(
        self, wanted: "dict[str, Attempt]", tags: Mapping[str, Sequence[str]] = NO_TAGS
    ) -> dict[str, list[Trajectory]]:
        """The rows of these attempts, by their groups; what was not made before is made. ``wanted`` and ``tags`` are by
        the ids of rows."""
        from agentrl.rollouts.continuations import check_continuation
        from agentrl.rollouts.episodes import DIVERGED
        from agentrl.rollouts.outcomes import REPLAY_DIFFERS

        stored = [name for name in wanted if name in self._known]
        rows = dict(zip(stored, self._context.buffer.get_many(stored), strict=True)) if stored else {}
        missing = self._shards.missing(wanted)
        if missing:
            seed = stream(self._context.seed, "continue", self._shard)
            how: dict[str, Any] = {"turns": self._turns, "replaced": self._replaced, "goes_on": self._go_on}
            cut = [replace(attempt, **how) for attempt in missing.values()]
            made = self._runner.run(cut, seed, list(missing), self._source)
            if tags:
                made = [row.model_copy(update={"tags": [*tags[row.episode_id], *row.tags]}) for row in made]
            others = []
            for row in made:
                prefix = missing[row.episode_id].prefix
                if row.segment == 0 and prefix is not None:
                    self.calls += prefix.tool_calls  # the replay's
                if DIVERGED in row.tags:
                    continue
                if row.segment:  # another conversation of an agent program
                    others.append(self._tagged(row))
                    continue
                if prefix is not None and not any(tag.startswith(REPLAY_DIFFERS) for tag in row.tags):
                    check_continuation(row, prefix)
                rows[row.trajectory_id] = self._tagged(row)
            self._shards.append([*(rows[name] for name in missing if name in rows), *others], self._shard)
        groups: dict[str, list[Trajectory]] = {attempt.group_id: [] for attempt in wanted.values()}
        for name, attempt in wanted.items():
            if kept := rows.get(name):
                groups[attempt.group_id].append(kept)
                self.sampled += kept.n_action_tokens
                self.calls += kept.n_tool_calls
        self._number += len(wanted)
        self._shard += 1
        return groups

    def _tagged(self, row: Trajectory) -> Trajectory:
        return row.model_copy(update={"tags": [*row.tags, self._tag]}) if self._tag else row
