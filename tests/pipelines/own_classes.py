"""Projects with classes of the user's own, outside the repository."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import Plan, Status, make_plan
from agentrl.pipelines.run.execute import job_of, perform

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OWN = (
    "my_algorithms",
    "my_engines",
    "my_rewards",
    "my_rules",
    "my_formats",
    "my_shop",
    "my_classes",
    "my_helper",
    "my_family",
    "my_agent",
)


WARM = """\
  tasks: {uses: tasks.generate, with: {env: lookup, train: 4, dev: 1, heldout: 1}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  warm: {uses: train.sft, inputs: {trajectories: expert}, with: {model: {init: tiny}, steps: 1, batch: 4}}
"""
"""Stages that end in a tiny model, from few tasks."""

PIPELINE = (
    f"name: p\nstages:\n{WARM}"
    + """\
  rl:
    uses: train.online
    inputs: {model: warm, tasks: tasks.train}
    with: {iterations: 1, tasks: 2, samples: 2, CHOICE}
  other: {uses: train.online, inputs: {model: warm, tasks: tasks.train}, with: {iterations: 1, tasks: 2, samples: 2}}
"""
)


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    importlib.invalidate_caches()


@contextmanager
def copied(name: str, to: Path) -> Iterator[Path]:
    """A copy of an example that a test may edit; what was imported from it is forgotten at the end."""
    before = list(sys.path)
    yield example(name, to).parent
    sys.path[:] = before
    forget()


def planned(path: Path, *settings: str) -> Plan:
    store = str(path.parent / "store")
    return make_plan(load(str(path), settings=settings), Catalog(store), store)


def run(path: Path, *settings: str) -> TrajectoryBuffer:
    plan = planned(path, *settings)
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))
    return TrajectoryBuffer(plan.store)


def reasons(plan: Plan) -> dict[str, str]:
    """The first reason of each stage that is to run again."""
    return {name: step.reasons[0] for name, step in plan.steps.items() if step.status is not Status.CACHED}


def example(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES / name, folder / "example")) / "pipeline.yaml"
