"""Algorithms by name, one module each. A config chooses one by its ``type``; a type with no other key is the published
algorithm. A user's own is ``module:Class``, derived from :class:`PolicyGradient` or :class:`Preference`.

To add an algorithm, write its module and name it in one of the tables below.
"""

from typing import TYPE_CHECKING, Annotated, Any

from agentrl.algorithms.base import Minimised, Objective
from agentrl.algorithms.policy_gradient import PolicyGradient
from agentrl.algorithms.preference import Preference
from agentrl.schemas.choice import OneOf

POLICY_GRADIENTS = {
    "reinforce": "agentrl.algorithms.reinforce:Reinforce",
    "rloo": "agentrl.algorithms.rloo:RLOO",
    "remax": "agentrl.algorithms.remax:ReMax",
    "reinforce++": "agentrl.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "grpo": "agentrl.algorithms.grpo:GRPO",
    "distill": "agentrl.algorithms.distill:Distill",
    "dr_grpo": "agentrl.algorithms.dr_grpo:DrGRPO",
    "dapo": "agentrl.algorithms.dapo:DAPO",
    "gspo": "agentrl.algorithms.gspo:GSPO",
    "cispo": "agentrl.algorithms.cispo:CISPO",
    "starpo_s": "agentrl.algorithms.starpo_s:StarPOS",
    "ppo": "agentrl.algorithms.ppo:PPO",
    "vapo": "agentrl.algorithms.vapo:VAPO",
}
"""Algorithms that learn from rollouts and their rewards."""

PAIRWISE = {
    "dpo": "agentrl.algorithms.dpo:DPO",
    "ipo": "agentrl.algorithms.ipo:IPO",
    "simpo": "agentrl.algorithms.simpo:SimPO",
}
"""Algorithms that learn from preference pairs."""

ALGORITHMS = {
    "sft": "agentrl.algorithms.sft:SFT",
    "kto": "agentrl.algorithms.kto:KTO",
    **PAIRWISE,
    **POLICY_GRADIENTS,
}
"""All algorithms: ``type`` -> ``module:Class``."""


if TYPE_CHECKING:
    PolicyGradientAlgorithm = PolicyGradient
    PairAlgorithm = Preference
    Algorithm = Objective
else:
    PolicyGradientAlgorithm = Annotated[Any, OneOf("algorithm", POLICY_GRADIENTS, PolicyGradient)]
    PairAlgorithm = Annotated[Any, OneOf("loss over pairs", PAIRWISE, Preference)]
    Algorithm = Annotated[Any, OneOf("algorithm", ALGORITHMS, Minimised)]
