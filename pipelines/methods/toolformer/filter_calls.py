"""The stage that cuts calls which do not help to say what follows out of stored rows."""

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pydantic import Field

from agentrl.advantages.turns import acting
from agentrl.chat.codec import tokenize
from agentrl.engines.blocking import blocking
from agentrl.pipelines.handles import Model, Table, Tasks, Trajectories
from agentrl.pipelines.methods.toolformer.calls import SOURCE
from agentrl.pipelines.methods.toolformer.deciding import NO_HELP, FilteredRow, decide
from agentrl.pipelines.parts.common import (
    count,
    environment,
    load_policy,
    record_dialect,
    refuse_measured,
    warn_of_error,
)
from agentrl.pipelines.parts.selected import check_tokenizer
from agentrl.pipelines.parts.stored_tasks import KnownTasks
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rollouts.continuations import check_replayable
from agentrl.rollouts.verification import ReplayVerifier
from agentrl.schemas.trajectory import NOT_TRAINED, Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

ROWS_AT_ONCE = 256

SCALARS = ["trajectory_id", "episode_id", "split", "env"]

KEPT = ("helps", "other_tool", "nothing_follows", "unclear", "beyond_context", "not_replayed")
"""Why a call stays: its gain is at least ``tau``; its tool is not named in ``tools``; nothing that is trained on
follows; its place in the tokens is not known, or the dialect cannot write the turn without it; what follows lies beyond
the model's context; the row without it and the others that do not help was not answered as before, or ended
otherwise."""

CALLS = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("call", pa.int32(), nullable=False),
        pa.field("tool", pa.string(), nullable=False),
        pa.field("loss", pa.float32()),
        pa.field("loss_without", pa.float32()),
        pa.field("loss_unanswered", pa.float32()),
        pa.field("gain", pa.float32()),
        pa.field("kept", pa.bool_(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)
"""A row for each call, with the id of the row as it was given, the number of the turn in it, and the number of the call
in the turn, both from 0. Losses are null where none was looked at; ``reason`` is ``no_help`` for those
that are cut, else one of :data:`KEPT`."""


class FilterCallsConfig(StageConfig):
    tools: list[str] = Field(
        min_length=1,
        description="tools that only read, whose calls may be cut; what a call changed would be missing without it, so "
        "calls of all other tools stay",
    )
    tau: float = Field(
        1.0,
        allow_inf_nan=False,
        description="a call stays if it takes at least so much off the loss of what follows, in nats a token; with a "
        "small decay, gains are small too",
    )
    decay: float = Field(
        0.2,
        ge=0,
        le=1,
        description="what each following token counts less than the one before: 0.2 looks at 5 tokens, 0.05 at 20, 0 "
        "at all",
    )


class FilteredCalls(NamedTuple):
    trajectories: Trajectories
    calls: Table


@stage("trajectories.filter_calls", version=1)
def filter_calls(
    context: Context,
    config: FilterCallsConfig,
    trajectories: list[Trajectories],
    model: Model,
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
) -> FilteredCalls:
    """Toolformer's filter: a call stays if it and its answer lower the loss of what the policy says next by ``tau``,
    beside no call and a call without an answer, by the probabilities of ``model``. Other calls of ``tools`` are cut out
    of their rows, which become new rows; other rows are passed on. ``calls`` has the losses of each call.

    Calls are looked at from the last to the first, each in the row that the cuts after it left. With ``tasks``, rows
    with cuts are played again in their environment, and stay whole if it answers otherwise than before.

    Raises ValueError if a row is not of the train split, was tokenised by another tokenizer, or with ``tasks`` is of
    none of them or of an environment whose episodes cannot be made again.
    """
    policy = load_policy(model)
    record_dialect(context, policy)
    scalars = [row for given in trajectories for row in given.table(SCALARS).to_pylist()]
    refuse_measured({row["trajectory_id"]: row["split"] for row in scalars})
    episodes = Counter({row["trajectory_id"]: row["episode_id"] for row in scalars}.values())
    verifier = _verifier(context, {row["env"] for row in scalars}) if tasks else None
    counts: Counter[str] = Counter(rows=len(scalars), rows_cut=0)
    filtered: list[FilteredRow] = []
    for rows in _parts(trajectories):
        begun = [_begun(row, policy, config, episodes, counts) for row in rows]
        decide(begun, policy, config.tau, config.decay)
        filtered += begun
        context.progress(len(filtered), len(scalars), cut=sum(row.changed is not None for row in filtered))
    if verifier:
        blocking(_replay(verifier, KnownTasks(trajectories, tasks), filtered))
        count(context, {f"replays_{reason}": number for reason, number in sorted((+verifier.drops).items())})
        count(context, {"environment_calls": verifier.calls})
        warn_of_error(verifier.error)
    ids = _append(context, filtered, replayed=verifier is not None)
    counts["rows_cut"] = sum(row.changed is not None for row in filtered)
    table = pa.Table.from_pylist([line for row in filtered for line in row.lines()], CALLS)
    _tell(context, config, counts, table)
    weights = [weight for given in trajectories for weight in given.selection()["weight"].to_pylist()]
    return FilteredCalls(context.select(ids, weights), context.table(table, "calls"))


def _parts(trajectories: list[Trajectories]) -> Iterator[list[Trajectory]]:
    for selection in trajectories:
        ids, _ = selection.selection().columns
        for start in range(0, len(ids), ROWS_AT_ONCE):
            yield selection.rows(ids.slice(start, ROWS_AT_ONCE))


def _begun(
    row: Trajectory, policy: "Policy", config: FilterCallsConfig, episodes: Counter[str], counts: Counter[str]
) -> FilteredRow:
    """A row with the calls that are to be looked at: none if no stage trains on it, or if others of its episode would
    have to be cut with it."""
    if not acting(row.messages):
        counts["no_turns"] += 1
    elif NOT_TRAINED in row.tags:
        counts["not_trained"] += 1
    elif row.segment or episodes[row.episode_id] > 1:
        counts["part_of_episode"] += 1
    else:
        if row.input_ids:
            check_tokenizer(row.trajectory_id, row.tokenizer, policy)
        return FilteredRow.of(tokenize(row, policy.codec, policy.tokenizer_fingerprint), config.tools)
    return FilteredRow(row.trajectory_id)


def _verifier(context: Context, names: set[str]) -> ReplayVerifier:
    environments = {name: environment(context, name) for name in sorted(names)}
    check_replayable(environments)
    return ReplayVerifier(environments)


async def _replay(verifier: ReplayVerifier, known: KnownTasks, filtered: list[FilteredRow]) -> None:
    """Rows with cuts, if a new episode answers and ends as they did, in its final state; the others stay whole."""
    try:
        for row in filtered:
            if row.changed is None:
                continue
            again = await verifier.replayed(row.changed, known.of(row.changed))
            if again is None or row.changed.success not in (None, again.score.success):
                row.restore("not_replayed")
            else:
                row.changed = row.changed.model_copy(update={"final_state": json.dumps(again.score.state)})
    finally:
        await verifier.close()


def _append(context: Context, filtered: list[FilteredRow], replayed: bool) -> list[str]:
    """The ids of all rows, when those with cuts are appended. If nobody replayed them, their final state has lost
    ``subgoals``, which are numbers of calls."""
    made: list[Trajectory] = []
    ids = []
    for row in filtered:
        name = row.name
        if row.changed is not None:
            name = context.trajectory_id(len(made))
            state = row.changed.final_state if replayed else _without_subgoals(row.changed.final_state)
            update = {"trajectory_id": name, "episode_id": name, "parent_id": row.name, "fork_at": 0, "source": SOURCE}
            tags = [*row.changed.tags, f"calls_cut:{row.n_cut}"]
            made.append(row.changed.model_copy(update={**update, "tags": tags, "final_state": state}))
        ids.append(name)
    context.append(made)
    return ids


def _without_subgoals(final_state: str) -> str:
    state = json.loads(final_state)
    if not isinstance(state, dict) or "subgoals" not in state:
        return final_state
    return json.dumps({key: value for key, value in state.items() if key != "subgoals"})


def _tell(context: Context, config: FilterCallsConfig, counts: Counter[str], calls: pa.Table) -> None:
    """Put into the metrics what became of calls and rows; say it, and warn if the filter told no call from another."""
    reasons = Counter(calls["reason"].to_pylist())
    gains = sorted(gained for gained in calls["gain"].to_pylist() if gained is not None)
    cut = reasons[NO_HELP]
    count(context, {**counts, "calls": len(calls), "kept": len(calls) - cut, "cut": cut})
    count(context, {reason: reasons[reason] for reason in KEPT})
    if gains:
        context.metrics.update(gain_lowest=gains[0], gain_median=median(gains), gain_highest=gains[-1])
    left = ", ".join(f"{reason} {reasons[reason]}" for reason in KEPT if reasons[reason]) or "none"
    print(f"cut {cut} of {len(calls)} calls in {counts['rows_cut']} of {counts['rows']} rows; kept: {left}")
    if not gains:
        called = ", ".join(sorted(set(calls["tool"].to_pylist()))) or "none"
        warnings.warn(
            f"no call was looked at: kept {left}; tools: {', '.join(config.tools)}; the rows call: {called}",
            stacklevel=3,
        )
    elif reasons["helps"] in (0, len(gains)):
        warnings.warn(
            f"{'none' if not reasons['helps'] else 'all'} of the {len(gains)} calls that were looked at help by tau "
            f"{config.tau:g}: gains are {gains[0]:.3g} to {gains[-1]:.3g}, median {median(gains):.3g}, with decay "
            f"{config.decay:g}; choose a tau between the gains of calls that help and of those that do not",
            stacklevel=3,
        )
    if reasons["not_replayed"]:
        warnings.warn(
            f"{reasons['not_replayed']} calls that do not help stay, since their rows without them were answered or "
            f"ended otherwise: see whether {', '.join(config.tools)} only read",
            stacklevel=3,
        )
