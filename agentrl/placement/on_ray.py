"""Processes on the machines of a Ray cluster. Ray places them and carries no data: an actor on each machine runs the
same command as elsewhere, and files on shared storage hold all else.

A placement group holds the machines, so that a stage gets all that it asks for at once, or waits.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.placement.base import LaunchError, python_path
from agentrl.placement.devices import Devices
from agentrl.schemas.installation import install_hint

WAIT_S = 600.0
"""Seconds that a stage waits for machines that others use."""

ANSWER_S = 60.0
_SOME = 0.01  # of a processor: an actor of a placement group needs a share of its bundle


class _Starter:
    """Lives on another machine, with one process below it."""

    def __init__(self, folder: str) -> None:
        os.chdir(folder)
        self._child: Any = None

    def start(self, command: list[str], env: dict[str, str | None], log: str) -> str:
        """Start it; its address."""
        import ray

        from agentrl.placement.base import changed, filled
        from agentrl.placement.local import Child, free_port

        host, port = ray.util.get_node_ip_address(), free_port()
        environment = changed(os.environ, {**env})
        self._child = Child(filled(command, host, port), environment, Path(log), f"{host}:{port}")
        return str(self._child.address)

    def poll(self) -> int | None:
        return self._child.poll() if self._child else None

    def stop(self) -> None:
        if self._child:
            self._child.stop()


class OnRay:
    """See :class:`agentrl.placement.base.Process`."""

    def __init__(self, starter: Any, address: str, on_end: Callable[[], None]) -> None:
        self._starter, self.address = starter, address
        self._on_end = cache(on_end)  # once
        self._code: int | None = None

    def poll(self) -> int | None:
        import ray

        if self._code is None:
            try:
                self._code = ray.get(self._starter.poll.remote(), timeout=ANSWER_S)
            except (ray.exceptions.RayError, TimeoutError):  # its machine is gone
                self._code = 1
        return self._code

    def stop(self) -> None:
        import ray

        try:
            ray.get(self._starter.stop.remote(), timeout=ANSWER_S)
        except (ray.exceptions.RayError, TimeoutError):  # gone already
            pass
        finally:
            ray.kill(self._starter)
            self._on_end()


class RayLauncher:
    """See :class:`agentrl.placement.base.Launcher`. Takes ``nodes`` machines with ``gpus`` free GPUs each, of the
    cluster that RAY_ADDRESS names, or that this machine belongs to.

    Raises LaunchError if Ray is not installed, if there is no cluster, or if it has not so much in all or in time.
    """

    def __init__(self, nodes: int, gpus: int, env: Mapping[str, str]) -> None:
        try:
            import ray
        except ImportError:
            raise LaunchError(f"launcher ray needs Ray: {install_hint('ray')}") from None
        self.nodes, self.gpus, self._env = nodes, gpus, dict(env)
        self._devices = Devices([[str(number) for number in range(gpus)] for _ in range(nodes)])  # counted; Ray chooses
        self._started: list[OnRay] = []
        self._joined = not ray.is_initialized()
        if self._joined:
            try:
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                reason = str(error).splitlines()[0]
                raise LaunchError(
                    f"no Ray cluster answers ({reason}); start one: ray start --head, or name it: RAY_ADDRESS=host:6379"
                ) from None
        try:
            self._group = self._reserve()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        import ray

        if self._joined:
            ray.shutdown()

    def _reserve(self) -> Any:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        able = sum(node.get("GPU", 0) >= self.gpus and node.get("CPU", 0) >= 1 for node in alive)
        if able < self.nodes:
            had = ", ".join(f"{node.get('GPU', 0):g}" for node in alive)
            raise LaunchError(
                f"the stage needs {self.nodes} machines with {self.gpus} GPUs each, and the Ray cluster has machines "
                f"with {had} GPUs; lower execution.nodes or execution.gpus"
            )
        bundle = {"CPU": 1.0, **({"GPU": float(self.gpus)} if self.gpus else {})}
        group = placement_group([dict(bundle) for _ in range(self.nodes)], strategy="STRICT_SPREAD")
        if not group.wait(WAIT_S):
            remove_placement_group(group)
            raise LaunchError(
                f"{self.nodes} machines with {self.gpus} GPUs each were not free for {WAIT_S:g} s; `ray status` says "
                "who has them"
            )
        return group

    def start(
        self,
        role: str,
        command: Sequence[str],
        *,
        log: Path,
        gpus: int = 0,
        env: Mapping[str, str | None] | None = None,
        node: int | None = None,
    ) -> OnRay:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index, taken = self._devices.take(role, gpus, node)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        paths = {"env_vars": {"PYTHONPATH": python_path()}}
        options = {"num_cpus": _SOME, "num_gpus": gpus, "scheduling_strategy": strategy, "runtime_env": paths}
        starter: Any = ray.remote(_Starter).options(**options).remote(os.getcwd())
        changes = {**self._env, **(env or {})}
        try:
            address: Any = ray.get(starter.start.remote(list(command), changes, str(log.absolute())), timeout=ANSWER_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            ray.kill(starter)
            self._devices.give_back(index, taken)
            raise LaunchError(f"the {role} cannot be started through Ray: {str(error).splitlines()[-1]}") from None
        self._started.append(OnRay(starter, address, lambda: self._devices.give_back(index, taken)))
        return self._started[-1]

    def close(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for process in self._started:
            process.stop()
        self._started.clear()
        remove_placement_group(self._group)
        self._leave()
