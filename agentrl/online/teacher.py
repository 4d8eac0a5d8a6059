"""A teacher, who says how likely it finds what a student sampled."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentrl.engines.blocking import blocking
from agentrl.models.policy import Policy, Speaker
from agentrl.rollouts.rationalize import with_text
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs
from schemas.training import TrainingRow
from schemas.trajectory import Role, Trajectory

if TYPE_CHECKING:
    from agentrl.engines.base import Engine

Sees = Callable[[Trajectory], str]
"""What the teacher sees of a rollout's task beside what the student saw; nothing if it is empty."""


class Teacher:
    """Log-probs of ``policy``, at temperature 1, of what ``student`` sampled: in this process in packed passes, or by
    an ``engine`` that serves it. With ``sees``, the teacher reads that text after the opening of the student.

    Raises ValueError unless both have the same vocabulary.
    """

    def __init__(
        self,
        policy: Policy,
        student: Speaker,
        engine: "Engine | None" = None,
        sees: Sees | None = None,
        micro_tokens: int = 8192,
    ) -> None:
        check_vocabulary(policy, student)
        self.policy, self.student, self.engine, self.sees = policy, student, engine, sees
        self.micro_tokens = micro_tokens
        self._context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
        self._gap, self._tokens = 0.0, 0

    def logprobs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        """Of each rollout's tokens, [tokens] in float32; 0 for those that the student did not sample.

        Raises ValueError that names a rollout that is too long for the teacher.
        """
        asked = [self._row(row) for row in rollouts]
        scored = self._in_process(asked) if self.engine is None else blocking(self._by_engine(self.engine, asked))
        found = []
        for row, theirs in zip(rollouts, scored, strict=True):
            own = np.zeros(len(row.input_ids), np.float32)
            tail = min(len(own), len(theirs))  # what the student sampled lies at the end of both
            own[len(own) - tail :] = theirs[len(theirs) - tail :]
            mask = np.array(row.action_mask)
            own[~mask] = 0.0
            self._gap += float((np.array(row.logprobs)[mask] - own[mask]).sum())
            self._tokens += int(mask.sum())
            found.append(own)
        return found

    def divergence(self) -> float:
        """The mean over action tokens of ``log p_behaviour - log p_teacher`` since this was last asked: an estimate of
        the reverse KL from student to teacher."""
        mean = self._gap / max(1, self._tokens)
        self._gap, self._tokens = 0.0, 0
        return mean

    def _row(self, row: Trajectory) -> TrainingRow:
        """The tokens that the teacher reads."""
        ids, mask = row.input_ids, row.action_mask
        if self.sees and (text := self.sees(row)):
            number, start = _first_turn(row)
            opening = with_text(row.messages[:number], text)
            ids = self.student.codec.opening(opening, row.tools) + row.input_ids[start:]
            mask = [False] * (len(ids) - len(row.input_ids) + start) + row.action_mask[start:]
        if self._context and len(ids) > self._context:
            raise ValueError(
                f"{row.trajectory_id} has {len(ids)} tokens as the teacher {self.policy.name} reads it, whose context "
                f"has {self._context}; lower max_tokens, or take a teacher with a longer context"
            )
        return TrainingRow(row_id=row.trajectory_id, input_ids=ids, mask=mask, weights=[0.0] * len(ids))

    def _in_process(self, asked: Sequence[TrainingRow]) -> list[np.ndarray]:
        return batch_logprobs(self.policy, TrainingRows.of(asked), self.micro_tokens)

    async def _by_engine(self, engine: "Engine", asked: Sequence[TrainingRow]) -> list[np.ndarray]:
        async def score(row: TrainingRow) -> np.ndarray:
            start = max(1, row.mask.index(True)) if True in row.mask else len(row.input_ids)
            scores = await engine.score(row.input_ids, start)
            return np.concatenate([np.zeros(start, np.float32), np.array(scores, np.float32)])

        return await asyncio.gather(*(score(row) for row in asked))


def check_vocabulary(teacher: Speaker, student: Speaker) -> None:
    """Raise ValueError unless each token of the student is the same token of the teacher."""
    theirs, ours = teacher.tokenizer.get_vocab(), student.tokenizer.get_vocab()
    other = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if other:
        raise ValueError(
            f"inputs.teacher: {teacher.name} has another tokenizer than the student {student.name}: {len(other)} of "
            f"{len(ours)} tokens are not the same there, such as {other[0]!r}, so its log-probs would be those of "
            "other texts. Take a teacher with the student's vocabulary, or sample with this one (trajectories.sample), "
            "drop its token columns, and train on its successes with train.sft"
        )


def _first_turn(row: Trajectory) -> tuple[int, int]:
    """The number of the first assistant message, and the place of its first token."""
    for number, message in enumerate(row.messages):
        if message.role is Role.ASSISTANT and message.token_start is not None:
            return number, message.token_start
    raise ValueError(f"{row.trajectory_id} has no turn with tokens; leave it out")
