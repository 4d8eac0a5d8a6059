"""The rows of a step, made again from the stored rollouts of an online stage, by the very code that made them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from agentrl.chat.codec import tokenize
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import StoreError
from agentrl.pipelines.methods.echo.observed import weighing
from agentrl.pipelines.replay.recorded import StepRows, check_equal, table_of
from agentrl.pipelines.replay.rewards import OtherRewards
from agentrl.pipelines.replay.settings import ReplayError, StepChange, check_needs
from agentrl.pipelines.stages.checkpoints import number_of
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.schemas.manifest import Manifest
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.online.recorded import Recorded
    from agentrl.online.replay import ReplayDraw


class Rollouts:
    """The stored rollouts of an online stage, by the iteration that trained on them."""

    def __init__(self, catalog: Catalog, manifest: Manifest, config: OnlineConfig) -> None:
        self.buffer = TrajectoryBuffer(catalog.storage.uri)
        self.stage = manifest.ingredients.stage
        self._weights = _drawn(table_of(catalog, manifest, "steps")) if config.replay else {}
        per_ticket = config.samples + config.algorithm.needs_greedy
        tickets = table_of(catalog, manifest, "coverage").select(["ticket", "batch"]).to_pylist()
        batch_of = {ticket["ticket"]: ticket["batch"] for ticket in tickets}
        self.ids: dict[int, list[str]] = defaultdict(list)
        for name in table_of(catalog, manifest, "trajectories")["trajectory_id"].to_pylist():
            self.ids[batch_of.get(number_of(name) // per_ticket, -1)].append(name)

    def of(self, iteration: int) -> list[Trajectory]:
        """All rollouts that an iteration sampled, in the order of their tickets. Raises ReplayError if some are not
        there."""
        rows = self._read(iteration, self.ids[iteration])
        return sorted(rows, key=lambda row: (number_of(row.trajectory_id), row.segment))

    def drawn(self, iteration: int, policy: "Policy") -> "ReplayDraw | None":
        """The stored rollouts that an iteration trained on beside them, as they were drawn. Raises ReplayError if some
        are not there."""
        from agentrl.online.replay import ReplayDraw

        if (weights := self._weights.get(iteration)) is None:
            return None
        rows = self._read(iteration, list(weights))
        tokens = [tokenize(row, policy.codec, policy.tokenizer_fingerprint) for row in rows]
        return ReplayDraw(tokens, list(weights.values()))

    def _read(self, iteration: int, ids: Sequence[str]) -> list[Trajectory]:
        try:
            return self.buffer.get_many(ids)
        except (StoreError, LookupError) as error:
            raise ReplayError(
                f"the rollouts of step {iteration} of {self.stage} are not in the buffer any more ({error.args[0]}); "
                "settings of the loss and of the optimizer can be replayed without them"
            ) from None


def _drawn(steps: pa.Table) -> dict[int, dict[str, float]]:
    """By iteration, what each stored rollout weighed in its draw."""
    weights: dict[int, dict[str, float]] = defaultdict(dict)
    for row in steps.filter(pc.greater(steps["replay_weight"], 0)).to_pylist():
        weights[row["step"]][row["trajectory_id"]] = row["replay_weight"]
    return weights


class Again:
    """An online stage that is trained again up to a step, whose rows a ``change`` makes from the stored rollouts."""

    def __init__(
        self, catalog: Catalog, manifest: Manifest, config: OnlineConfig, change: StepChange, policy: "Policy"
    ) -> None:
        from agentrl.online.learner import Learner
        from agentrl.online.models import Models

        self.config, self.change = config, change
        self.rollouts = Rollouts(catalog, manifest, config)
        self.rewards = OtherRewards(config.rewards, change.config.rewards, change.weights, self.rollouts.buffer)
        check_needs(config.algorithm, change.config.algorithm)
        algorithm = change.config.algorithm
        compared = algorithm.model_copy(update={"kl": algorithm.kl or config.algorithm.kl})
        steps, seed = config.iterations * config.updates, manifest.ingredients.seed
        self.models = Models(policy, compared, config.optimizer, steps, seed, config.updates)
        self.learner = Learner(
            policy,
            config.algorithm,
            config.optimizer,
            iterations=config.iterations,
            samples=config.samples,
            seed=seed,
            updates=config.updates,
            models=self.models,
            fork=config.fork,
            replay=config.replay,
        )
        self.trainer = self.models.trainer
        self._as(config)

    def earlier(self, number: int, batches: StepRows, lr_scale: float) -> None:
        """Train again on what an iteration before the step recorded."""
        from agentrl.online.recorded import Recorded

        targets = self._batch(number, self.rollouts.of(number)).targets if self.models.critic else None
        self.learner.update(Recorded(number, list(enumerate(batches)), targets, lr_scale, {}, []))

    def made(self, number: int, recorded: StepRows) -> tuple["Recorded", list[Trajectory]]:
        """What the step trains on by the change, and its rollouts.

        Raises ReplayError if rows by the settings of the stage are not the ``recorded`` ones any more, or the change
        cannot be computed from the rollouts.
        """
        rows, drawn = self.rollouts.of(number), self.rollouts.drawn(number, self.learner.policy)
        if not self.config.algorithm.needs_teacher and self._has_values(self.config):
            made = self._batch(number, rows, drawn)
            check_equal(recorded, [rows_of_step for _, rows_of_step in made.parts], number)
        rewarded = self.rewards.of(rows)
        if drawn:
            drawn = replace(drawn, rows=self.rewards.of(drawn.rows))
        self._as(self.change.config)
        return self._batch(number, rewarded, drawn), [*rewarded, *(drawn.rows if drawn else ())]

    def group_of(self, row: Trajectory) -> str:
        """The group that a rollout is compared in."""
        from agentrl.online.credit import group_of

        return group_of(row, self.change.config.algorithm.credit)

    def _has_values(self, config: OnlineConfig) -> bool:
        return not config.algorithm.needs_critic or self.models.critic is not None

    def _batch(self, number: int, rows: list[Trajectory], drawn: "ReplayDraw | None" = None) -> "Recorded":
        from agentrl.online.loop import GREEDY

        sampled, greedy = ([row for row in rows if (GREEDY in row.tags) == kind] for kind in (False, True))
        try:
            return self.learner.batch(number, sampled, greedy if self.learner.algorithm.needs_greedy else [], drawn)
        except ValueError as error:
            raise ReplayError(f"step {number} cannot be made from its rollouts: {error}") from error

    def _as(self, config: OnlineConfig) -> None:
        """Make rows, and minimise, by the settings of ``config``."""
        from agentrl.online.observed import Observed

        learner, weights = self.learner, weighing(config.observe)
        learner.algorithm = self.models.algorithm = self.trainer.objective = config.algorithm
        tokenizer = learner.policy.tokenizer
        learner.observed = Observed(weights, lambda ids: str(tokenizer.decode(ids))) if weights else None
