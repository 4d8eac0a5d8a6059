"""The experiments of ``methods.py`` about what updates a policy online, in `words`: as many rollouts for each.

- algorithms: every policy gradient beside GRPO, and ReFT's settings of PPO. With SPLIT=dev at both of :data:`RATES`,
  otherwise at the better of them.
- adapters: GRPO on LoRA's adapters, over weights as they are and in 4 bits (QLoRA).
- prefixes: GRPO with replayed rows, each token weighed by its own ratio or by that of its prefix.
"""

from typing import Any

from arms import SMALL, gain
from methods import SPLIT
from methods_signals import beside_grpo

RATES = (1e-3, 2e-3)
"""The second is that of GRPO."""
BEST: dict[str, float] = {}
"""Algorithms that solved more dev tasks of seed 10 at the first rate."""
PPO = {"type": "ppo", "gamma": 1.0, "lam": 0.95, "critic": {"pretrain": 2}}
WAYS: dict[str, dict[str, Any]] = {
    "REINFORCE": {"algorithm": {"type": "reinforce"}},
    "ReMax": {"algorithm": {"type": "remax"}},
    "RLOO": {"algorithm": {"type": "rloo"}},
    "REINFORCE++": {"algorithm": {"type": "reinforce++"}},
    "Dr. GRPO": {"algorithm": {"type": "dr_grpo"}},
    "DAPO": {"algorithm": {"type": "dapo", "resample": 0}},
    "GSPO": {"algorithm": {"type": "gspo"}},
    "CISPO": {"algorithm": {"type": "cispo"}},
    "StarPO-S": {"algorithm": {"type": "starpo_s"}},
    "PPO": {"algorithm": PPO},
    "PPO, turns": {"algorithm": {**PPO, "level": "turn"}},
    "VAPO": {"algorithm": {"type": "vapo", "critic": {"pretrain": 2}}},
    "ReFT": {
        "algorithm": {**PPO, "kl": {"coef": 0.01, "estimator": "k1", "where": "reward"}},
        "rewards": [{"type": "format", "weight": 0.1, "unrewarded": True}],
    },
}


def algorithms(env: str) -> bool:
    if SPLIT == "dev" and not SMALL:
        ways = {f"{name}, {lr:g}": {**way, "lr": lr} for name, way in WAYS.items() for lr in RATES}
    else:
        ways = {name: {**way, "lr": BEST.get(name, RATES[-1])} for name, way in WAYS.items()}
    return _all_beside("algorithms", env, ways)


LORA = {"rank": 16, "alpha": 32}
ADAPTER_RATES = (5e-3, 1e-2, 2e-2)
"""Of which the best on dev tasks of seed 10 is :data:`ADAPTER_RATE`."""
ADAPTER_RATE = 1e-2


def adapters(env: str) -> bool:
    kinds = {"LoRA": LORA, "QLoRA": {**LORA, "quantize": "nf4"}}
    rates = ADAPTER_RATES if SPLIT == "dev" and not SMALL else (ADAPTER_RATE,)
    ways = {f"{name}, {lr:g}": {"lr": lr, "optimizer": {"lora": lora}} for name, lora in kinds.items() for lr in rates}
    return _all_beside("adapters", env, ways)


REPLAYED = {"share": 0.5, "draw": "uniform"}
"""What did best on dev tasks of seed 10 in ``online_replay``."""


def prefixes(env: str) -> bool:
    tokens, prefix = "replay, ratios of tokens", "replay, ratios of prefixes"
    bounds = {tokens: "truncate", prefix: "truncate_prefix"}
    ways = {
        name: {"replay": {**REPLAYED, "correction": {bound: 2.0, "min_ess": 0.2}}} for name, bound in bounds.items()
    }
    arms = beside_grpo("prefixes", env, ways)
    met = [gain(f"prefixes, {env}, {name}", arms, "GRPO", name) for name in ways]
    return gain(f"prefixes, {env}", arms, tokens, prefix) and all(met)


def _all_beside(experiment: str, env: str, ways: dict[str, dict[str, Any]]) -> bool:
    arms = beside_grpo(experiment, env, ways)
    met = [gain(f"{experiment}, {env}, {name}", arms, "GRPO", name) for name in ways]
    return all(met)
