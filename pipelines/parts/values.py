"""Stages that read what turns are worth."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import pyarrow as pa

from agentrl.pipelines.handles import Steps
from agentrl.schemas.step_value import StepValue


def values_of(steps: Sequence[Steps]) -> dict[tuple[str, int], StepValue]:
    """Values by trajectory and turn. Raises ValueError if two tables value one turn."""
    by_turn: dict[tuple[str, int], StepValue] = {}
    for step in (step for table in steps for step in table.read()):
        if by_turn.setdefault((step.trajectory_id, step.turn), step) != step:
            raise ValueError(f"two tables value turn {step.turn} of {step.trajectory_id} differently; wire one of them")
    return by_turn


def values_by_one(
    steps: Sequence[Steps], policies: Mapping[str, str], other_prover: bool
) -> dict[tuple[str, int], StepValue]:
    """Values by trajectory and turn of the rows whose ``policies`` are given, by id, to be compared with each other.

    Raises ValueError if they are of several provers, or of one that sampled none of the rows, unless ``other_prover``
    says that it may be.
    """
    by_turn = {turn: step for turn, step in values_of(steps).items() if turn[0] in policies}
    provers = sorted({step.policy for step in by_turn.values()})
    if len(provers) > 1:
        raise ValueError(
            f"inputs.values are those of {len(provers)} provers ({', '.join(provers)}): what one can make of a state "
            "and what another can are not compared; wire the values of one"
        )
    if provers and provers[0] not in policies.values() and not other_prover:
        raise ValueError(
            f"inputs.values are those of {provers[0]}, which sampled none of the rows: what it can make of a state "
            "says little of what another policy can. Value the rows with the model that sampled them, or set "
            "other_prover: true"
        )
    return by_turn


def values_by_row(steps: Sequence[Steps], rows: pa.Table, other_prover: bool) -> Mapping[str, list[StepValue]]:
    """Values of the turns of each trajectory. ``rows`` has the columns ``trajectory_id`` and ``policy``.

    Raises ValueError if a value is that of another policy than the one that sampled the row, unless ``other_prover``
    says that it may be, or if no row has a value.
    """
    policies = dict(zip(rows["trajectory_id"].to_pylist(), rows["policy"].to_pylist(), strict=True))
    by_row: dict[str, list[StepValue]] = defaultdict(list)
    for (name, _), step in values_of(steps).items():
        if name not in policies:
            continue
        if step.policy != policies[name] and not other_prover:
            raise ValueError(
                f"the values of {name} are those of {step.policy}, and {policies[name] or 'another policy'} sampled "
                "it: what a prover can make of a state says little of what another policy can. Value the rows with the "
                "model that sampled them, or set other_prover: true"
            )
        by_row[name].append(step)
    if not by_row:
        raise ValueError("inputs.steps value no turn of the rows to train on; wire the rows that were valued")
    return dict(by_row)


def check_wired(credit: str, steps: Sequence[Steps]) -> None:
    """Raise ValueError unless values are wired if, and only if, credit is given by them."""
    if (credit == "values") != bool(steps):
        raise ValueError(
            "credit: values needs inputs.steps, such as those of steps.value"
            if credit == "values"
            else "inputs.steps are wired, and credit is not values; set it, or leave them out"
        )
