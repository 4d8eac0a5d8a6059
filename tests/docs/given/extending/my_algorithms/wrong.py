"""An algorithm that cannot be called as ours are."""

from typing import Any

from agentrl.algorithms.policy_gradient import PolicyGradient


class Wrong(PolicyGradient):
    type: str = "wrong"

    def advantages(self, rollouts: Any, groups: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError
