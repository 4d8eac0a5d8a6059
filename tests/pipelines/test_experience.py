"""Rollouts that are shown how others solved tasks like theirs."""

from typing import Any

import pytest
from toy_project import Project, project

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.search.experience import render
from agentrl.environments import load_environment
from agentrl.pipelines.handles import Model
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.plan.plan import Selection
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.rollouts.demonstrations import demonstrate

__all__ = ["project"]

ENV = load_environment("lookup")
SIZES = {"train": 30, "dev": 4, "heldout": 10}
LIMITS = {"max_turn_tokens": 4, "max_tokens": 1024}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("experience"))


@pytest.fixture(scope="module")
def splits(harness: Harness) -> Any:
    return harness.run(generate, {"env": "lookup", **SIZES})


@pytest.fixture(scope="module")
def expert(harness: Harness, splits: Any) -> Any:
    return harness.run(synthesize, {"noise": 0.4}, tasks=splits["train"])["trajectories"]


@pytest.fixture(scope="module")
def model(harness: Harness, expert: Any) -> Model:
    size = {"init": "tiny", "size": {"context": 1024, "layers": 1, "width": 32}}
    return harness.run(sft, {"model": size, "steps": 1, "batch": 2}, trajectories=[expert])["model"]


def sampled(harness: Harness, model: Model, tasks: Any, experience: list[Any], k: int = 2, **more: Any) -> Any:
    config = {"samples": 1, "sampling": LIMITS, "context": [{"experience": {"k": k, **more}}]}
    return harness.run(sample, config, model=model, tasks=tasks, experience=experience)


def test_runs_of_other_tasks_stand_before_the_prompt_and_tags_name_them(
    harness: Harness, splits: Any, expert: Any, model: Model
) -> None:
    """Rows of held-out tasks are among the experience: none is shown, to no task, and they are counted."""
    held = [demonstrate(ENV, task, 0.0, 0, f"held-{n}") for n, task in enumerate(splits["heldout"].read())]
    given = [expert, harness.trajectories(held)]
    made = sampled(harness, model, splits["train"], given)
    by_id = {row.trajectory_id: row for entry in given for row in entry.read()}
    used = set()
    for row in made["trajectories"].read():
        named = [by_id[tag.removeprefix("experience:")] for tag in row.tags if tag.startswith("experience:")]
        assert 1 <= len(named) <= 2
        for name in named:
            assert (name.success, name.split) == (True, "train")
            assert name.task_id != row.task_id
            assert name.prompt != row.prompt
            assert render(name) in row.messages[0].content
        assert row.messages[0].content.startswith(f"{row.prompt} Solved before:\n\n")
        assert row.input_ids[: row.messages[1].token_start]
        used |= {name.trajectory_id for name in named}
    assert len(used) > 3
    metrics = made.metrics
    assert (metrics["experience_rows"], metrics["experience_other_splits"]) == (40, 10)
    tags = [tag for row in made["trajectories"].read() for tag in row.tags]
    assert metrics["experience_shown"] == sum(tag.startswith("experience:") for tag in tags)


def test_what_is_retrieved_depends_on_the_wired_rows_alone(
    harness: Harness, splits: Any, expert: Any, model: Model
) -> None:
    """Other rows of the store, a search index over them too, change nothing."""

    def tags(made: Any) -> list[list[str]]:
        return [[tag for tag in row.tags if tag.startswith("experience:")] for row in made["trajectories"].read()]

    before = tags(sampled(harness, model, splits["heldout"], [expert]))
    assert all(before)
    others = [
        row.model_copy(update={"trajectory_id": f"other-{n}", "task_id": f"other-{n}", "prompt": f"{row.prompt} now"})
        for n, row in enumerate(expert.read())
    ]
    harness.trajectories(others)
    harness.buffer.search("boss of Ann?")
    assert tags(sampled(harness, model, splits["heldout"], [expert])) == before


def test_a_budget_of_tokens_is_kept(harness: Harness, splits: Any, expert: Any, model: Model) -> None:
    [least, most] = (sampled(harness, model, splits["dev"], [expert], 9, max_tokens=n) for n in (90, 400))

    def shown(made: Any) -> list[int]:
        return [sum(tag.startswith("experience:") for tag in row.tags) for row in made["trajectories"].read()]

    assert max(shown(least)) < max(shown(most))
    assert sampled(harness, model, splits["dev"], [expert], max_tokens=1).metrics["experience_none"] == 4


def test_context_and_its_input_come_together(harness: Harness, splits: Any, expert: Any, model: Model) -> None:
    with pytest.raises(ValueError, match=r"context shows experience, and none is wired; wire inputs\.experience"):
        sampled(harness, model, splits["dev"], [])
    with pytest.raises(ValueError, match=r"inputs\.experience is wired, and context shows none"):
        harness.run(sample, {"sampling": LIMITS}, model=model, tasks=splits["dev"], experience=[expert])


def test_the_room_that_context_takes_is_looked_at_before_anything_is_sampled(
    harness: Harness, splits: Any, expert: Any, model: Model
) -> None:
    config = {"samples": 1, "sampling": {"max_turn_tokens": 4, "max_tokens": 80}}
    harness.run(sample, config, model=model, tasks=splits["dev"])
    config["context"] = [{"experience": {"k": 2}}]  # type: ignore[assignment]
    with pytest.raises(ValueError, match="max_tokens 80 leaves no room for a turn: the shortest prompt"):
        harness.run(sample, config, model=model, tasks=splits["dev"], experience=[expert])


OF_THE_STORE = """
    name: p
    stages:
      tasks: {{uses: tasks.generate, with: {{env: lookup, train: {train}, dev: 0, heldout: 0}}}}
      expert: {{uses: trajectories.synthesize, inputs: {{tasks: tasks.train}}}}
      store: {{uses: trajectories.select, with: {{version: {version}}}}}
      shown:
        uses: trajectories.synthesize
        inputs: {{tasks: tasks.train, experience: store}}
        with: {{context: [{{experience: {{k: 1}}}}]}}
"""


@pytest.mark.slow
def test_the_version_of_the_store_that_is_searched_is_in_the_fingerprint(project: Project) -> None:
    """Rows that come later change nothing, and another version is another plan."""

    def version() -> int:
        return TrajectoryBuffer(project.store).version

    first = Selection(only=("tasks", "expert"))
    project.run(OF_THE_STORE.format(train=6, version=1), first)
    pinned = OF_THE_STORE.format(train=6, version=version())
    assert {"store", "shown"} <= set(project.run(pinned))
    project.run(OF_THE_STORE.format(train=9, version=1), first)
    assert project.plan(pinned).to_run == []
    plan = project.plan(OF_THE_STORE.format(train=6, version=version()))
    assert [step.name for step in plan.to_run] == ["store", "shown"]
    assert "input store is made again" in plan.steps["shown"].reasons
