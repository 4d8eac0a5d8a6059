"""Generation engines by name. A config chooses one by its ``type``: one of ours, or a config of one's own, a class that
is derived from :class:`agentrl.engines.configs.EngineConfig` and named ``module:Class``.

To add an engine, write its module, a config in :mod:`agentrl.engines.configs`, and name that in the table below.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from agentrl.engines.configs import EngineConfig
from agentrl.schemas.choice import OneOf

ENGINES = {
    "transformers": "agentrl.engines.configs:EmbeddedConfig",
    "vllm": "agentrl.engines.configs:VLLMConfig",
    "openai": "agentrl.engines.configs:OpenAIConfig",
}
"""``type`` -> ``module:Class`` of the config, whose ``build`` makes the engine."""


def _gives_ids(config: EngineConfig) -> EngineConfig:
    if not config.exact:
        raise ValueError(
            f"engine {config.type} gives text, and this stage needs token ids with their log-probs of the model of its "
            "input; use transformers, or sample with trajectories.sample and train on its rows with train.sft"
        )
    return config


if TYPE_CHECKING:
    EngineChoice = EngineConfig
    TokenEngineChoice = EngineConfig
else:
    EngineChoice = Annotated[Any, OneOf("engine", ENGINES, EngineConfig)]
    TokenEngineChoice = Annotated[EngineChoice, AfterValidator(_gives_ids)]
