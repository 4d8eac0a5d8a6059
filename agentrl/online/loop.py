"""The online loop: open tickets, wait for whole groups, record a batch, take its steps, and renew the weights.

Synchronous, one step off and asynchronous training are settings of its tickets. What was recorded before a kill is
trained on again without sampling, and what was made is not made again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentrl.advantages.group import degenerate_groups
from agentrl.engines.seeds import stream
from agentrl.online.curriculum import Curriculum, Draws, EveryTask
from agentrl.online.forest import replayed_calls
from agentrl.online.learner import REPLAYED, Learner, OnlineState
from agentrl.online.recorded import Log, Recorded
from agentrl.online.replay import Replay
from agentrl.online.tickets import Tickets
from agentrl.rollouts.attempts import Prefix
from agentrl.rollouts.continuations import check_continuation
from agentrl.rollouts.episodes import DIVERGED
from agentrl.rollouts.in_flight import Flow, NumberedAttempt
from agentrl.rollouts.runner import Attempt, RolloutRunner, nothing_sampled
from agentrl.rollouts.segments import firsts
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, Termination, Trajectory

if TYPE_CHECKING:
    from types import TracebackType

GREEDY = "greedy"


@dataclass
class OnlineStep:
    """What one iteration was: its metrics, a record for each of its rollouts and a row for each of its tickets, and the
    number of its tokens. ``again`` says that it was taken from its record."""

    metrics: dict[str, float]
    records: list[dict[str, Any]]
    tickets: list[dict[str, Any]]
    tokens: int
    again: bool


class OnlineLoop:
    """Each iteration trains on the groups of tickets that :class:`Tickets` chooses, of ``learner.samples`` rollouts
    each. Without a ``curriculum``, every task is drawn once before any is drawn again. ``name`` gives the id of a
    rollout by its number, which follows from ticket and sample. ``replay`` draws what is trained on again.
    Rollouts of the first tasks begin after ``starts``, one for each of them. If the runner has a team, those of a
    ticket are its agents'. ``routes`` says whether the log has those of rollouts, which are then replayed.

    Use it in ``with``, inside that of its runner: at the end, what is under way is cancelled. If the engine is
    reproducible, tickets that are opened together are sampled to their end before anything else happens, so that equal
    seeds give equal batches and weights.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        learner: Learner,
        tasks: Sequence[Task],
        tickets: Tickets,
        log: Log,
        name: Callable[[int], str],
        curriculum: Curriculum | None = None,
        replay: Replay | None = None,
        starts: Sequence[Prefix] = (),
        routes: bool = False,
    ) -> None:
        self.starts, self.routes, self.team = starts, routes, runner.team.team if runner.team else None
        self.runner, self.learner, self.tasks = runner, learner, tasks
        self.tickets, self.log, self.name = tickets, log, name
        self.in_step = runner.engine.reproducible
        self.per_ticket = learner.samples + learner.algorithm.needs_greedy
        self.made = 0
        self._rows: dict[int, list[Trajectory]] = {}  # of a ticket, segments of one episode beside each other
        self._grown: dict[int, list[Trajectory]] = {}  # rows of trees that have another round
        self._fresh: list[Trajectory] = []
        self._begun: set[int] = set()
        self.curriculum, self.replay = curriculum, replay
        self._draws: Draws = curriculum or EveryTask(len(tasks), learner.seed)

    def __enter__(self) -> Self:
        self._flowing = self.runner.flow(None if self.in_step else self.log.keep)
        self._flow: Flow = self._flowing.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self._flowing.__exit__(kind, error, trace)

    @property
    def iteration(self) -> int:
        """The number of iterations that are done."""
        return self.tickets.steps

    def step(self) -> OnlineStep:
        """One iteration. Raises ValueError if the buffer holds only some of the rollouts that were made together."""
        made = self.log.recorded(self.iteration)
        again = made is not None
        if made is None:
            made = self._collected()
            self.log.record(made)
        else:
            self._restore(made.state)
            self._remember(made.tickets)
        if not again or self.log.recorded(self.iteration + 1) is None:
            self._open()
            if self.in_step:
                self._wait()
        metrics = self.learner.update(made)
        if (seen := self.learner.models.seen) is not None:
            self.log.record_tokens(made.iteration, seen)
        self.tickets.step()
        self.runner.wait(self.runner.renew())
        self.made += sum(ticket["rows"] for ticket in made.tickets)
        fresh = sum(not record.get(REPLAYED) for record in made.records)
        tokens = int(metrics["tokens_per_rollout"] * fresh / metrics.get("segments", 1.0))
        return OnlineStep(metrics, made.records, made.tickets, tokens, again)

    def _collected(self) -> Recorded:
        """The next batch. Waits until its groups are whole."""
        self._open()
        while (taken := self.tickets.take()) is None:
            self._open()
            self._wait()
        self._append()
        numbers = sorted([*taken.fill, *taken.idle])
        groups = {number: self._rows.pop(number) for number in numbers}
        rows = [row for number in numbers for row in groups[number]]
        if all(row.termination is Termination.INFRA_ERROR for row in rows):
            raise nothing_sampled(rows)
        sampled, greedy = ([row for row in rows if (GREEDY in row.tags) == kind] for kind in (False, True))
        drawn = self.replay.draw(self.iteration, self.learner.policy.version) if self.replay else None
        routes = self.log.routes([row.trajectory_id for row in rows]) if self.routes else None
        made = self.learner.batch(self.iteration, sampled, greedy, drawn, routes)
        if self.replay:
            self.replay.add(rows)
        made.metrics["tickets"] = float(len(numbers))
        if self.learner.fork or self.starts:
            made.metrics["replayed_calls"] = float(sum(map(replayed_calls, rows)))
        about = [self._ticket(number, groups[number], number in taken.fill) for number in numbers]
        if self.curriculum:
            made.metrics["level"] = float(self.curriculum.level)
            for number in numbers:
                self.curriculum.learn(number, _outcomes(groups[number]))
        return replace(made, tickets=about, state=self._state())

    def _ticket(self, number: int, rows: Sequence[Trajectory], fills: bool) -> dict[str, Any]:
        """What :mod:`agentrl.online.coverage` says of a ticket."""
        version, episodes = self.learner.policy.version, firsts(rows)
        oldest = min((row.policy_version for row in rows if NOT_TRAINED not in row.tags), default=version)
        return {
            "ticket": number,
            "task_id": self._task(number).task_id,
            "batch": self.iteration,
            "fills": fills,
            "rows": len(episodes),
            "unscored": sum(row.reward is None for row in episodes),
            "turns": sum(row.n_steps for row in rows),
            "version": oldest,
            "staleness": version - oldest,
        }

    # -- groups under way

    def _open(self) -> None:
        """Begin what the scheduler lets begin. After a kill, tickets that were open then come first."""
        if again := [number for number in self.tickets.open if number not in self._begun]:
            self._begin(again)
        if new := self.tickets.admit():
            self._begin(new)

    def _begin(self, numbers: Sequence[int]) -> None:
        """Sample the groups of tickets, or take them from the buffer."""
        self._begun.update(numbers)
        if self.curriculum:
            self._as_logged(self.curriculum, numbers)
        named = {number: [self.name(job) for job in self._numbers(number)] for number in numbers}
        stored = self.log.stored([name for names in named.values() for name in names])
        missing = {number: [name for name in names if name not in stored] for number, names in named.items()}
        for number, names in missing.items():
            if names and (len(names) < self.per_ticket or (self.in_step and stored)):
                raise ValueError(
                    f"the stored rollouts of tickets {numbers[0]} to {numbers[-1]} lack {len(names)} of ticket "
                    f"{number}, such as {names[0]}; make all of them again with --force"
                )
        for number, names in named.items():
            if not missing[number]:
                self._whole(number, [row for name in names for row in stored[name]])
        self._sample([job for number in numbers if missing[number] for job in self._jobs(number)])

    def _sample(self, wanted: Sequence[NumberedAttempt]) -> None:
        """Begin what was not made before."""
        if wanted:
            kept = {} if self.in_step else self.log.under_way([job.name for job in wanted])
            self.runner.wait(self._flow.add(wanted, kept))

    def _wait(self) -> None:
        """Wait for groups that are under way: for all of them in step, otherwise for the first one. Groups of trees
        that have another round go on."""
        more = self._arrived()
        while more and self.in_step:
            more = self._arrived()
        if self.in_step:
            self._append()

    def _arrived(self) -> bool:
        """Take what came, and begin what follows from it. Returns whether there is something."""
        groups = self.runner.wait(self._flow.groups(all_of_them=self.in_step))
        named = {self.name(number * self.per_ticket): number for number in self.tickets.open}
        by_number = {named[group[0].group_id or ""]: group for group in groups}
        following = []
        for number in sorted(by_number) if self.in_step else by_number:
            rows = self._grown.pop(number, []) + [_tagged(row, self.learner.samples) for row in by_number[number]]
            if len(firsts(rows)) < self.per_ticket:
                self._grown[number] = rows
                following += self._jobs(number, rows)
                continue
            if self.learner.fork:
                self.learner.fork.check(rows)
            if self.team:
                rows = self.team.credited(rows)
            self._check_start(number, rows)
            self._whole(number, rows)
            self._fresh += rows
        self._sample(following)
        return bool(following)

    def _append(self) -> None:
        """Append what became whole, in one commit."""
        if self._fresh:
            self.log.append(self._fresh)
            self._fresh = []

    def _whole(self, number: int, rows: list[Trajectory]) -> None:
        self._rows[number] = rows
        rewards = [row.reward for row in firsts(rows) if row.reward is not None and GREEDY not in row.tags]
        useful = bool(rewards) and not degenerate_groups(rewards, [""] * len(rewards)).all()
        self.tickets.finish(number, useful)

    # -- what a ticket is

    def _jobs(self, number: int, rows: Sequence[Trajectory] = ()) -> list[NumberedAttempt]:
        """What is sampled next of a ticket that has these rows: all there is, or a round of its trees or its team."""
        samples, first, size = self.learner.samples, number * self.per_ticket, self.tickets.size
        seed, deadline = stream(self.learner.seed, "online", number // size, 0), self.tickets.open[number]
        drawn = self.runner.explore.sampling(self.runner.sampling, number // size, self.tickets.batches)
        jobs = []
        for attempt in self._attempts(number, rows, stream(seed, "fork", number % size, len(rows))):
            index = attempt.index
            greedy = self.runner.sampling.model_copy(update={"temperature": 0.0}) if index >= samples else drawn
            own = stream(seed, "row", number % size * samples + index)
            jobs.append(NumberedAttempt(attempt, self.name(first + index), first + index, own, greedy, deadline))
        return jobs

    def _attempts(self, number: int, rows: Sequence[Trajectory], seed: int) -> list[Attempt]:
        """The attempts of a ticket that follow its rows."""
        task, group = self._task(number), self.name(number * self.per_ticket)
        if self.team:
            return self.team.attempts(task, group, rows, self.per_ticket)
        prefixes: Sequence[Prefix | None] = [self._start(number)] * self.per_ticket
        if self.learner.fork:
            prefixes = self.learner.fork.prefixes(rows, task, seed)
        return [Attempt(task, index, group=group, prefix=prefix) for index, prefix in enumerate(prefixes, len(rows))]

    def _task(self, number: int) -> Task:
        return self.tasks[self._draws.of(number)]

    def _start(self, number: int) -> Prefix | None:
        """What the rollouts of a ticket begin after."""
        if not self.starts:
            return None
        index = self._draws.of(number)
        return self.starts[index] if index < len(self.starts) else None

    def _check_start(self, number: int, rows: Sequence[Trajectory]) -> None:
        """Raise ValueError that names a rollout that does not begin where its ticket does."""
        if prefix := self._start(number):
            for row in rows:
                if row.segment == 0 and row.fork_at and DIVERGED not in row.tags:
                    check_continuation(row, prefix)

    def _as_logged(self, curriculum: Curriculum, numbers: Sequence[int]) -> None:
        """Give tickets of which the log has rollouts the tasks of these: if tickets overlap, what was learned when a
        ticket was opened may be other than before the kill."""
        wanted = [number for number in numbers if not curriculum.is_drawn(number)]
        names = {self.name(job): job // self.per_ticket for number in wanted for job in self._numbers(number)}
        logged = {**self.log.stored(list(names)), **self.log.under_way(list(names))}
        begins = [(start.parent, len(start.ids)) for start in self.starts] + [("", 0)] * len(self.tasks)
        places = {(task.task_id, *begins[index]): index for index, task in enumerate(self.tasks)} if logged else {}
        for number, row in {names[name]: rows[0] for name, rows in logged.items()}.items():
            curriculum.take(number, places[row.task_id, (row.parent_id or "") if row.fork_at else "", row.fork_at])

    def _numbers(self, ticket: int) -> range:
        """Numbers of a ticket's rollouts."""
        return range(ticket * self.per_ticket, (ticket + 1) * self.per_ticket)

    def _remember(self, tickets: Sequence[dict[str, Any]]) -> None:
        """Let the rollouts of tickets that were trained on before a kill be replayed."""
        if not (self.replay and self.replay.config.own):
            return
        names = [self.name(job) for ticket in tickets for job in self._numbers(ticket["ticket"])]
        stored = self.log.stored(names)
        self.replay.add(row for name in names for row in stored[name])

    # -- checkpoints

    def save(self, path: Path, state: OnlineState) -> None:
        """Write everything that :meth:`restore` needs to go on as if nothing had happened."""
        self.learner.save(path, state, {"made": self.made, "tickets": self._state()})

    def restore(self, path: Path) -> OnlineState:
        """The state at the newest checkpoint that can be read. If there is none, a new state; nothing is changed
        then."""
        restored = self.learner.restore(path)
        if restored is None:
            return OnlineState()
        state, progress = restored
        self.made = progress["made"]
        self._restore(progress["tickets"])
        self._remember(state.tickets)
        self.runner.wait(self.runner.renew())
        return state

    def _state(self) -> dict[str, Any]:
        """The state of the scheduler, and of the curriculum if there is one."""
        return self.tickets.state() | ({"curriculum": self.curriculum.state()} if self.curriculum else {})

    def _restore(self, state: dict[str, Any]) -> None:
        self.tickets.restore(state)
        if self.curriculum:
            self.curriculum.restore(state["curriculum"])


def _outcomes(rows: Sequence[Trajectory]) -> list[bool]:
    """Whether the sampled rollouts of a group that were scored succeeded."""
    return [row.success for row in firsts(rows) if row.success is not None and GREEDY not in row.tags]


def _tagged(row: Trajectory, samples: int) -> Trajectory:
    """A rollout that came after the samples of its group is greedy, and says so."""
    if row.sample_index < samples or GREEDY in row.tags:
        return row
    return row.model_copy(update={"tags": [GREEDY, *row.tags]})
