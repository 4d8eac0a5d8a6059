"""Limits of endpoints, which the workers of an engine share."""

from collections.abc import Sequence

from agentrl.datastore.errors import StoreError
from agentrl.engines.configs import EngineConfig, OpenAIConfig
from agentrl.rewards.asking import Asking
from agentrl.rewards.component import Reward
from agentrl.schemas.pipeline import ShardEngine


def with_shared_limits(rewards: Sequence[Reward], engine: ShardEngine) -> list[Reward]:
    """Rewards as each worker of an engine has them: what they ask, by :func:`with_shared_limit`."""

    return [
        reward.model_copy(
            update={
                "engines": [
                    with_shared_limit(f"reward {reward.component}, engine", each, engine) for each in reward.engines
                ]
            }
        )
        if isinstance(reward, Asking)
        else reward
        for reward in rewards
    ]


def with_shared_limit(where: str, asked: EngineConfig, engine: ShardEngine) -> EngineConfig:
    """What is ``asked`` as each worker of an engine has it. Of an endpoint's requests at once and per minute each
    worker has its share, rounded down, so that all together keep the limit. Raises StoreError for a limit that cannot
    be shared, or if the number of workers is not known; ``where`` it is begins the message."""
    from agentrl.datastore.shards.engines import workers_of

    if engine.type in (None, "here") or not isinstance(asked, OpenAIConfig):
        return asked
    where, workers = f"{where} {asked.model}", workers_of(engine) if engine.type == "processes" else engine.workers
    if asked.max_cost is not None:
        raise StoreError(
            f"{where}: max_cost: {asked.max_cost:g} cannot be kept by workers, which do not know what others spend; "
            "leave execution.engine out, or max_cost"
        )
    if workers is None:
        raise StoreError(
            f"{where}: its limit of {asked.concurrency} requests at once is shared by all workers, and their number "
            f"is not known with {engine.type}; set execution.engine.workers"
        )
    shares = {}
    for name in ("concurrency", "requests_per_minute"):
        limit = getattr(asked, name)
        if limit is not None and limit < workers:
            raise StoreError(
                f"{where}: {name}: {limit} cannot be shared by {workers} workers; set execution.engine.workers to "
                f"{limit} or less"
            )
        shares[name] = limit and limit // workers
    return asked.model_copy(update=shares)
