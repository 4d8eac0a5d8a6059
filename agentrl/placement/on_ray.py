"""Processes on the machines of a Ray cluster. Ray places them and carries no data: an actor on each machine runs the
same command as elsewhere, and files on shared storage hold all else.

A placement group holds the machines, so that a stage gets all that it asks for at once, or waits.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.placement.base import LaunchError, passed
from agentrl.placement.devices import Devices
from agentrl.schemas.installation import install_hint, python_path

ANSWER_S = 60.0
"""Seconds for the answer to a start or a stop, and of silence until a warning."""

LOOK_S = 1.0
"""Seconds that a question whether a process lives waits for its answer."""

_SOME = 0.01  # of a processor: an actor of a placement group needs a share of its bundle


class _Starter:
    """Lives on another machine, with one process below it."""

    def __init__(self, folder: str) -> None:
        os.chdir(folder)
        self._child: Any = None

    def start(self, command: list[str], env: dict[str, str | None], log: str) -> str:
        """Start it; its address."""
        import ray

        from agentrl.placement.addresses import INTERFACE, own_address
        from agentrl.placement.base import changed, filled
        from agentrl.placement.local import Child, KeptPort

        environment = changed(os.environ, {**env})
        host = own_address(environment) if INTERFACE in environment else ray.util.get_node_ip_address()
        port = KeptPort()
        command = filled(command, host, port.number)
        self._child = Child(command, environment, Path(log), f"{host}:{port.number}", port.close)
        return str(self._child.address)

    def poll(self) -> int | None:
        return self._child.poll() if self._child else None

    def stop(self) -> None:
        if self._child:
            self._child.stop()


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class OnRay:
    """See :class:`agentrl.placement.base.Process`."""

    def __init__(self, starter: Any, address: str, role: str, log: Path, on_end: Callable[[], None]) -> None:
        self._starter, self.address, self._role, self._log = starter, address, role, log
        self._on_end = cache(on_end)  # once
        self._code: int | None = None
        self._question: Any = None
        self._asked, self._warned = 0.0, False

    def poll(self) -> int | None:
        """A machine that does not answer is busy, or its network is: that it is dead is for Ray to say, which asks it
        all the time."""
        import ray

        if self._code is not None:
            return self._code
        if self._question is None:
            self._question, self._asked = self._starter.poll.remote(), time.monotonic()
        if not ray.wait([self._question], timeout=LOOK_S)[0]:
            if not self._warned and time.monotonic() - self._asked > ANSWER_S:
                self._warned = True
                text = (
                    f"the machine of the {self._role} ({self.address}) has not answered for {ANSWER_S:g} s; it counts"
                )
                warnings.warn(f"{text} as alive until Ray gives it up (`ray status`)", stacklevel=2)
            return None
        question, self._question = self._question, None
        try:
            self._code = ray.get(question)
        except ray.exceptions.RayError as error:
            self._code = 1
            with self._log.open("a") as log:
                log.write(f"\nRay gave up the machine of the {self._role} ({self.address}): {_last_line(error)}\n")
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
    cluster that RAY_ADDRESS names, or that this machine belongs to, and waits ``reserve_s`` seconds for them.

    Raises LaunchError if Ray is not installed, if there is no cluster, or if it has not so much in all or in time.
    """

    def __init__(self, nodes: int, gpus: int, env: Mapping[str, str], reserve_s: float) -> None:
        try:
            import ray
        except ImportError:
            raise LaunchError(f"launcher ray needs Ray: {install_hint('ray')}") from None
        self.nodes, self.gpus, self._env = nodes, gpus, dict(env)
        self._reserve_s = reserve_s
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
        if not group.wait(self._reserve_s):
            remove_placement_group(group)
            raise LaunchError(
                f"{self.nodes} machines with {self.gpus} GPUs each were not free for {self._reserve_s:g} s; "
                "`ray status` says who has them, and execution.limits.reserve_s is how long a stage waits"
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
        changes = {**passed(), **self._env, **(env or {})}
        try:
            address: Any = ray.get(starter.start.remote(list(command), changes, str(log.absolute())), timeout=ANSWER_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            ray.kill(starter)
            self._devices.give_back(index, taken)
            raise LaunchError(f"the {role} cannot be started through Ray: {_last_line(error)}") from None
        self._started.append(OnRay(starter, address, role, log, lambda: self._devices.give_back(index, taken)))
        return self._started[-1]

    def close(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for process in self._started:
            process.stop()
        self._started.clear()
        remove_placement_group(self._group)
        self._leave()
