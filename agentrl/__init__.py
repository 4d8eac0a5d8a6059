"""agentrl: the offline data engine for agentic RL.

These names are the interface for scripts, notebooks and code of one's own: see ``docs/how-to/python.md``. They change
with the minor version only, and a name that goes warns for one minor version before. Everything else may change at any
time. Names are loaded when they are first used, so ``import agentrl`` costs nothing.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from agentrl.datastore.curation.rules import OwnRule as OwnRule
    from agentrl.datastore.errors import StoreError as StoreError
    from agentrl.datastore.formats.own import OwnFormat as OwnFormat
    from agentrl.engines.base import EngineError as EngineError
    from agentrl.environments.base import Environment as Environment
    from agentrl.environments.base import Episode as Episode
    from agentrl.environments.base import Observation as Observation
    from agentrl.environments.base import Score as Score
    from agentrl.environments.base import Step as Step
    from agentrl.environments.tools import ToolError as ToolError
    from agentrl.environments.tools import tool as tool
    from agentrl.flows.api.comparison import compare as compare
    from agentrl.flows.api.cuts import Cut as Cut
    from agentrl.flows.api.cuts import cut as cut
    from agentrl.flows.api.pipeline import Pipeline as Pipeline
    from agentrl.flows.api.pipeline import load as load
    from agentrl.flows.api.run import RunResult as RunResult
    from agentrl.flows.api.run import StageResult as StageResult
    from agentrl.flows.api.servers import ModelServer as ModelServer
    from agentrl.flows.api.servers import View as View
    from agentrl.flows.api.store import Store as Store
    from agentrl.flows.run import CannotRunError as CannotRunError
    from agentrl.pipelines.file.problems import SpecError as SpecError
    from agentrl.pipelines.handles import Model as Model
    from agentrl.pipelines.handles import Pairs as Pairs
    from agentrl.pipelines.handles import Report as Report
    from agentrl.pipelines.handles import Scores as Scores
    from agentrl.pipelines.handles import Table as Table
    from agentrl.pipelines.handles import Tasks as Tasks
    from agentrl.pipelines.handles import Trajectories as Trajectories
    from agentrl.pipelines.harness import Harness as Harness
    from agentrl.pipelines.plan.plan import Plan as Plan
    from agentrl.pipelines.results.compare import Comparison as Comparison
    from agentrl.pipelines.run.worker import StageError as StageError
    from agentrl.pipelines.stage import Context as Context
    from agentrl.pipelines.stage import StageConfig as StageConfig
    from agentrl.pipelines.stage import stage as stage
    from agentrl.rewards.component import Reward as Reward
    from agentrl.rollouts.demonstrations import demonstrate as demonstrate
    from agentrl.schemas.pair import Pair as Pair
    from agentrl.schemas.pipeline import PipelineSpec as PipelineSpec
    from agentrl.schemas.pipeline import StageSpec as StageSpec
    from agentrl.schemas.task import Task as Task
    from agentrl.schemas.trajectory import Message as Message
    from agentrl.schemas.trajectory import RewardComponent as RewardComponent
    from agentrl.schemas.trajectory import Role as Role
    from agentrl.schemas.trajectory import ToolCall as ToolCall
    from agentrl.schemas.trajectory import Trajectory as Trajectory

_HOMES = {
    "datastore.curation.rules": ("OwnRule",),
    "datastore.errors": ("StoreError",),
    "datastore.formats.own": ("OwnFormat",),
    "engines.base": ("EngineError",),
    "environments.base": ("Environment", "Episode", "Observation", "Score", "Step"),
    "environments.tools": ("ToolError", "tool"),
    "flows.api.comparison": ("compare",),
    "flows.api.cuts": ("Cut", "cut"),
    "flows.api.pipeline": ("Pipeline", "load"),
    "flows.api.run": ("RunResult", "StageResult"),
    "flows.api.servers": ("ModelServer", "View"),
    "flows.api.store": ("Store",),
    "flows.run": ("CannotRunError",),
    "pipelines.file.problems": ("SpecError",),
    "pipelines.handles": ("Model", "Pairs", "Report", "Scores", "Table", "Tasks", "Trajectories"),
    "pipelines.harness": ("Harness",),
    "pipelines.plan.plan": ("Plan",),
    "pipelines.results.compare": ("Comparison",),
    "pipelines.run.worker": ("StageError",),
    "pipelines.stage": ("Context", "StageConfig", "stage"),
    "rewards.component": ("Reward",),
    "rollouts.demonstrations": ("demonstrate",),
    "schemas.pair": ("Pair",),
    "schemas.pipeline": ("PipelineSpec", "StageSpec"),
    "schemas.task": ("Task",),
    "schemas.trajectory": ("Message", "RewardComponent", "Role", "ToolCall", "Trajectory"),
}
_HOME = {name: f"agentrl.{home}" for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'agentrl' has no public name {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(_HOME[name]), name)


def _version() -> str:
    """That of the installed distribution. Its package takes longer to import than all else here."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("agentrl-engine")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return __all__


def _show_rows_in_notebooks() -> None:
    """Tell IPython, if it runs, how trajectories and pairs are shown. Their classes say what the data is, and render
    nothing."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        html = shell.display_formatter.formatters["text/html"]
        for name in ("trajectory", "pair"):
            html.for_type_by_name(
                f"agentrl.schemas.{name}",
                name.capitalize(),
                lambda row, name=name: getattr(import_module("agentrl.pipelines.displays"), name)(row),
            )


_show_rows_in_notebooks()
