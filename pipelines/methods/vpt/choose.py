"""Which of the calls that an inverse model gave is the label of a gap."""

from dataclasses import dataclass, field

from agentrl.environments.forks import DivergedError, rebuild
from agentrl.pipelines.methods.vpt.gaps import Bare, Votes, completed, form_of
from agentrl.rollouts.verification import ReplayVerifier, Solved
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import ToolCall, Trajectory


@dataclass
class LoggedRow:
    """A row to label: for each gap its ``votes``; then the ``ranks`` of the calls that were chosen, for the first gaps,
    and why the next one, or the row, is ``refused``; and if the row was replayed what came of it."""

    row: Trajectory
    conversation: Bare
    votes: list[Votes] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    refused: str = ""
    solved: Solved | None = None

    @property
    def calls(self) -> list[ToolCall]:
        return [votes[rank][0] for votes, rank in zip(self.votes, self.ranks, strict=False)]

    @property
    def labelled(self) -> Trajectory:
        """The row with the calls so far."""
        messages = completed(self.conversation, self.calls)
        errors = sum(bool(message.error) for message in messages)
        calls = len(self.calls)
        return self.row.model_copy(update={"messages": messages, "n_tool_calls": calls, "n_tool_errors": errors})

    def right(self, number: int) -> bool | None:
        """Whether the call that was chosen for a gap is the one that was hidden; None if there is no such one."""
        hidden = self.conversation.gaps[number].call
        if hidden is None or number >= len(self.ranks):
            return None
        return form_of(hidden) == form_of(self.calls[number])

    def by_share(self, threshold: float) -> None:
        """Take the likeliest call of each gap, if so large a share of the tries gave it."""
        for of_gap in self.votes:
            if not of_gap or of_gap[0][1] < threshold:
                self.refused = "unsure" if of_gap else "no_call"
                return
            self.ranks.append(0)

    async def by_replay(self, verifier: ReplayVerifier, task: Task) -> None:
        """Take the likeliest call of each gap that the environment answers as the log does, after those before it; then
        score the episode."""
        try:
            for of_gap in self.votes:
                if not await self._replayed(of_gap, verifier, task):
                    self.refused = "not_replayed" if of_gap else "no_call"
                    return
        except Exception as error:  # of the environment: it loses this row alone
            self.refused = "env_error"
            verifier.note(error)
            return
        self.solved = await verifier.replayed(self.labelled, task)
        if self.solved is None:
            self.refused = "not_scored"
        elif self.row.success not in (None, self.solved.score.success):
            self.refused = "ended_otherwise"

    async def _replayed(self, of_gap: Votes, verifier: ReplayVerifier, task: Task) -> bool:
        for rank in range(len(of_gap)):
            self.ranks.append(rank)
            try:
                episode = await rebuild(verifier.environments[self.row.env], task, self.labelled.messages)
            except DivergedError:
                self.ranks.pop()
                continue
            await episode.close()
            return True
        return False
