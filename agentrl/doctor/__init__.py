"""What is wrong with a training run, from its rollouts and metrics: each finding with evidence, threshold and remedy.

Every check is a pure function of a :class:`Case`; a healthy run has no finding. Early and late are the first and last
third of a run's rollouts or steps.
"""

from collections.abc import Callable

from agentrl.doctor.case import Case, Finding
from agentrl.doctor.curves import (
    clipping,
    collapse,
    echo_trap,
    entropy_collapse,
    kl_blow_up,
    low_ess,
    no_movement,
    sudden_fall,
)
from agentrl.doctor.rewards import (
    format_gaming,
    generalisation_gap,
    infrastructure,
    no_control,
    reward_constant,
    reward_zero,
    surer,
    zero_std,
)
from agentrl.doctor.tokens import format_errors, length_explosion, logprobs, masks, routes, truncation
from agentrl.doctor.tools import hallucinated_tools, tool_loops

CHECKS: tuple[Callable[[Case], Finding | None], ...] = (
    reward_zero,
    reward_constant,
    truncation,
    format_errors,
    masks,
    logprobs,
    routes,
    kl_blow_up,
    clipping,
    no_movement,
    collapse,
    entropy_collapse,
    sudden_fall,
    echo_trap,
    zero_std,
    hallucinated_tools,
    tool_loops,
    length_explosion,
    format_gaming,
    surer,
    low_ess,
    generalisation_gap,
    infrastructure,
    no_control,
)
"""All checks, in the order in which their findings are shown."""


def examine(case: Case) -> list[Finding]:
    """All findings, in the order of :data:`CHECKS`."""
    return [finding for check in CHECKS if (finding := check(case)) is not None]
