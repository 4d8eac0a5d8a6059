"""What ``--set`` changes of a training step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from agentrl.pipelines.file import yaml_text
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.pipelines.stages.train import DPOConfig, KTOConfig, OfflineConfig, PreferenceConfig, SFTConfig, TrainConfig

if TYPE_CHECKING:
    from agentrl.algorithms.base import Objective
    from agentrl.algorithms.policy_gradient import PolicyGradient


KNOBS = ("algorithm", "objective", "optimizer", "beta", "nll", "length_normalized")
"""What ``--set`` may change of a step."""

OF_ROLLOUTS = {OnlineConfig: ("rewards", "observe"), OfflineConfig: ("scorer", "observe")}
"""What it may change beside them if the step is of a stage that learns from rollouts, which are stored."""

ON_ROWS_ALONE = ("clip_low", "clip_high")
"""Settings of an algorithm that leave rows and their advantages as they were recorded."""

BEFORE = {
    "algorithm.resample": "it decided which tasks were sampled",
    "algorithm.critic": "the critic was fitted by it before this step",
    "optimizer.lora": "adapters were there from the first step on",
}
"""What acted before the step, and cannot be changed at it."""


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


@dataclass(frozen=True)
class StepChange:
    """A stage's ``config`` with other settings for one step. ``weights`` are those of stored components of the reward,
    by name. ``of_rows`` says whether the settings act on rows and advantages, which are then computed again from the
    stored rollouts."""

    config: Any
    weights: dict[str, float]
    of_rows: bool


def changed_by(config: Any, settings: Sequence[str]) -> StepChange:
    """The config with ``settings``. Raises ReplayError that names a setting which cannot be changed or is wrong."""
    if isinstance(config, DPOConfig):
        own = ("beta", "nll", "length_normalized")
        shared = {name: getattr(config, name) for name in TrainConfig.model_fields}
        settings = [f"objective.{setting}" if setting.partition("=")[0] in own else setting for setting in settings]
        config = PreferenceConfig.model_validate(shared | {"objective": objective_of(config)})
    online = isinstance(config, OnlineConfig)
    document = config.model_dump(mode="json")
    weights: dict[str, float] = {}
    of_rows = False
    for setting in sorted(settings, key=_rank):
        path, keys = _checked(setting, config, document)
        value = _value(setting)
        on_rows_alone = keys[0] == "optimizer" or (keys[0] == "algorithm" and keys[1:] in _ON_ROWS_ALONE)
        of_rows |= _of_rollouts(config) is not None and not on_rows_alone
        if keys[0] == "rewards" and keys[1:]:
            _weigh(setting, document["rewards"], weights, value)
        else:
            _set(document, path, keys, value)
    try:
        changed: Any = _family(config).model_validate(document)
    except ValidationError as error:
        raise ReplayError(f"--set {' '.join(settings)}: {first_problem(error)}") from None
    if online and changed.algorithm.needs_critic and config.algorithm.needs_critic:  # it is as it was fitted
        algorithm = changed.algorithm.model_copy(update={"critic": config.algorithm.critic})
        changed = changed.model_copy(update={"algorithm": algorithm})
    return StepChange(changed, weights, of_rows)


_ON_ROWS_ALONE = [[name] for name in ON_ROWS_ALONE]


def _of_rollouts(config: BaseModel) -> tuple[str, ...] | None:
    """What :data:`OF_ROLLOUTS` are for a stage with this config; None if it learns from no rollouts."""
    return next((names for kind, names in OF_ROLLOUTS.items() if isinstance(config, kind)), None)


def _rank(setting: str) -> tuple[bool, bool]:
    """Types come before the settings that they have, and lists of components before a weight of one."""
    path = setting.partition("=")[0]
    return not path.endswith(".type"), path.startswith("rewards.")


def _checked(setting: str, config: Any, document: dict[str, Any]) -> tuple[str, list[str]]:
    """The path of a setting, and its keys, if it can be changed."""
    path, equals, _ = setting.partition("=")
    keys = path.split(".")
    allowed = [knob for knob in (*KNOBS, *(_of_rollouts(config) or ())) if knob in document]
    if not equals or keys[0] not in allowed:
        inside = keys[0] in type(getattr(config, "algorithm", config)).model_fields and "algorithm" in allowed
        hint = f"; did you mean 'algorithm.{path}'?" if inside else did_you_mean(keys[0], allowed)
        raise ReplayError(f"--set {setting}: allowed are NAME=VALUE of {', '.join(allowed)}{hint}")
    if why := BEFORE.get(".".join(keys[:2])):
        raise ReplayError(f"--set {setting}: {why}; run the stage again with it")
    return path, keys


def _value(setting: str) -> Any:
    path, _, text = setting.partition("=")
    try:
        return yaml_text.plain(text)
    except yaml_text.YamlError as error:
        raise ReplayError(f"--set {path}: the value {error.message}") from None


def _set(document: dict[str, Any], path: str, keys: list[str], value: Any) -> None:
    level = document
    for number, key in enumerate(keys[:-1]):
        inside = level.get(key) or {}
        if not isinstance(inside, dict):
            raise ReplayError(f"--set {path}: {key} holds a value, not a mapping")
        # choosing a type with no other key is the published algorithm
        level[key] = {} if keys[number + 1 :] == ["type"] else dict(inside)
        level = level[key]
    level[keys[-1]] = value


def _weigh(setting: str, components: Any, weights: dict[str, float], value: Any) -> None:
    """Set the weight of a component of the stage's own, or if it has none of that name, of one that rows have."""
    name = setting.partition("=")[0].removeprefix("rewards.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ReplayError(f"--set {setting}: a weight is a finite number, such as rewards.{name}=0.5")
    for component in components if isinstance(components, list) else []:
        if isinstance(component, dict) and name == _name_of(component):
            component["weight"] = value
            return
    weights[name] = float(value)


def _name_of(component: dict[str, Any]) -> str:
    return component.get("name") or str(component.get("type", "")).rpartition(":")[2]


def check_needs(was: "PolicyGradient", changed: "PolicyGradient") -> None:
    """Raise ReplayError if the changed algorithm needs what the stage did not make."""
    lacks = {
        f"a critic, and {was.type} fitted none": changed.needs_critic and not was.needs_critic,
        f"a greedy rollout of each task, and {was.type} sampled none": changed.needs_greedy and not was.needs_greedy,
        "a teacher, whose log-probs are not recorded": changed.needs_teacher,
    }
    for what, lacking in lacks.items():
        if lacking:
            raise ReplayError(f"algorithm.type: {changed.type} needs {what}; run the stage again with it")
