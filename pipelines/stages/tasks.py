"""Stages that make tasks."""

from typing import Annotated, NamedTuple

from pydantic import Field

from agentrl.environments import load_environment
from pipelines.handles import Tasks
from pipelines.stage import Choice, Context, StageConfig, stage


class GenerateConfig(StageConfig):
    env: Annotated[str, Choice("environment")] = Field(description="an environment's name, or module:Class")
    train: int = Field(512, ge=1)
    dev: int = Field(256, ge=0, description="settings are chosen on these")
    heldout: int = Field(512, ge=0, description="only results are reported on these")


class Splits(NamedTuple):
    train: Tasks
    dev: Tasks
    heldout: Tasks


@stage("tasks.generate", version=1)
def generate(context: Context, config: GenerateConfig) -> Splits:
    """Draw tasks of one environment, in splits that share no question."""
    sizes = {"train": config.train, "dev": config.dev, "heldout": config.heldout}
    splits = load_environment(config.env).tasks(sizes, context.seed)
    context.metrics.update({name: len(rows) for name, rows in splits.items()})
    return Splits(**{name: context.tasks(rows, name) for name, rows in splits.items()})
