"""What people and judges say of rows reaches training: filters, a rule, scores, and pairs of corrections."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.flows.api.store import Store
from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.handles import Model, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.feedback import (
    pairs_from_feedback,
    pairs_from_preferences,
    scores_from_feedback,
    swapped,
)
from agentrl.pipelines.stages.select import SelectConfig, select
from agentrl.pipelines.stages.train import kto
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.pair import Pair, PairKind
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

SAID = ["who is Ann?", "Ann is Bob.", "and her boss?", "Her boss is Cleo.", "No idea."]


def text_row(number: int) -> Trajectory:
    """A conversation of two turns, as text."""
    roles = [Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    messages = [Message(role=role, content=text) for role, text in zip(roles, SAID, strict=False)]
    return Trajectory(
        trajectory_id=f"row-{number}",
        episode_id=f"row-{number}",
        task_id=f"task-{number}",
        source="chat",
        env="chat",
        split="train",
        prompt=SAID[0],
        reward=None,
        success=None,
        termination=Termination.ANSWERED,
        n_steps=2,
        messages=messages,
    )


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


@pytest.fixture
def rows(harness: Harness) -> Trajectories:
    return harness.trajectories([text_row(number) for number in range(4)])


@pytest.fixture
def model(harness: Harness) -> Model:
    policy = tiny_policy([[Message(role=Role.USER, content=" ".join(SAID))]], seed=0)
    return harness.model(policy.save)


def store_of(harness: Harness) -> Store:
    return Store(harness.buffer.store)


def say(harness: Harness, row: int, name: str, author: str = "ann", **fields: object) -> int:
    return store_of(harness).annotate(trajectory_id=f"row-{row}", name=name, author=author, **fields).version


def test_a_correction_is_preferred_to_what_it_corrects(harness: Harness, rows: Trajectories, model: Model) -> None:
    say(harness, 0, "correction", turn=0, correction="No idea.")
    say(harness, 0, "correction", correction="Her boss is Bob.", author="bob")  # of the last turn
    say(harness, 1, "correction", turn=0, correction="Ann is Bob.")  # what it says already
    say(harness, 2, "correction", turn=0, correction="Ann is Cleo.")
    version = say(harness, 2, "correction", turn=0, correction="Who is Bob?")  # the newest counts
    say(harness, 3, "correction", turn=0, correction="No idea.")  # after the version that is read
    inputs: dict[str, Any] = {"trajectories": [rows], "model": model}
    made = harness.run(pairs_from_feedback, {"annotations": version}, **inputs)
    assert {name: made.metrics[name] for name in ("corrections", "pairs", "same", "authors")} == {
        "corrections": 4,
        "pairs": 3,
        "same": 1,
        "authors": 2,
    }
    corrected = {row.trajectory_id: row for row in made["trajectories"].read()}
    for pair in made["pairs"].read():
        better = corrected[pair.chosen_id]
        assert (pair.kind, better.parent_id, pair.method) == ("step", pair.rejected_id, "feedback")
        start = better.fork_at
        assert pair.chosen_ids[:start] == pair.rejected_ids[:start]
        assert pair.shared_prefix >= start
        assert np.flatnonzero(pair.chosen_mask).tolist() == list(range(start, len(pair.chosen_ids)))
        assert np.flatnonzero(pair.rejected_mask).tolist() == list(range(start, len(pair.rejected_ids)))
        assert better.messages[-1].token_start == start
    assert [row.messages[-1].content for row in corrected.values()] == ["No idea.", "Her boss is Bob.", "Who is Bob?"]
    judged = harness.run(pairs_from_feedback, {"annotations": version, "author_kind": "judge"}, **inputs)
    assert judged.metrics["pairs"] == 0


def pair(number: int) -> Pair:
    """Row 2n is preferred to row 2n + 1."""
    return Pair(
        pair_id=f"pair-{number}",
        task_id="task",
        kind=PairKind.TRAJECTORY,
        chosen_id=f"row-{2 * number}",
        rejected_id=f"row-{2 * number + 1}",
        method="reward",
        chosen_reward=1.0,
        rejected_reward=0.0,
        shared_prefix=1,
        tokenizer="t",
        chosen_ids=[1, 2],
        chosen_mask=[False, True],
        rejected_ids=[1, 3, 4],
        rejected_mask=[False, True, True],
    )


def test_pairs_are_as_those_who_compared_them_prefer(harness: Harness) -> None:
    rows = harness.trajectories([text_row(number) for number in range(10)])
    assert len(rows.ids()) == 10
    given = [pair(number) for number in range(5)]
    pairs = harness.pairs(given)
    buffer = harness.buffer

    def prefer(number: int, value: str, author: str = "ann", **fields: Any) -> int:
        preference = {"name": "preference", "pair_id": f"pair-{number}", "trajectory_id": f"row-{2 * number}"} | fields
        return buffer.annotations.append([Annotation(value=value, author=author, **preference)]).version

    prefer(0, "chosen")
    prefer(1, "rejected")
    prefer(1, "tie", "bob")
    prefer(2, "chosen")
    prefer(2, "rejected", "bob")  # undecided
    prefer(3, "chosen", trajectory_id="row-7")  # of the pair that an earlier stage had swapped
    prefer(3, "chosen", trajectory_id="row-0")  # of a pair of the same name with other rows
    version = prefer(0, "rejected", "judge", author_kind="judge")
    prefer(4, "rejected")  # after the version that is read
    made = harness.run(pairs_from_preferences, {"annotations": version, "author_kind": "person"}, pairs=[pairs])
    assert made["pairs"].read() == [given[0], swapped(given[1]), swapped(given[3])]
    names = ("pairs", "confirmed", "swapped", "undecided", "unjudged")
    assert [made.metrics[name] for name in names] == [3, 1, 2, 1, 1]
    assert made.metrics["agreement"] == 2 / 5
    assert (swapped(given[1]).chosen_id, swapped(given[1]).chosen_reward) == ("row-3", 0.0)
    assert swapped(given[1]).chosen_mask == [False, True, True]
    assert swapped(swapped(given[1])) == given[1]
    whole = harness.run(pairs_from_preferences, {"annotations": version, "unjudged": "keep"}, pairs=[pairs])
    assert whole["pairs"].read() == [swapped(given[1]), swapped(given[3]), given[4]]  # the judge makes one undecided
    with pytest.raises(ValueError, match="ann says preference left of the pair pair-0; allowed are chosen, rejected"):
        harness.run(pairs_from_preferences, {"annotations": prefer(0, "left")}, pairs=[pairs])


def test_thumbs_are_rewards_that_kto_reads(harness: Harness, rows: Trajectories, model: Model) -> None:
    say(harness, 0, "thumbs", value="up")
    say(harness, 1, "thumbs", value="down")
    say(harness, 2, "thumbs", value="up")
    say(harness, 2, "thumbs", "bob", value="down")
    version = say(harness, 0, "thumbs", "bob", value="up", turn=1)  # of a turn: not of the row
    rated = harness.run(scores_from_feedback, {"annotations": version}, trajectories=[rows])
    scores = {
        row["trajectory_id"]: (row["reward"], row["success"], row["why"]) for row in rated["scores"].table().to_pylist()
    }
    assert scores == {
        "row-0": (1.0, True, ""),
        "row-1": (0.0, False, ""),
        "row-2": (0.5, None, "the 2 authors are undecided"),
        "row-3": (None, None, "nobody says thumbs of it"),
    }
    assert rated["trajectories"].ids() == ["row-0", "row-1"]
    assert (rated.metrics["rated"], rated.metrics["undecided"], rated.metrics["annotations"]) == (3, 1, 4)
    trained = harness.run(
        kto,
        {"steps": 1, "batch": 2, "scorer": "thumbs"},
        trajectories=[rated["trajectories"]],
        scores=[rated["scores"]],
        model=model,
    )
    assert trained["model"].path.is_dir()


def test_stars_are_put_on_their_scale(harness: Harness, rows: Trajectories) -> None:
    say(harness, 0, "stars", value=5)
    version = say(harness, 1, "stars", value=2)
    config = {"annotations": version, "name": "stars", "low": 1, "high": 5}
    rated = harness.run(scores_from_feedback, config, trajectories=[rows])["scores"].table()
    assert rated["reward"].to_pylist()[:2] == [1.0, 0.25]
    with pytest.raises(ValueError, match="ann says stars 5 of row-0, beyond 0 to 1; set low and high"):
        harness.run(scores_from_feedback, {"annotations": version, "name": "stars"}, trajectories=[rows])


def test_rules_and_selections_read_a_version_of_the_annotations(harness: Harness, rows: Trajectories) -> None:
    first = say(harness, 0, "stars", value=4)
    say(harness, 0, "stars", "bob", value=1)
    version = say(harness, 1, "stars", "judge", value=5, author_kind="judge")

    def kept(**rule: object) -> list[str]:
        rules = Rules.model_validate(
            {"rules": [{"rule": "annotated", "name": "stars", "version": version} | rule]}
        ).rules
        return curate(harness.buffer, rules).ids.to_pylist()

    assert kept() == ["row-0", "row-1"]
    assert kept(version=first) == ["row-0"]
    assert kept(least=3) == ["row-1"]
    assert kept(least=3, version=first) == ["row-0"]
    assert kept(values=["1"], drop=True) == ["row-1", "row-2", "row-3"]
    assert kept(author_kind="person") == ["row-0"]
    where = "trajectory_id in (select trajectory_id from annotations where name = 'stars' and number > 4)"
    config = {"version": harness.buffer.version, "where": where}
    for number, ids in ((first, []), (version, ["row-1"])):
        assert harness.run(select, config | {"annotations": number})["trajectories"].ids() == ids
    with pytest.raises(ValueError, match="set annotations: N"):
        SelectConfig.model_validate(config)
    with pytest.raises(ValueError, match="annotations does nothing without a where"):
        SelectConfig.model_validate({"version": 1, "annotations": 1})
