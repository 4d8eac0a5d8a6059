"""What workers of vLLM on a CPU need to load a mixture of experts again. vLLM 0.32 packs the weights of experts for its
CPU kernel when it begins, but not when it loads weights again: then the kernel reads weights that were not packed, and
log-probs are wrong by 0.7 nats on average (see docs/decisions/0040-weights-of-servers.md).

A copy of this file lies beside the weights, where the interpreter of vLLM finds it, so it imports nothing of ours.
"""

from typing import Any


class CPUExperts:
    """An extension of vLLM's worker class."""

    model_runner: Any

    def forget_expert_kernels(self) -> None:
        """Make the next load of weights make the kernels of experts anew, which packs what they read."""
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
