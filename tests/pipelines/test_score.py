"""Stored rows under another reward: scored, selected, paired and trained on, without a new rollout."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from judge_server import judging
from own_classes import forget, planned, reasons, run
from test_not_trained import acted, row

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.models.tiny import tiny_policy
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.agentq.pairs import agentq
from agentrl.pipelines.parts.scores import under
from agentrl.pipelines.parts.selected import Selected
from agentrl.pipelines.results.lineage import find_artifact
from agentrl.pipelines.stages import score as score_module
from agentrl.pipelines.stages.curate import curate
from agentrl.pipelines.stages.score import score
from agentrl.pipelines.stages.select import select
from agentrl.pipelines.stages.train import kto, offline, sft
from agentrl.pipelines.stages.trajectories import reject
from agentrl.rewards.judge import JudgeError
from agentrl.schemas.score import TrajectoryScore
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, Trajectory, UnscoredError

ROOT = Path(__file__).parents[2]
TASK = Task(task_id="t", env="e", split="train", prompt="q", ground_truth='"b"')


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def rows() -> list[Trajectory]:
    """Two rollouts whose stored reward likes ``a``; the ground truth of the task is ``b``."""
    return [acted("a", 1.0, []), acted("b", 0.0, [])]


def scored(harness: Harness, given: Trajectories, **config: Any) -> Any:
    rewards = config.pop("rewards", [{"type": "exact"}])
    return harness.run(
        score, {"rewards": rewards, "scorer": "strict", **config},
        trajectories=[given], tasks=[harness.tasks([TASK])],
    )  # fmt: skip


def test_scores_are_a_table_and_the_rows_stay(harness: Harness) -> None:
    given = harness.trajectories(rows())
    before = harness.buffer.digest(given.selection()["trajectory_id"])
    rewards = [{"type": "environment", "weight": 0.25}, {"type": "exact"}, {"type": "format", "weight": 0.5}]
    done = scored(harness, given, rewards=rewards)
    result = done["scores"].table().to_pylist()
    assert [(row["trajectory_id"], row["scorer"], row["reward"], row["success"]) for row in result] == [
        ("a", "strict", 0.75, False), ("b", "strict", 1.5, True),
    ]  # fmt: skip
    assert [part["name"] for part in result[0]["components"]][:3] == ["environment", "exact", "format"]
    assert (done.metrics["reward"], done.metrics["success"], done.metrics["exact"]) == (1.125, 0.5, 0.5)
    assert harness.buffer.digest(given.selection()["trajectory_id"]) == before
    assert [row.reward for row in given.read()] == [1.0, 0.0]


def test_tasks_that_nobody_wires_come_from_beside_the_buffer(harness: Harness) -> None:
    harness.tasks([TASK]).path.unlink()  # as if the artifact had been collected
    done = harness.run(score, {"rewards": [{"type": "exact"}]}, trajectories=[harness.trajectories(rows())])
    assert [row["success"] for row in done["scores"].table().to_pylist()] == [False, True]
    harness.tasks([TASK.model_copy(update={"ground_truth": '"a"'})])
    with pytest.raises(ValueError, match=r"two different tasks t of e; wire inputs.tasks"):
        harness.run(score, {"rewards": [{"type": "exact"}]}, trajectories=[harness.trajectories([row("c", [])])])


def test_stages_read_the_scorer_that_they_name(harness: Harness) -> None:
    given = harness.trajectories(rows())
    other = scored(harness, given, scorer="other", rewards=[{"type": "environment"}])
    scores = [scored(harness, given)["scores"], other["scores"]]
    for scorer, best, worst in (("strict", "b", "a"), ("other", "a", "b")):
        by = {"scorer": scorer}
        wired: dict[str, Any] = {"trajectories": [given], "scores": scores}
        assert harness.run(reject, by, **wired)["trajectories"].ids() == [best]
        [pair] = harness.run(agentq, {**by, "kind": "trajectory"}, **wired)["pairs"].read()
        assert (pair.chosen_id, pair.rejected_id) == (best, worst)
        rule = {"rule": "keep", "what": "correct"}
        assert harness.run(curate, {**by, "rules": [rule]}, **wired)["trajectories"].ids() == [best]
        version = {"version": harness.buffer.table().version(), **by}
        where = {**version, "where": "success and reward > 0.5"}
        assert harness.run(select, where, scores=scores)["trajectories"].ids() == [best]
        assert harness.run(select, {**version, "rules": [rule]}, scores=scores)["trajectories"].ids() == [best]
        draw = {**version, "draw": {"strategy": "success_first", "n": 1}}
        assert harness.run(select, draw, **wired)["trajectories"].ids() == [best]
        chosen = Selected(under([given], scores, scorer))
        assert [row.success for row in chosen.trajectories()] == [row == best for row in ("a", "b")]
        assert [row.reward_components[0].value for row in chosen.trajectories()] == [
            float(item == best) for item in "ab"
        ]


def test_training_follows_the_scorer(harness: Harness) -> None:
    """What a rollout counts in the training rows of each stage is what its scorer gave."""
    policy = tiny_policy([entry.messages for entry in rows()], seed=0)
    fitted = [row.model_copy(update={"tokenizer": policy.tokenizer_fingerprint, "group_id": "g"}) for row in rows()]
    given = harness.trajectories(fitted)
    model = harness.model(policy.save)
    scores = [scored(harness, given)["scores"]]
    config = {"steps": 1, "batch": 2}

    def weights(stage: Any, **more: Any) -> dict[str, float]:
        wired = {"scores": scores} if "scorer" in more else {}
        done = harness.run(stage, {**config, **more}, trajectories=[given], model=model, **wired)
        return {row["row_id"]: row["weights"][-1] or row["label"] for row in done["rows"].table().to_pylist()}

    stored, ours = weights(offline), weights(offline, scorer="strict")
    assert stored["a"] > 0 > stored["b"]
    assert (ours["a"], ours["b"]) == (stored["b"], stored["a"])
    by_token = {"algorithm": {"type": "grpo", "credit": "first_divergence"}}
    if offline.config.model_validate(by_token).algorithm.credits_whole_rows:  # type: ignore[attr-defined]
        pytest.fail("this test needs a credit by token, which reads whole rollouts")
    assert weights(offline, **by_token, scorer="strict")["b"] > 0 > weights(offline, **by_token, scorer="strict")["a"]
    assert weights(sft, weighting="reward").keys() == {"a"}
    assert weights(sft, weighting="reward", scorer="strict").keys() == {"b"}
    labels = harness.run(kto, {**config, "scorer": "strict"}, trajectories=[given], model=model, scores=scores)
    assert dict(zip(*labels["rows"].table().select(["row_id", "label"]).to_pydict().values(), strict=True)) == {
        "a": -1, "b": 1,
    }  # fmt: skip


def test_a_scorer_that_is_not_there_is_refused_by_name(harness: Harness) -> None:
    given = harness.trajectories(rows())
    scores = [scored(harness, given)["scores"]]
    with pytest.raises(LookupError, match=r"no scores of a scorer 'strct'; did you mean 'strict'\?"):
        harness.run(reject, {"scorer": "strct"}, trajectories=[given], scores=scores)
    with pytest.raises(LookupError, match=r"no scores of a scorer 'strict'; there are none: wire inputs\.scores"):
        harness.run(reject, {"scorer": "strict"}, trajectories=[given])
    with pytest.raises(ValueError, match="names none of its scorers"):
        harness.run(reject, trajectories=[given], scores=scores)
    with pytest.raises(ValueError, match="two tables have scores of 'strict'"):
        harness.run(reject, {"scorer": "strict"}, trajectories=[given], scores=scores * 2)
    more = harness.trajectories([acted("c", 1.0, [])])
    with pytest.raises(UnscoredError, match="c has no score of 'strict'"):
        harness.run(reject, {"scorer": "strict"}, trajectories=[given, more], scores=scores)


def test_rows_that_cannot_be_scored_are_unscored_and_counted(harness: Harness) -> None:
    given = harness.trajectories([acted("a", 1.0, []).model_copy(update={"reward": None, "success": None}), rows()[1]])
    done = scored(harness, given, rewards=[{"type": "environment"}])
    assert done["scores"].table()["reward"].to_pylist() == [None, 0.0]
    assert done["scores"].table()["why"].to_pylist() == ["environment: the environment gave no reward", ""]
    assert done.metrics["unscored"] == 1
    rejected = harness.run(reject, {"scorer": "strict"}, trajectories=[given], scores=[done["scores"]])
    assert rejected.metrics["unscored"] == 1
    other = harness.tasks([TASK.model_copy(update={"prompt": "another"})])
    with pytest.raises(ValueError, match=r"a is of task t, which inputs\.tasks lack"):
        harness.run(score, {"rewards": [{"type": "exact"}]}, trajectories=[given], tasks=[other])
    nowhere = harness.trajectories([acted("c", 1.0, []).model_copy(update={"task_id": "lost"})])
    with pytest.raises(ValueError, match="task lost has the ground truth null"):
        harness.run(score, {"rewards": [{"type": "exact"}]}, trajectories=[nowhere])


def test_rollouts_of_one_ticket_are_compared_and_others_are_not(harness: Harness) -> None:
    words = {"a": "one two", "b": "one two three", "c": "four " * 50}
    given = harness.trajectories(
        row(name, []).model_copy(
            update={
                "reward": 1.0,
                "success": True,
                "group_id": "far" if name == "c" else "near",
                "messages": [Message(role=Role.ASSISTANT, content=text)],
            }
        )
        for name, text in words.items()
    )
    rewards = [{"type": "environment"}, {"type": "length_linear"}]
    result = scored(harness, given, rewards=rewards)["scores"].table().to_pylist()
    assert {entry["trajectory_id"]: entry["components"][1]["value"] for entry in result} == {
        "a": 0.5,
        "b": -0.5,
        "c": 0.0,
    }


def test_a_judge_scores_stored_rows_and_answers_for_itself(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    given = harness.trajectories(rows())

    def likes_a(request: dict[str, Any]) -> str:
        return json.dumps({"score": 4 if '"content": "a"' in request["messages"][0]["content"] else 0})

    with judging(likes_a) as server:
        judge = {"type": "judge", "engines": [server.engine]}
        done = scored(harness, given, rewards=[{"type": "environment"}, {**judge, "weight": 0.5}])
        assert done["scores"].table()["reward"].to_pylist() == [1.5, 0.0]
        assert (done.metrics["judge.kappa"], done.metrics["judge.agreement"]) == (1.0, 1.0)
        assert len(server.requests) == 2
        wrong = harness.trajectories(
            row.model_copy(update={"trajectory_id": f"{row.trajectory_id}2", "success": not row.success})
            for row in rows()
        )
        with pytest.raises(JudgeError, match=r"kappa -1\.00 with the verifier over 2 rollouts is below min_kappa 0\.2"):
            scored(harness, wrong, rewards=[{**judge, "outcome": True, "min_kappa": 0.2}])


def test_a_killed_scoring_goes_on_where_it_was(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k")
    monkeypatch.setattr(score_module, "AT_ONCE", 1)
    given = harness.trajectories(entry.model_copy(update={"group_id": entry.trajectory_id}) for entry in rows())
    context = harness._context("score")
    with judging(lambda request: json.dumps({"score": 4})) as server:
        config = score.config.model_validate(
            {"rewards": [{"type": "judge", "outcome": True, "engines": [server.engine]}]}
        )
        broken = harness._context("score")
        broken.scratch = context.scratch
        inputs = {"trajectories": [given]}

        def stop(done: int, total: int | None = None, **_: Any) -> None:
            if done == 1:
                raise KeyboardInterrupt

        context.progress = stop
        with pytest.raises(KeyboardInterrupt):
            score(context, config, **inputs)
        assert len(server.requests) == 1
        result = score(broken, config, **inputs)["scores"].table()
        assert len(server.requests) == 2
    assert result["reward"].to_pylist() == [1.0, 1.0]


def test_a_score_that_is_no_outcome_is_refused_when_the_file_is_read(harness: Harness) -> None:
    given = harness.trajectories(rows())
    with pytest.raises(ValueError, match="name a verifier, or the environment's"):
        scored(harness, given, rewards=[{"type": "format"}])
    weights = [{"type": "environment", "weight": 0.5}, {"type": "format", "weight": 0.75}]
    with pytest.raises(ValueError, match=r"the outcome has weight 0\.5 and the rest 0\.75 \(format 0\.75\)"):
        scored(harness, given, rewards=weights)


def test_scores_of_ones_own_stage_can_be_read(harness: Harness) -> None:
    given = harness.trajectories(rows())
    mine = [
        TrajectoryScore(trajectory_id=name, scorer="mine", reward=value, success=value > 0, components=[
            RewardComponent(name="whim", value=value),
        ])
        for name, value in (("a", -1.0), ("b", 2.0))
    ]  # fmt: skip
    chosen = harness.run(reject, {"scorer": "mine"}, trajectories=[given], scores=[harness.scores(mine)])
    assert chosen["trajectories"].ids() == ["b"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget()


def documented(folder: Path, name: str, page: str = "how-to/rewards") -> Path:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    [block] = [part.partition("```")[0] for part in text.split("```yaml\n") if part.startswith(f"name: {name}\n")]
    path = folder / f"{name}.yaml"
    path.write_text(block)
    return path


@pytest.mark.slow
def test_components_by_name_are_added_in_online_training(folder: Path) -> None:
    path = documented(folder, "shaped")
    small = ("stages.warm.with.steps=6", "stages.rl.with.iterations=1", "stages.tasks.with.train=4")
    table = run(path, *small).sql("select reward, reward_components from trajectories where stage = 'rl'")
    for entry in table.to_dicts():
        parts = {part["name"]: part["value"] * part["weight"] for part in entry["reward_components"]}
        assert {"exact_match", "format", "format.calls", "tool_use", "tool_use.needed", "length_linear"} <= parts.keys()
        assert entry["reward"] == pytest.approx(sum(parts.values()))


def test_where_a_judge_is_served_changes_nothing(folder: Path) -> None:
    path = documented(folder, "rescored")
    judge = (
        "stages.brief.with.rewards=[{type: environment}, {type: judge, weight: 0.5, engines: [{type: openai, MORE}]}]"
    )
    plans = [
        planned(path, judge.replace("MORE", more)).steps["brief"].ingredients.config
        for more in ("model: a", "model: a, base_url: 'http://x/v1', cache: kept.sqlite", "model: b")
    ]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.slow
def test_from_the_page_to_a_policy_trained_under_the_new_scorer(folder: Path) -> None:
    path = documented(folder, "rescored")
    small = ("stages.warm.with.steps=6", "stages.rl.with.steps=2", "stages.tasks.with.train=4")
    buffer = run(path, *small)
    assert reasons(planned(path, *small)) == {}
    catalog = Catalog(buffer.store)
    rl, brief = find_artifact(catalog, "rl"), find_artifact(catalog, "brief")
    assert brief.metrics["rows"] == 16
    assert rl.ingredients.inputs["scores"][0].stage == "brief"
    assert buffer.sql("select count(*) as n from trajectories where stage = 'brief'")["n"][0] == 0
    other = (*small, "stages.brief.with.rewards=[{type: environment}]")
    assert reasons(planned(path, *other)).keys() == {"brief", "rl"}, "no rollout is made again"


def test_the_pages_pipelines_are_read_and_an_unknown_scorer_is_refused_there(folder: Path) -> None:
    load(str(documented(folder, "shaped")))
    load(str(documented(folder, "measured", "how-to/evaluation")))
    load(str(documented(folder, "lake", "how-to/adapters")))
    path = documented(folder, "rescored")
    load(str(path))
    scorer, reads = "stages.rl.with.scorer", "train.offline reads scores by name: "
    for changed, message in {
        f"{scorer}=bref": f"{scorer}: no stage of inputs.scores is the scorer 'bref'; did you mean 'brief'?",
        f"{scorer}=null": f"{reads}set with.scorer to one of them",
        "stages.rl.inputs.scores=[]": f"{reads}wire inputs.scores to a stage that is 'brief'",
        "stages.rl.inputs.scores=sample": "'sample' has no output of kind scores",
    }.items():
        with pytest.raises(SpecError) as error:
            load(str(path), settings=[changed])
        assert message in str(error.value)
    load(str(path), settings=["stages.brief.with.scorer=short", "stages.rl.with.scorer=short"])


def test_a_selection_of_a_whole_buffer_leaves_unscored_what_was_not_scored(harness: Harness) -> None:
    given = harness.trajectories(rows())
    scores = [scored(harness, given)["scores"]]
    harness.trajectories([acted("c", 1.0, [])])
    config = {"version": harness.buffer.table().version(), "scorer": "strict"}
    outputs = harness.run(select, {**config, "where": "reward is null"}, scores=scores)
    assert outputs["trajectories"].ids() == ["c"]
    table = harness.run(select, config, scores=scores)["trajectories"].table(["trajectory_id"])
    assert pc.equal(pa.chunked_array([sorted("abc")]), table["trajectory_id"]).to_pylist() == [True] * 3
