"""Stages that make tasks."""

from typing import NamedTuple

from pydantic import Field, field_validator

from agentrl.environments import load_environment
from pipelines.handles import Tasks
from pipelines.stage import Context, StageConfig, stage


class GenerateConfig(StageConfig):
    env: str = Field(description="an environment's name, or package.module:Class")
    train: int = Field(512, ge=1)
    dev: int = Field(256, ge=0, description="settings are chosen on these")
    heldout: int = Field(512, ge=0, description="only results are reported on these")

    @field_validator("env")
    @classmethod
    def _known(cls, env: str) -> str:
        load_environment(env)
        return env


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
