"""The stage that brings a model into the store."""

from typing import NamedTuple

from pydantic import field_validator

from agentrl.pipelines.handles import Model
from agentrl.pipelines.parts.common import ModelConfig, start_policy
from agentrl.pipelines.stage import Context, StageConfig, stage


class ModelImportConfig(StageConfig):
    model: ModelConfig

    @field_validator("model")
    @classmethod
    def _from_outside(cls, model: ModelConfig) -> ModelConfig:
        if model.path is None:
            raise ValueError("a tiny model is drawn by the stage that trains it; set path")
        return model


class ImportedModel(NamedTuple):
    model: Model


@stage("model.import", version=1)
def import_model(context: Context, config: ModelImportConfig) -> ImportedModel:
    """A model folder, a name on the Hugging Face hub or a GGUF as an ordinary model folder of the store, untrained: to
    sample from it, measure it, or train it by several stages that start alike."""
    policy = start_policy(None, config.model, (), context.seed)
    context.metrics.update(parameters=policy.model.num_parameters())
    return ImportedModel(context.model(policy.save))
