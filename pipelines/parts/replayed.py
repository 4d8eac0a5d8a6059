"""Stored rows that online training mixes in: what is asked of them, and how they are read."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.algorithms.policy_gradient import PolicyGradient
from agentrl.chat.codec import tokenize
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.online.replay import ReplayConfig, StoredGroup, groups_of
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.parts.selected import Selected
from agentrl.pipelines.parts.training_rows import OUTCOME
from agentrl.schemas.trajectory import Trajectory, UnscoredError

if TYPE_CHECKING:
    from agentrl.models.policy import Speaker

ROWS_AT_ONCE = 4096


def check_sources(config: ReplayConfig | None, replay: Sequence[Trajectories]) -> None:
    """Raise ValueError unless there is something to replay, and what is wired is replayed."""
    if replay and config is None:
        raise ValueError("inputs.replay is wired, and replay is not set; set replay: {share: 0.25}, or unwire it")
    if config is not None and not config.own and not replay:
        raise ValueError("replay.own: false leaves nothing to replay; wire inputs.replay, or leave own out")


def stored_groups(
    replay: Sequence[Trajectories], config: ReplayConfig, algorithm: PolicyGradient, policy: "Speaker"
) -> list[StoredGroup]:
    """The groups of stored rows whose rewards differ.

    Raises UnscoredError that names rows without a reward, and ValueError that names a row of another tokenizer; or if
    log-probs of the policy that sampled are needed, a row that has none, or that was not drawn from a policy's own
    distribution; or if no group has rewards that differ.
    """
    if not replay:
        return []
    chosen = Selected(list(replay), OUTCOME).merged()
    scalars = chosen.scalars
    if scalars["reward"].null_count:
        raise UnscoredError("reward", scalars.filter(pc.is_null(scalars["reward"]))["trajectory_id"].to_pylist())
    chosen.check_tokenizers(policy, np.arange(len(chosen)))
    if config.needs_logprobs(algorithm):
        _check_drawn(chosen, config)
        _check_logprobs(replay[0].buffer, scalars["trajectory_id"].combine_chunks(), algorithm)
    rows = (
        Trajectory.model_construct(**row)
        for start in range(0, len(scalars), ROWS_AT_ONCE)
        for row in scalars.slice(start, ROWS_AT_ONCE).to_pylist()
    )
    groups = groups_of(rows, algorithm.credit, own=False)
    if not groups:
        raise ValueError(
            f"no group of the {len(chosen)} rows of inputs.replay has rewards that differ, and "
            f"algorithm: {algorithm.type} compares the rows of a group (of one task and one policy), so nothing could "
            "be learned from them; give several rollouts of each task, or learn from single ones by train.sft"
        )
    return groups


def _check_drawn(chosen: Selected, config: ReplayConfig) -> None:
    try:
        chosen.at_temperature_1("refuse")
        if config.correction is None:
            chosen.check_drawn()
    except ValueError as error:
        raise ValueError(
            f"inputs.replay: {str(error).partition(';')[0]}; leave them out by trajectories.select"
        ) from None


def _check_logprobs(buffer: TrajectoryBuffer, ids: pa.Array, algorithm: PolicyGradient) -> None:
    for start in range(0, len(ids), ROWS_AT_ONCE):
        part = ids.slice(start, ROWS_AT_ONCE)
        table = buffer.read(part, ["action_mask", "logprobs"])
        columns = (table[name].to_pylist() for name in ("action_mask", "logprobs"))
        for name, mask, logprobs in zip(part.to_pylist(), *columns, strict=True):
            if len(mask) != len(logprobs) or not mask or np.isnan(np.array(logprobs, np.float64)[mask]).any():
                raise ValueError(
                    f"{name} has no log-probs of the policy that sampled it, which replay needs for its importance "
                    f"weights, or algorithm: {algorithm.type} for its ratios; leave such rows out by "
                    "trajectories.select, or learn without: replay: {correction: null}, algorithm: {type: rloo}"
                )


def reading(buffer: TrajectoryBuffer, policy: "Speaker") -> Callable[[Sequence[str]], list[Trajectory]]:
    """What gives rows by their ids, in that order. Text is tokenised."""

    def read(ids: Sequence[str]) -> list[Trajectory]:
        return [tokenize(row, policy.codec, policy.tokenizer_fingerprint) for row in buffer.get_many(ids)]

    return read
