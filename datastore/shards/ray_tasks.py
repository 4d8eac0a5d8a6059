"""Shards as tasks of a Ray cluster: of the one that ``RAY_ADDRESS`` names or that this machine belongs to. Its nodes
see the store under the same name, and have this package."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from agentrl.datastore.optional import optional
from agentrl.datastore.shards.shard import Ending, Shard, ShardError, packed
from agentrl.datastore.shards.worker import installed


class RayTasks:
    """``workers``: how many tasks at once; None: as many as the cluster has CPUs. ``memory_gib`` and
    ``gpus``: of each."""

    def __init__(self, workers: int | None = None, memory_gib: float | None = None, gpus: int | None = None) -> None:
        self._ray = optional("ray", "ray")
        if not self._ray.is_initialized():
            try:
                self._ray.init(address="auto", log_to_driver=False, configure_logging=False)
            except ConnectionError as error:
                reason = f"no Ray cluster can be reached ({error}); set RAY_ADDRESS, or start one by `ray start --head`"
                raise ShardError(reason) from None
            except RuntimeError as error:  # Ray or Python of another version than the cluster's
                reason = " ".join(str(error).split())[:300]
                raise ShardError(f"the Ray cluster refuses this process: {reason}; install what it has") from None
        self._workers = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        if memory_gib:
            options["memory"] = int(memory_gib * 2**30)
        if gpus:
            options["num_gpus"] = gpus
        self._task = self._ray.remote(_work()).options(**options)
        self._running: dict[Any, int] = {}
        self._numbers = count()

    @property
    def room(self) -> int:
        return self._workers - len(self._running)

    @property
    def working(self) -> dict[int, str]:
        """Those that wait in Ray's own queue are among them."""
        return {number: _name(reference) for reference, number in self._running.items()}

    notice = ""

    def start(self, shards: Sequence[Shard]) -> list[int]:
        numbers = []
        for shard in shards:
            numbers.append(next(self._numbers))
            self._running[self._task.remote(packed(shard), installed())] = numbers[-1]
        return numbers

    def ended(self, timeout_s: float) -> list[tuple[int, Ending]]:
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        outcomes = []
        for reference in ready:
            try:
                outcome = Ending(*self._ray.get(reference))
            except self._ray.exceptions.RayError as error:
                reason = " ".join(str(error).split())[:300]
                outcome = Ending(_name(reference), f"{type(error).__name__}: {reason}", died=True)
            outcomes.append((self._running.pop(reference), outcome))
        return outcomes

    def stop(self, number: int) -> None:
        for reference in [reference for reference, other in self._running.items() if other == number]:
            self._ray.cancel(reference, force=True)
            del self._running[reference]

    def close(self) -> None:
        for number in list(self._running.values()):
            self.stop(number)


def _name(reference: Any) -> str:
    """By which `ray get tasks` says where it runs."""
    return f"task {reference.task_id().hex()} of Ray"


def _work() -> Any:
    """The task. It is sent by its code, not by its name, so that it can say that a worker lacks this package."""

    def work(shard: bytes, driver: str) -> tuple[Any, ...]:
        import platform

        try:
            from agentrl.datastore.shards.worker import tried

            return tuple(tried(shard, driver))
        except ImportError as error:
            return platform.node(), f"{error}; install agentrl {driver} on all workers", False, False

    return work
