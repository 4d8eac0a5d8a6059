"""Other rewards of stored rollouts, and what two versions of a step have in common, by hand."""

from typing import Any, cast

import pytest
import torch
from graded_rows import TASK, row

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines.replay.compared import cosine, trained_on, turned
from agentrl.pipelines.replay.rewards import OtherRewards
from agentrl.pipelines.replay.settings import ReplayError
from agentrl.rewards.behaviour import Form
from agentrl.rewards.component import Reward
from agentrl.rewards.consistency import SelfConsistency
from agentrl.rewards.length import LinearLength
from agentrl.schemas.arrow import to_table
from agentrl.schemas.task import TASK_SCHEMA
from agentrl.schemas.trajectory import RewardComponent, Trajectory


class Buffer:
    """Holds one task."""

    def tasks(self, ids: set[str]) -> Any:
        return to_table([TASK] if "t" in ids else [], TASK_SCHEMA)


def rewarded(rows: list[Trajectory], recorded: list[Reward], wanted: list[Reward], **weights: float) -> list[Any]:
    other = OtherRewards(recorded, wanted, weights, cast(TrajectoryBuffer, Buffer()))
    return [row.reward for row in other.of(rows)]


def stored(name: str, match: float, form: float, tokens: int = 0, **columns: Any) -> Trajectory:
    """A row whose environment gave ``match`` and a component of weight 0, and whose stage added half of ``form``."""
    parts = [("match", match, 1.0), ("turns", 3.0, 0.0), ("form", form, 0.5), ("form.calls", 2.0, 0.0)]
    return row(
        trajectory_id=name,
        reward=match + 0.5 * form,
        success=match == 1,
        reward_components=[RewardComponent(name=part, value=value, weight=weight) for part, value, weight in parts],
        n_action_tokens=tokens,
        group_id="g",
        **columns,
    )


FORM = Form(type="format", name="form", weight=0.5)
ROWS = [stored("a", 1.0, -1.0, 10), stored("b", 0.0, 1.0, 20), stored("c", 1.0, 1.0, 30)]


def test_weights_of_stored_components_make_another_reward() -> None:
    assert rewarded(ROWS, [FORM], [FORM]) == [0.5, 0.5, 1.5]
    assert rewarded(ROWS, [FORM], []) == [1.0, 0.0, 1.0]  # the environment's alone
    assert rewarded(ROWS, [FORM], [FORM.model_copy(update={"weight": 0.25})]) == [0.75, 0.25, 1.25]
    assert rewarded(ROWS, [FORM], [FORM], match=2.0) == [1.5, 0.5, 2.5]
    assert rewarded(ROWS, [FORM], [FORM], turns=-0.1) == pytest.approx([0.2, 0.2, 1.2])
    assert rewarded(ROWS, [FORM], [FORM], environment=0.0) == [-0.5, 0.5, 0.5]
    assert rewarded(ROWS, [FORM], [], environment=0.5, match=3.0) == [1.5, 0.0, 1.5]


def test_new_components_are_computed_from_rows_and_added_to_what_the_environment_gave() -> None:
    """Kimi's length reward: 0.5, 0 and -0.5 for 10, 20 and 30 tokens, of which the failure has no more than 0."""
    length = LinearLength(type="length_linear", weight=0.2)
    assert rewarded(ROWS, [FORM], [length]) == pytest.approx([1.1, 0.0, 0.9])
    assert rewarded(ROWS, [FORM], [FORM, length]) == pytest.approx([0.6, 0.5, 1.4])


def test_what_cannot_be_graded_has_no_reward() -> None:
    unscored = row(trajectory_id="d", reward=None, group_id="g")
    assert rewarded([*ROWS, unscored], [FORM], [FORM], match=2.0)[3] is None
    with pytest.raises(
        ReplayError, match=r"no component 'matsch'; they have .*did you mean 'match'.*run the stage aga"
    ):
        rewarded(ROWS, [FORM], [FORM], matsch=1.0)
    far = [line.model_copy(update={"task_id": "u"}) for line in ROWS]
    with pytest.raises(ReplayError, match="a is of task u, which is not stored beside the buffer"):
        rewarded(far, [FORM], [LinearLength(type="length_linear")])


def test_versions_are_compared_by_sign_number_and_direction() -> None:
    old = [("a", 0.5, True), ("b", -0.5, True), ("c", 0.0, False), ("d", 0.1, True)]
    new = [("a", 0.2, True), ("b", 0.5, True), ("c", -0.1, True), ("d", 0.1, False)]
    names = ("trajectory_id", "advantage", "trained")
    records = [[dict(zip(names, each, strict=True)) for each in version] for version in (old, new)]
    changed = {row.trajectory_id: row.signs for row in turned(*records)}
    assert changed == {"b": "- to +", "c": "0 to -", "d": "+ to 0"}
    rows = [row(trajectory_id=name, action_mask=[False, True, True], input_ids=[1, 2, 3], group_id=group, n_tokens=3,
                logprobs=[0.0] * 3) for name, group in zip("abcd", "xxyy", strict=True)]  # fmt: skip
    count = trained_on(records[0], rows, lambda each: each.group_id or "")
    assert count == {"trained_rows": 3.0, "trained_groups": 2.0, "trained_tokens": 6.0}
    first, second = [torch.tensor([1.0, 0.0]), torch.tensor([1.0])], [torch.tensor([1.0, 0.0]), torch.tensor([-1.0])]
    assert cosine(first, first) == pytest.approx(1.0)
    assert cosine(first, second) == 0.0
    assert cosine(first, [torch.zeros(2), torch.zeros(1)]) == 0.0


def test_what_is_the_whole_reward_does_not_come_or_go_in_a_replay() -> None:
    alone = SelfConsistency(alone=True)
    for recorded, wanted in ([FORM], [alone]), ([alone], []):
        with pytest.raises(ReplayError, match="self_consistency with alone: true is the whole reward in one of both"):
            rewarded(ROWS, recorded, wanted)
