"""Variants of tasks, such as of those that failed: what they are, and which are left out."""

from pathlib import Path

import pytest

from agentrl.environments import load_environment
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.tasks import from_trajectories, generate, vary
from agentrl.pipelines.stages.trajectories import synthesize

MATH = {"env": "math", "train": 8, "dev": 1, "heldout": 4}


def test_failed_tasks_come_again_with_variants(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    splits = harness.run(generate, MATH)
    rows = harness.run(synthesize, {"noise": 0.5}, tasks=splits["train"])["trajectories"]
    right = harness.run(synthesize, {"coverage": 0.5}, tasks=splits["train"])["trajectories"]
    both = [rows, right]
    config = {"env": "math", "failed": True}
    failed = harness.run(from_trajectories, config, trajectories=both, tasks=[splits["train"]])["tasks"]
    names = [task.task_id for task in failed.read()]
    solved = {row.task_id for selection in both for row in selection.read() if row.success}
    assert 0 < len(names) < 8
    assert set(names) == {row.task_id for row in rows.read()} - solved
    made = harness.run(vary, {"k": 2}, tasks=[failed], heldout=[splits["heldout"]])
    tasks = made["tasks"].read()
    assert [task.task_id for task in tasks[: len(names)]] == names
    assert len(tasks) == len(names) + made.metrics["variants"] > len(names)
    assert len({task.prompt for task in tasks}) == len(tasks)
    assert {task.split for task in tasks} == {"train"}
    again = harness.run(vary, {"k": 2}, tasks=[failed], heldout=[splits["heldout"]])["tasks"].read()
    assert again == tasks, "variants follow from the seed"
    # variants that are held out are left out
    variants = harness.tasks([task.model_copy(update={"split": "heldout"}) for task in tasks[len(names) :]])
    less = harness.run(vary, {"k": 2}, tasks=[failed], heldout=[variants])
    assert less["tasks"].read() == failed.read()
    assert less.metrics["variants"] == 0
    assert less.metrics["heldout_prompt"] == made.metrics["variants"]


def test_what_cannot_be_varied_is_named(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    splits = harness.run(generate, MATH)
    with pytest.raises(ValueError, match="is of split 'heldout': nothing is made from what is measured on"):
        harness.run(vary, tasks=[splits["heldout"]], heldout=[])
    other = harness.run(generate, {"env": "office", "train": 2, "dev": 1, "heldout": 1})["train"]
    with pytest.raises(ValueError, match=r"env 'office', of task .* makes no variants; give it vary"):
        harness.run(vary, tasks=[other], heldout=[])


def test_no_variant_is_put_together_as_a_compositional_task(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    environment = load_environment("words")
    splits = harness.run(generate, {"env": "words", "train": 96, "dev": 1, "heldout": 8, "compositional": 48})
    reserved = {environment.composition(task) for task in splits["compositional"].read()}  # type: ignore[attr-defined]

    def chains(*held: str) -> tuple[set[str], int]:
        made = harness.run(vary, {"k": 4}, tasks=[splits["train"]], heldout=[splits[name] for name in held])
        new = {environment.composition(task) for task in made["tasks"].read()}  # type: ignore[attr-defined]
        return new & reserved, made.metrics.get("heldout_composition", 0)

    assert chains("heldout")[0], "some variants have chains that no train task has"
    shared, refused = chains("heldout", "compositional")
    assert not shared
    assert refused > 0


def test_tasks_of_some_levels(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    tasks = harness.run(generate, {**MATH, "train": 24})["train"]
    rows = harness.run(synthesize, tasks=tasks)["trajectories"]
    some = harness.run(from_trajectories, {"levels": [2]}, trajectories=[rows], tasks=[tasks])["tasks"].read()
    assert some == [task for task in tasks.read() if task.level == 2]
    with pytest.raises(ValueError, match="levels: no row is of level 9; leave it out"):
        harness.run(from_trajectories, {"levels": [2, 9]}, trajectories=[rows])
