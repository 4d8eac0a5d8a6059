"""Stored rows that online training mixes in or begins from: what is asked of them, and how they are read."""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.algorithms.policy_gradient import PolicyGradient
from agentrl.chat.codec import tokenize
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.online.replay import ReplayConfig, StoredGroup, groups_of
from agentrl.online.starts import StoredState, starts_of
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.parts.continuing import rows_to_continue
from agentrl.pipelines.parts.selected import Selected
from agentrl.pipelines.parts.training_rows import OUTCOME
from agentrl.pipelines.stage import Context
from agentrl.schemas.trajectory import Trajectory, UnscoredError

if TYPE_CHECKING:
    from agentrl.models.policy import Policy, Speaker
    from agentrl.pipelines.stages.online_config import OnlineConfig

ROWS_AT_ONCE = 4096


class Stored(NamedTuple):
    """Stored rows that online training is given, to replay and to begin from."""

    replay: Sequence[Trajectories] = ()
    starts: Sequence[Trajectories] = ()


def check_sources(config: "OnlineConfig", stored: Stored) -> None:
    """Raise ValueError unless there is something to replay and to begin from, and what is wired is used."""
    if stored.replay and config.replay is None:
        raise ValueError("inputs.replay is wired, and replay is not set; set replay: {share: 0.25}, or unwire it")
    if config.replay is not None and not config.replay.own and not stored.replay:
        raise ValueError("replay.own: false leaves nothing to replay; wire inputs.replay, or leave own out")
    if bool(stored.starts) != (config.starts is not None):
        lacking = "wired, and starts is not set; set starts: {turns: 3}" if stored.starts else "not wired; wire it"
        raise ValueError(f"inputs.starts is {lacking}, or leave both out")


def begun(
    context: Context, config: "OnlineConfig", starts: Sequence[Trajectories], policy: "Policy"
) -> list[StoredState]:
    """The states to begin from, of the successes among stored rows.

    Raises ValueError as :func:`agentrl.pipelines.parts.continuing.rows_to_continue` does, or if there is no state.
    """
    if config.starts is None:
        return []
    rows = rows_to_continue(context, starts, (), policy)
    states = starts_of(rows, config.starts.turns)
    if not states:
        raise ValueError(
            f"none of the {len(rows)} rows of inputs.starts is a success of two turns or more, so there is no state to "
            "begin from; wire rows that succeeded, such as those of trajectories.synthesize"
        )
    context.metrics.update(starts=len(states), starts_of_successes=sum(row.success is True for row, _ in rows))
    return states


def stored_groups(
    replay: Sequence[Trajectories], config: ReplayConfig, algorithm: PolicyGradient, policy: "Speaker"
) -> list[StoredGroup]:
    """The groups of stored rows whose rewards differ.

    Raises UnscoredError that names rows without a reward, and ValueError that names a row of another tokenizer; or if
    log-probs of the policy that sampled are needed, a row that has none, or that was not drawn from a policy's own
    distribution; or if no group has rewards that differ, and own rollouts are not replayed. If they are, a warning says
    so.
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
        problem = (
            f"no group of the {len(chosen)} rows of inputs.replay has rewards that differ, and "
            f"algorithm: {algorithm.type} compares the rows of a group (of one task and one policy), so nothing can "
            "be learned from them; give several rollouts of each task, or learn from single ones by train.sft"
        )
        if not config.own:
            raise ValueError(problem)
        warnings.warn(f"{problem}. This run's own rollouts are replayed alone", stacklevel=2)
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
