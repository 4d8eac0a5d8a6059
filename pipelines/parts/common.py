"""What stages that sample from a policy or train it share: loading the policy, and finding its environment."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.engines.base import Sampling
from agentrl.engines.configs import EngineConfig
from agentrl.environments import load_environment
from agentrl.models.tiny import DEFAULT_SIZE, TinySize
from agentrl.pipelines.file.fields import leaves
from agentrl.pipelines.file.readiness import lacks_template
from agentrl.pipelines.handles import Model, Trajectories
from agentrl.pipelines.parts.failed_attempts import FailedAttempts
from agentrl.pipelines.stage import Context, External, StageConfig, reveal
from agentrl.rollouts.exploring import NO_EXPLORATION, Explore
from agentrl.rollouts.limits import DEFAULT_LIMITS, Limits
from agentrl.schemas.choice import plain
from agentrl.schemas.trajectory import NOT_TRAINED, Trajectory

if TYPE_CHECKING:
    from agentrl.engines.base import Engine
    from agentrl.environments.base import Environment
    from agentrl.models.policy import Policy, Speaker
    from agentrl.rewards.component import Reward
    from agentrl.rollouts.runner import RolloutRunner
    from agentrl.rollouts.team import Playing
    from agentrl.schemas.task import Task
    from agentrl.schemas.trajectory import Message
    from agentrl.training.optimizer import OptimizerConfig


REWARDS = "components, {type: format, weight: 0.1} or {type: module:Class, ...}, added to the environment's reward"


class ModelConfig(StageConfig):
    """Which model training starts from: exactly one of ``init`` and ``path``."""

    init: Literal["tiny"] | None = Field(None, description="the embedded tiny model, with fresh weights")
    size: TinySize = Field(DEFAULT_SIZE, description="how large the tiny model is")
    path: Annotated[str, External("model")] | None = Field(
        None, description="a Hugging Face model folder or name, or a GGUF; its own tokenizer and chat template are used"
    )

    dialect: Literal["hermes", "search_r1", "retool"] | None = Field(
        None,
        description="hermes: tools, calls and answers in the Hermes form, for a template that has no way with them; or "
        "the tags that an agent acts by; None: what its chat template says",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> "ModelConfig":
        if (self.init is None) == (self.path is None):
            raise ValueError("set exactly one of init (tiny) and path (a Hugging Face model folder or name)")
        if self.path and self.size != DEFAULT_SIZE:
            raise ValueError("size is that of the tiny model, and a model of a path has its own; leave it out")
        return self

    @field_validator("path")
    @classmethod
    def _has_a_template(cls, path: str | None) -> str | None:
        if path and lacks_template(Path(path).expanduser()):
            raise ValueError("its tokenizer has no chat_template; save one with it, or use a chat model")
        return path


def warn_of_splits(counts: Mapping[str, int], what: str) -> None:
    """Warn if some of ``what`` is trained on, ``counts`` by split, are not of the train split."""
    others = {split: count for split, count in counts.items() if split != "train"}
    if others:
        by_split = ", ".join(f"{split} {count}" for split, count in sorted(others.items()))
        warnings.warn(
            f"{sum(others.values())} of {sum(counts.values())} {what} to train on are not of the train split "
            f"({by_split}): what is measured on these splits from now on is not measured on unseen tasks",
            stacklevel=3,
        )


def refuse_measured(splits: Mapping[str, str], remedy: str = "") -> None:
    """Raise ValueError that names a row that is not of the train split, given the split of each by its id; ``remedy``
    is what else can be done about it."""
    if others := {name: split for name, split in splits.items() if split != "train"}:
        name, split = next(iter(others.items()))
        raise ValueError(
            f"{len(others)} of {len(splits)} rows are not of the train split, {name} is of {split!r}: nothing is made "
            f"from what is measured on; leave them out by trajectories.select{remedy}"
        )


def tagged_as_not_trained(selection: Trajectories) -> int:
    """How many rows of a selection are tagged as not trained on."""
    return sum(NOT_TRAINED in tags for tags in selection.table(["tags"])["tags"].to_pylist())


def warn_of_error(error: str) -> None:
    """Show the traceback of the first environment that failed while rows were verified, if one did."""
    if error:
        warnings.warn(
            f"environments failed while rows or tasks were verified; the first of them:\n{error}", stacklevel=3
        )


def load_policy(model: Model, engine: EngineConfig | None = None, on_host: bool = False) -> "Policy":
    """The policy of an upstream stage. If it only samples, by an ``engine`` that has the weights elsewhere, it stays on
    the host: servers take the GPUs."""
    from agentrl.models.policy import Policy

    return Policy.load(model.path, model.name, on_host=on_host or (engine is not None and engine.elsewhere))


def policy_to_train(model: Model, optimizer: "OptimizerConfig") -> "Policy":
    """The policy of an upstream stage, ready to be trained, and to be the reference or the policy before training: its
    weights are as those of the one that is trained, also where they are in 4 bits."""
    policy = load_policy(model, on_host=optimizer.quantized)
    if optimizer.quantized:
        from agentrl.engines.quantized import quantize

        quantize(policy.model)
    return policy.prepare(optimizer.precision)


def policy_of(model: Model | None, engine: EngineConfig) -> "Policy | None":
    """The policy of an upstream stage that ``engine`` samples from; None if the engine is an endpoint, which has a
    model of its own. Raises ValueError if one of both is too much or too little."""
    check_model(model, engine)
    return load_policy(model, engine) if model is not None else None


def check_model(model: Model | None, engine: EngineConfig) -> None:
    """Raise ValueError if an engine needs the model of an upstream stage and there is none, or the other way round."""
    if engine.exact and model is None:
        raise ValueError(f"engine {engine.type} samples from a model; wire inputs.model")
    if not engine.exact and model is not None:
        raise ValueError(f"engine {engine.type} samples from its own model; leave inputs.model out")


def outside(path: str) -> str | Path:
    """A model folder outside the store, or a name on the Hugging Face hub."""
    folder = Path(path).expanduser()
    return folder if folder.exists() else path


def outside_policy(path: str, on_host: bool = False) -> "Policy":
    """The policy of a model folder outside the store, or of a name on the Hugging Face hub."""
    from agentrl.models.policy import Policy

    return Policy.load(outside(path), on_host=on_host)


def start_policy(
    model: Model | None,
    config: ModelConfig | None,
    conversations: "Iterable[Sequence[Message]]",
    seed: int,
    on_host: bool = False,
) -> "Policy":
    """The policy that training starts from: the input, or what the config names. ``on_host`` keeps it off the GPU until
    its weights are in 4 bits.

    Raises ValueError if both or neither are given.
    """
    from agentrl.chat.dialects import KEY
    from agentrl.models.tiny import tiny_policy

    if model is not None and config is None:
        return load_policy(model, on_host=on_host)
    if config is None or model is not None:
        raise ValueError("wire inputs.model or set with.model: one of them, not both")
    if config.path is None:
        policy = tiny_policy(conversations, seed, config.size)
    else:
        policy = outside_policy(config.path, on_host)
    if config.dialect:
        policy.tokenizer.init_kwargs[KEY] = config.dialect
    return policy


@contextmanager
def rollout_runner(
    context: Context,
    policy: "Policy | None",
    tasks: "Iterable[Task]",
    sampling: Sampling,
    engine: EngineConfig,
    limits: Limits = DEFAULT_LIMITS,
    rewards: "Sequence[Reward]" = (),
    report: bool = True,
    sampler: "Policy | None" = None,
    explore: Explore = NO_EXPLORATION,
    teacher: "Engine | None" = None,
    team: "Playing | None" = None,
) -> "Iterator[RolloutRunner]":
    """A policy in the environments of ``tasks``; ``rewards`` are added to those of the environments. ``report`` shows
    episodes as progress. ``sampler`` is a copy of the policy with a model of the engine's own, if the policy is changed
    while it samples. ``explore``, ``teacher`` and ``team`` are those of :class:`agentrl.rollouts.runner.RolloutRunner`.
    Attempts that fail and are made again are kept. At the end the engines are closed.

    Raises ModelMismatchError if the embedded engine does not give the model's own log-probs, and ValueError if no stage
    chose an environment.
    """
    from agentrl.rollouts.runner import RolloutRunner

    places = begin_rollouts(context, policy, {task.env for task in tasks}, [engine, *rewards])
    tell = _progress(context) if report else None
    built = engine.build(sampler or policy)
    with (
        FailedAttempts(context) as failed,
        RolloutRunner(policy, built, places, sampling, rewards, limits, tell, explore, teacher, failed, team) as runner,
    ):
        yield runner


def begin_rollouts(
    context: Context, policy: "Policy | None", envs: "Iterable[str]", configs: "Sequence[object]"
) -> "dict[str, Environment]":
    """The environments of rollouts, by name. From now on, what is printed shows *** in place of what they and
    ``configs`` hold as secrets. How messages become tokens is recorded, and the tokenizer kept."""
    places = {name: environment(context, name) for name in sorted(envs)}
    for secret in secrets_of([*configs, *(getattr(each, "config", None) for each in places.values())]):
        reveal(secret)
    record_dialect(context, policy)
    if policy:
        context.keep_tokenizer(policy)
    return places


def secrets_of(configs: "Sequence[object]") -> list[str]:
    """What configs hold as secrets."""
    return [value for _, marks, value in leaves(configs) if "secret" in marks and value]


def record_dialect(context: Context, policy: "Speaker | None") -> None:
    """Put into the metrics how messages become tokens, and how that was chosen. Without a policy an endpoint does."""
    if policy is None:
        context.metrics.update(dialect="the endpoint's own", dialect_source="endpoint: it is sent messages")
    else:
        context.metrics.update(dialect=policy.codec.dialect, dialect_source=policy.codec.source)


def _progress(context: Context) -> "Callable[[int, int, dict[str, float | str]], None]":
    def tell(done: int, total: int, numbers: dict[str, float | str]) -> None:
        context.progress(done, total, **numbers)

    return tell


def count(context: Context, counts: "Mapping[str, int]") -> None:
    """Add to the metrics what went wrong in episodes."""
    for name, number in counts.items():
        context.metrics[name] = int(context.metrics.get(name) or 0) + number


def environment(context: Context, name: str) -> "Environment":
    """The environment that tasks name. Raises ValueError if no stage of the pipeline chose it: then its code would not
    be in the fingerprint."""
    if context.chosen is not None and f"environment {plain(name)}" not in context.chosen:
        chosen = ", ".join(sorted(context.chosen)) or "none"
        raise ValueError(
            f"the tasks are of env {name!r}, which no stage before {context.stage} chose (chosen: {chosen}), so its "
            f"code is not in the fingerprint; set with.env: {name!r} in the stage that brings the tasks in "
            "(tasks.import, tasks.from_trajectories), or mark a config field of your own stage with "
            'Choice("environment")'
        )
    return load_environment(name)


def written_about(row: Trajectory, name: str, source: str, **fields: Any) -> Trajectory:
    """A row of text that a stage wrote about another one. It is of the same task, and has no score."""
    return Trajectory(
        trajectory_id=name,
        episode_id=name,
        task_id=row.task_id,
        parent_id=row.trajectory_id,
        source=source,
        env=row.env,
        env_version=row.env_version,
        split=row.split,
        level=row.level,
        reward=None,
        success=None,
        **fields,
    )
