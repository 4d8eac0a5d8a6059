"""Did the policy get better: the newest evaluation against that of the policy before it, in a sentence."""

from typing import TYPE_CHECKING

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.pages.compare import EVALUATION, PairedDifference, difference_of
from agentrl.flows.viewer.query.artifacts import Artifacts, label
from agentrl.flows.viewer.wire import Answer, Query, RefusedError
from agentrl.pipelines.results.gains import predecessors
from agentrl.schemas.manifest import Manifest

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader

LOST = 5
"""Lost tasks that are named beside the sentence that says whether the policy got better."""


class Better(Answer):
    """The newest policy against the one before it, at temperature 1, with at most 5 of the tasks that it lost; None if
    there are no two evaluations of the same tasks."""

    difference: PairedDifference | None


def better(reader: "StoreReader", question: Query) -> Better:
    """The newest policy against the one before it."""
    two = newest_two(reader.catalog, reader.artifacts)
    try:
        difference = difference_of(reader, *two, greedy=False) if two else None
    except RefusedError:  # one was freed meanwhile, or has no attempts at temperature 1
        difference = None
    if difference is None:
        return Better(difference=None)
    few = {"gained": [], "lost": difference.lost[:LOST]}
    return Better(difference=difference.model_copy(update=few))


def newest_two(catalog: Catalog, artifacts: Artifacts) -> tuple[str, str] | None:
    """The newest policy of which a predecessor was evaluated on the same tasks: that evaluation, and its own after it.
    Of several sets of tasks, the one counts on which the control for sharpening of the predecessor was measured. If no
    policy has a predecessor, the two newest evaluations of different policies on the same tasks; None if there are
    none."""
    evaluations = [
        manifest
        for manifest in artifacts.all()
        if manifest.ingredients.uses == EVALUATION and {"results", "trajectories"} <= manifest.outputs.keys()
    ]
    oldest_first = list(reversed(evaluations))  # of equal ones the newest counts
    try:
        by_training = {evaluation.fingerprint: before for before, evaluation in predecessors(catalog, oldest_first)}
    except (OSError, StoreError):
        by_training = {}  # freed since the list was read
    trained = [evaluation for evaluation in evaluations if evaluation.fingerprint in by_training]
    of_newest = [evaluation for evaluation in trained if _digests(evaluation, "model") == _digests(trained[0], "model")]
    for evaluation in sorted(of_newest, key=lambda each: "dev" not in by_training[each.fingerprint].ingredients.inputs):
        return label(by_training[evaluation.fingerprint]), label(evaluation)
    for number, evaluation in enumerate(evaluations):
        before = next((other for other in evaluations[number + 1 :] if _policies_differ(other, evaluation)), None)
        if before is not None:
            return label(before), label(evaluation)
    return None


def _digests(evaluation: Manifest, name: str) -> set[str]:
    return {record.digest for record in evaluation.ingredients.inputs.get(name, [])}


def _policies_differ(older: Manifest, newer: Manifest) -> bool:
    """Whether two evaluations are of other models and of the same tasks."""
    tasks = _digests(newer, "tasks")
    return _digests(older, "model") != _digests(newer, "model") and _digests(older, "tasks") == tasks and bool(tasks)
