"""The methods that workers of vLLM get (``--worker-extension-cls``): new weights as what changed in them, and a mixture
of experts that is loaded again on a CPU.

vLLM 0.32 packs the weights of experts for its CPU kernel when it begins, but not when it loads weights again: then the
kernel reads weights that were not packed, and log-probs are wrong by 0.7 nats on average (see
docs/decisions/0040-weights-of-servers.md).
"""

import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .beside import SecondTree, made_beside, put_in
from .delta import Copy, Delta, DeltaError

Step = tuple[str, str]
"""The digest of weights, and the folder that has them or the delta that leads to them from those before."""


class Extension:
    """An extension of vLLM's worker class. What it cannot do it answers, as a ``problem``: an error of a worker would
    end the engine."""

    model_runner: Any

    def forget_expert_kernels(self) -> None:
        """Make the next load of weights make the kernels of experts anew, which packs what they read."""
        for module in self.model_runner.get_model().modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def fetch_weights(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Begin to make ready the weights of the last of ``steps``, while the model goes on; see
        :meth:`weights_state`."""
        return self._receiver().fetch(steps)

    def weights_state(self) -> dict[str, Any]:
        """``ready`` and ``loaded`` are digests of weights, or None; ``problem`` says why the last ones are not
        ready."""
        return self._receiver().state()

    def take_weights(self, digest: str) -> dict[str, Any]:
        """Compute with the weights that are ready from now on. Nothing may sample meanwhile."""
        return self._receiver().take(digest)

    def _receiver(self) -> "WeightReceiver":
        if not hasattr(self, "_agentrl_receiver"):
            self._agentrl_receiver = WeightReceiver(self)
        return self._agentrl_receiver


class WeightReceiver:
    """The weights that a worker makes ready, and those that it has loaded."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.loaded: str | None = None
        self.copy: Copy | None = None
        self.whole = 0
        self.why_not_beside = ""
        self._made: SecondTree | None = None
        self._pool = ThreadPoolExecutor(1, "fetch-weights")
        self._wanted: str | None = None
        self._fetching: Future[str] | None = None

    def fetch(self, steps: Sequence[Step]) -> dict[str, Any]:
        """See :meth:`Extension.fetch_weights`."""
        state = self.state()
        if self._wanted != steps[-1][0] or (state["problem"] and not state["fetching"]):
            self._wanted = steps[-1][0]
            self._fetching = self._pool.submit(self._fetched, list(steps))
        return self.state()

    def state(self) -> dict[str, Any]:
        """See :meth:`Extension.weights_state`. ``whole`` counts how often all weights were read."""
        done = self._fetching is not None and self._fetching.done()
        problem = self._fetching.result() if done and self._fetching else ""
        return {
            "fetching": self._fetching is not None and not done,
            "ready": self._wanted if done and not problem else None,
            "problem": problem,
            "loaded": self.loaded,
            "whole": self.whole,
            "why_not_beside": self.why_not_beside,
        }

    def take(self, digest: str) -> dict[str, Any]:
        """See :meth:`Extension.take_weights`."""
        if self.loaded == digest:
            return self.state()
        if self.state()["ready"] != digest or self.copy is None:
            return self.state() | {"problem": self.state()["problem"] or f"weights {digest[:8]} are not ready"}
        self.loaded = None  # until all of them are in place
        try:
            self._load(self.copy)
        except Exception as error:
            self._wanted = None
            return self.state() | {"problem": _told(error)}
        self.loaded = digest
        return self.state()

    def _fetched(self, steps: list[Step]) -> str:
        """What went wrong, if something did."""
        self._made = None
        try:
            self.copy = self._reached(self.copy, steps)
        except Exception as error:
            self.copy = None
            return _told(error)
        try:
            self._made = self._beside(self.copy)
        except Exception as error:
            self.why_not_beside = _told(error)
        return ""

    def _reached(self, held: Copy | None, steps: list[Step]) -> Copy:
        """The weights of the last step, from those that are held if they lead there, or else from a whole folder."""
        self.copy = None  # it is changed in place
        held_digest = None if held is None else held.digest
        known = [number for number, (digest, _) in enumerate(steps) if digest == held_digest]
        if held is not None and known:
            try:
                return _followed(held, steps[known[-1] + 1 :], steps[-1][0])
            except DeltaError:
                held = None  # all of it is read again
        first = max(number for number, (_, path) in enumerate(steps) if Path(path).is_dir())
        self.whole += 1
        copy = Copy.of_folder(Path(steps[first][1]))
        if copy.digest != steps[first][0]:
            raise DeltaError(f"the weights in {steps[first][1]} are not those that were written")
        return _followed(copy, steps[first + 1 :], steps[-1][0])

    def _beside(self, copy: Copy) -> SecondTree | None:
        """A second model with these weights, where it fits beside the first one and nothing has kept its addresses."""
        runner = self.worker.model_runner
        if self.worker.device.type != "cpu" or not runner.model_config.enforce_eager:
            return None
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.worker.vllm_config):
            return made_beside(runner.get_model(), copy.tensors)

    def _load(self, copy: Copy) -> None:
        runner = self.worker.model_runner
        if self._made is not None:
            made, self._made = self._made, None
            put_in(made, runner.model_config.dtype)
            runner.reset_lora_state()
            runner.reset_encoder_cache()
            runner.reset_mm_cache()
        else:
            self.worker.forget_expert_kernels()
            self.worker.reload_weights(weights_iterator=iter(copy.tensors.items()))


def _followed(copy: Copy, steps: list[Step], wanted: str) -> Copy:
    for digest, path in steps:
        if digest != copy.digest:
            copy.apply(Delta.read(Path(path)))
    if copy.digest != wanted:
        raise DeltaError(f"the deltas lead to weights with the digest {copy.digest[:8]}, not {wanted[:8]}")
    return copy


def _told(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
