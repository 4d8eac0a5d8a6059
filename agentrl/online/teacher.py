"""A teacher, who says how likely it finds what a student sampled."""

import asyncio
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentrl.engines.blocking import blocking
from agentrl.models.policy import Policy, Speaker
from agentrl.rollouts.rationalize import with_text
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Role, Trajectory
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs

if TYPE_CHECKING:
    from agentrl.engines.base import Engine

Sees = Callable[[Trajectory], str]
"""What the teacher sees of a rollout's task beside what the student saw; nothing if it is empty."""
_REMEDY = "lower max_tokens, show it less, or take a teacher with a longer context"


class Teacher:
    """Log-probs of ``policy``, at temperature 1, of what ``student`` sampled: in this process in packed passes, or by
    an ``engine`` that serves it. With ``sees``, the teacher reads that text after the opening of the student. Of
    rollouts that are then too long for its context it says nothing; they are counted, and the first is warned of.

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
        self._gap, self._tokens, self._unread, self._warned = 0.0, 0, 0, False

    def logprobs(self, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
        """Of each rollout's tokens, [tokens] in float32; 0 for those that the student did not sample. For a rollout
        that is too long for the teacher they are the student's own: their difference, the advantage, is 0."""
        asked = [self._row(row) for row in rollouts]
        readable = [row for row in asked if not self._context or len(row.input_ids) <= self._context]
        scored = self._in_process(readable) if self.engine is None else blocking(self._by_engine(self.engine, readable))
        by_row = dict(zip([row.row_id for row in readable], scored, strict=True))
        by_rollout = []
        for row, reads in zip(rollouts, asked, strict=True):
            own = np.zeros(len(row.input_ids), np.float32)
            if (read := by_row.get(row.trajectory_id)) is None:
                mask = np.array(row.action_mask)
                own[mask] = np.array(row.logprobs, np.float32)[mask]
                self._say_unread(reads)
                by_rollout.append(own)
                continue
            tail = min(len(own), len(read))  # what the student sampled lies at the end of both
            own[len(own) - tail :] = read[len(read) - tail :]
            mask = np.array(row.action_mask)
            own[~mask] = 0.0
            self._gap += float((np.array(row.logprobs)[mask] - own[mask]).sum())
            self._tokens += int(mask.sum())
            by_rollout.append(own)
        return by_rollout

    def metrics(self) -> dict[str, float]:
        """Of all rollouts since this was last asked: ``teacher_kl``, the mean over action tokens of ``log p_behaviour -
        log p_teacher``, which estimates the reverse KL from student to teacher, and ``teacher_unread``, how many were
        too long for the teacher.

        Raises ValueError if all were.
        """
        if self._unread and not self._tokens:
            raise ValueError(
                f"all {self._unread} rollouts are too long for the teacher {self.policy.name}, whose context has "
                f"{self._context} tokens; {_REMEDY}"
            )
        metrics = {"teacher_kl": self._gap / max(1, self._tokens), "teacher_unread": float(self._unread)}
        self._gap, self._tokens, self._unread = 0.0, 0, 0
        return metrics

    def _say_unread(self, row: TrainingRow) -> None:
        self._unread += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{row.row_id} has {len(row.input_ids)} tokens as the teacher {self.policy.name} reads it, whose "
                f"context has {self._context}: the teacher says nothing of such rollouts (metric teacher_unread); "
                f"{_REMEDY}",
                stacklevel=2,
            )

    def _row(self, row: Trajectory) -> TrainingRow:
        """The tokens that the teacher reads."""
        ids, mask = row.input_ids, row.action_mask
        if self.sees and (text := self.sees(row)):
            number, start = _first_turn(row)
            opening = with_text(row.messages[:number], text)
            ids = self.student.codec.opening(opening, row.tools) + row.input_ids[start:]
            mask = [False] * (len(ids) - len(row.input_ids) + start) + row.action_mask[start:]
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
    teacher_ids, ours = teacher.tokenizer.get_vocab(), student.tokenizer.get_vocab()
    other = sorted(token for token, number in ours.items() if teacher_ids.get(token) != number)
    if other:
        raise ValueError(
            f"inputs.teacher: {teacher.name} has another tokenizer than the student {student.name}: {len(other)} of "
            f"{len(ours)} tokens are not the same there, such as {other[0]!r}, so its log-probs would be those of "
            "other texts. Take a teacher with the student's vocabulary, or sample with this one (trajectories.sample), "
            "and train on its successes with train.sft {tokens: again}"
        )


def _first_turn(row: Trajectory) -> tuple[int, int]:
    """The number of the first assistant message, and the place of its first token."""
    for number, message in enumerate(row.messages):
        if message.role is Role.ASSISTANT and message.token_start is not None:
            return number, message.token_start
    raise ValueError(f"{row.trajectory_id} has no turn with tokens; leave it out")
