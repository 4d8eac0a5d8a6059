"""The experiments of ``methods.py`` about what updates a policy online, in `words`: as many rollouts for each way, at
the learning rate that is best for GRPO if none is named.

- algorithms: policy gradients.
- updates: ReFT's settings of PPO; adapters over weights as they are and in 4 bits (QLoRA); replayed rows whose tokens
  are weighed by their own ratio or by that of their prefix; and calls at random. SPLIT=dev tries :data:`TRIED`.
"""

from typing import Any

from arms import SMALL, gain
from methods import SPLIT
from methods_signals import beside_grpo

PPO = {"type": "ppo", "gamma": 1.0, "lam": 0.95, "critic": {"pretrain": 2}}
LORA = {"rank": 16, "alpha": 32}
REPLAYS = {"replay, ratios of tokens": "truncate", "replay, ratios of prefixes": "truncate_prefix"}


def adapters(lr: float, **lora: Any) -> dict[str, Any]:
    return {"lr": lr, "optimizer": {"lora": {**LORA, **lora}}}


ALGORITHMS: dict[str, dict[str, Any]] = {
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
}
UPDATES: dict[str, dict[str, Any]] = {
    "ReFT": {
        "algorithm": {**PPO, "kl": {"coef": 0.01, "estimator": "k1", "where": "reward"}},
        "rewards": [{"type": "format", "weight": 0.1, "unrewarded": True}],
    },
    "LoRA": adapters(1e-2),
    "QLoRA": adapters(1e-2, quantize="nf4"),
    **{
        name: {"replay": {"share": 0.5, "draw": "uniform", "correction": {bound: 2.0, "min_ess": 0.2}}}
        for name, bound in REPLAYS.items()
    },
    "calls at random": {"explore": {"tool": 0.05}},
}
TRIED = {
    **{f"LoRA, {lr:g}": adapters(lr) for lr in (5e-3, 1e-2, 2e-2)},
    **{f"QLoRA, {lr:g}": adapters(lr, quantize="nf4") for lr in (5e-3, 1e-2, 2e-2)},
    **{f"calls at random, {share:g}": {"explore": {"tool": share}} for share in (0.05, 0.2)},
}
"""Adapters among :data:`UPDATES` have the rate at which LoRA solves most dev tasks of seed 10."""


def algorithms(env: str) -> bool:
    arms = beside_grpo("algorithms", env, ALGORITHMS)
    met = [gain(f"algorithms, {env}, {name}", arms, "GRPO", name) for name in ALGORITHMS]
    return all(met)


def updates(env: str) -> bool:
    ways = TRIED if SPLIT == "dev" and not SMALL else UPDATES
    arms = beside_grpo("updates", env, ways)
    met = [gain(f"updates, {env}, {name}", arms, "GRPO", name) for name in ways]
    if ways is UPDATES:
        met.append(gain(f"updates, {env}, ratios", arms, *REPLAYS))
        met.append(gain(f"updates, {env}, 4 bits", arms, "LoRA", "QLoRA"))
    return all(met)
