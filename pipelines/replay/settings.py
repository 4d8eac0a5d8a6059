"""What ``--set`` changes of a training step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from agentrl.pipelines.file import yaml_text
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.stages.grpo import OnlineConfig
from agentrl.pipelines.stages.train import DPOConfig, KTOConfig, OfflineConfig, PreferenceConfig, SFTConfig, TrainConfig

if TYPE_CHECKING:
    from agentrl.algorithms.base import Objective


KNOBS = ("algorithm", "objective", "optimizer", "beta", "nll", "length_normalized")
"""What ``--set`` may change: what acts on a step whose rows, with their advantages, are recorded."""

IN_ADVANTAGES = (
    *("advantage", "degenerate", "keep_uncertain", "resample", "overlong", "credit", "per_level", "off_policy"),
    *("level", "gamma", "lam", "critic_lam", "adaptive_alpha", "whiten", "critic", "coef", "outcome"),
)
"""Settings of an algorithm that act before the step: they decide which rows there are, and their advantages."""


class ReplayError(ValueError):
    """What cannot be replayed, and why."""


def first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def objective_of(config: BaseModel) -> "Objective":
    """What a training stage with this config minimises."""
    from agentrl.algorithms.dpo import DPO
    from agentrl.algorithms.sft import SFT

    if isinstance(config, SFTConfig):
        return SFT()
    if isinstance(config, DPOConfig):
        return DPO(beta=config.beta, nll=config.nll, length_normalized=config.length_normalized)
    if isinstance(config, PreferenceConfig | KTOConfig):
        return config.objective
    assert isinstance(config, OfflineConfig | OnlineConfig)
    return config.algorithm


def _family(config: BaseModel) -> type[BaseModel]:
    """The config class of the stage that takes any algorithm, or any loss over pairs, if this stage takes only one."""
    return next((family for family in (OnlineConfig, PreferenceConfig) if isinstance(config, family)), type(config))


def changed_by(config: Any, settings: Sequence[str]) -> Any:
    """The config with ``settings``. Raises ReplayError that names a setting which cannot be changed or is wrong."""
    if isinstance(config, DPOConfig):
        own = ("beta", "nll", "length_normalized")
        shared = {name: getattr(config, name) for name in TrainConfig.model_fields}
        settings = [f"objective.{setting}" if setting.partition("=")[0] in own else setting for setting in settings]
        config = PreferenceConfig.model_validate(shared | {"objective": objective_of(config)})
    document = config.model_dump(mode="json")
    for setting in sorted(settings, key=lambda setting: not setting.partition("=")[0].endswith(".type")):
        path, equals, text = setting.partition("=")
        keys = path.split(".")
        if not equals or keys[0] not in KNOBS or keys[0] not in document:
            allowed = [knob for knob in KNOBS if knob in document]
            hint = did_you_mean(keys[0], allowed)
            raise ReplayError(f"--set {setting}: allowed are NAME=VALUE of {', '.join(allowed)}{hint}")
        if keys[0] == "algorithm" and keys[1:] and keys[1] in IN_ADVANTAGES:
            raise ReplayError(
                f"--set {setting}: {keys[1]} acted on the recorded advantages; run the stage again with it"
            )
        if keys[1:] == ["type"]:  # choosing a type with no other key is the published algorithm
            document[keys[0]] = {}
        level = document
        for key in keys[:-1]:
            inside = level.get(key) or {}
            if not isinstance(inside, dict):
                raise ReplayError(f"--set {path}: {key} holds a value, not a mapping")
            level[key] = dict(inside)
            level = level[key]
        try:
            level[keys[-1]] = yaml_text.plain(text)
        except yaml_text.YamlError as error:
            raise ReplayError(f"--set {path}: the value {error.message}") from None
    try:
        return _family(config).model_validate(document)
    except ValidationError as error:
        raise ReplayError(f"--set {' '.join(settings)}: {first_problem(error)}") from None
