"""``research``: numbers of a report are in the log, citations were read, and the guards hold."""

import asyncio
import json
import re
from typing import Any

import pytest

from agentrl.environments.research import report
from agentrl.environments.research.environment import MOST, RETRIES, Research, ResearchConfig, ResearchEpisode
from agentrl.environments.research.laboratory import FACTORS, NOISE, TERMS
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task

ENV = Research()
TASKS = ENV.tasks({"train": 200}, 0)["train"]


def meta(task: Task) -> dict[str, Any]:
    return json.loads(task.metadata)


def of_level(level: int, agrees: bool | None = None) -> Task:
    """A task whose paper names the right value, or not."""
    return next(
        task
        for task in TASKS
        if task.level == level
        and (agrees is None or (paper_of(task).best == json.loads(task.ground_truth)) == agrees)
        and meta(task)["factor"] != "batch"
    )


def paper_of(task: Task) -> Any:
    return ENV.lab.about[meta(task)["dataset"], meta(task)["factor"]]


def study(task: Task, *calls: Any, then: bool = False) -> tuple[list[Any], Any]:
    """The answers to calls as (tool, arguments), and the score; ``then`` the expert goes on to the end."""

    async def go() -> tuple[list[Any], Any]:
        episode = await ENV.reset(task)
        steps = [await episode.step(episode.calling(name, **arguments)) for name, arguments in calls]
        while then and not episode.done:
            steps.append(await episode.step(episode.advise()))
        return steps, await episode.score()

    return asyncio.run(go())


def experiment(task: Task, value: int, seed: int = 0, **more: int) -> Any:
    settings = {meta(task)["factor"]: value, "batch": 8, **more}
    return ("run_experiment", {"dataset": meta(task)["dataset"], "settings": settings, "seed": seed})


def text(step: Any) -> str:
    return step.messages[0].content


def test_the_truth_of_a_task_is_what_experiments_show() -> None:
    for task in TASKS:
        values = meta(task)["values"]
        if values:
            factor = ENV.lab.means[meta(task)["dataset"]][meta(task)["factor"]]
            effects = sorted((factor[value] for value in values), reverse=True)
            assert effects[0] - effects[1] > 4 * NOISE, "noise does not hide what is best"
            assert factor[json.loads(task.ground_truth)] == effects[0]
        else:
            assert json.loads(task.ground_truth) == paper_of(task).best


def test_the_reward_of_a_whole_study() -> None:
    _, score = study(of_level(4), then=True)
    values = {component.name: component.value for component in score.components}
    assert values["quality"] == values["correctness"] == values["novelty"] == values["format"] == 1
    assert score.success
    assert score.reward == pytest.approx(0.85 + 0.15 * values["efficiency"])
    assert study(of_level(4))[1].reward == 0, "nothing was handed in"


def test_invented_numbers_and_citations_are_no_success() -> None:
    task = of_level(3, agrees=True)
    expert = study(task, then=True)[1].state["report"]
    steps, _ = study(task, then=True)
    for section, invented in [("results", "and 99.9"), ("introduction", "see [P9999]")]:
        calls = [("search", {"query": paper_of(task).title}), ("read", {"paper": paper_of(task).number})]
        calls += [("plan", {"hypothesis": json.loads(task.ground_truth)})]
        calls += [experiment(task, value) for value in meta(task)["values"]]
        calls += [("analyse", {"factor": meta(task)["factor"]})]
        for name, words in expert.items():
            calls.append(("write", {"section": name, "text": words + (f" {invented}" if name == section else "")}))
        _, score = study(task, *calls, ("submit", {}))
        assert not score.success
        assert score.state["violations"] == [invented.split()[-1].strip("[]")]
    assert text(steps[-1]) == "submitted"


def test_a_guess_without_experiments_is_not_correct() -> None:
    task = of_level(2)
    conclusion = ("write", {"section": "conclusion", "text": f"The best is {json.loads(task.ground_truth)}."})
    _, score = study(task, conclusion, ("submit", {}))
    values = {component.name: component.value for component in score.components}
    assert (score.success, values["correctness"], values["quality"]) == (False, 0.0, 0.25)


def test_a_guess_at_what_the_literature_says_is_not_correct() -> None:
    task = of_level(1)
    conclusion = ("write", {"section": "conclusion", "text": f"The best is {json.loads(task.ground_truth)}."})
    _, score = study(task, conclusion, ("submit", {}))
    assert (score.success, values_of(score)["correctness"]) == (False, 0.0)
    _, score = study(task, ("read", {"paper": paper_of(task).number}), conclusion, ("submit", {}))
    assert (score.success, values_of(score)["correctness"]) == (True, 1.0)


def test_a_report_that_failed_has_answered_smaller_questions() -> None:
    """A study of two of four values answers the question about these two, and what the literature says if it agrees."""
    task = of_level(4, agrees=True)
    factor, right = meta(task)["factor"], json.loads(task.ground_truth)
    other = next(value for value in meta(task)["values"] if value != right)
    conclusion = ("write", {"section": "conclusion", "text": f"The best {factor} is {right}."})
    calls = [
        ("read", {"paper": paper_of(task).number}),
        ("plan", {"hypothesis": right}),
        *[experiment(task, value) for value in (other, right)],
        ("analyse", {"factor": factor}),
        conclusion,
        ("submit", {}),
    ]
    _, score = study(task, *calls)
    assert not score.success
    made = achieved(score, task)
    assert [(new.level, json.loads(new.ground_truth)) for new in made] == [(1, right), (2, right)]
    assert meta(made[1])["values"] == sorted([other, right])
    for new in made:
        assert study(new, *calls)[1].success
    _, invented = study(
        task, *calls[:-2], ("write", {"section": "conclusion", "text": f"{right}: 12.3"}), ("submit", {})
    )
    assert achieved(invented, task) == achieved(study(task, *calls[:-1])[1], task) == []
    assert task not in achieved(study(task, then=True)[1], task)


def achieved(score: Any, task: Task) -> list[Task]:
    """What a study with that score has achieved."""
    row = demonstrate(ENV, task, 0.0, 0, "t").model_copy(update={"final_state": json.dumps(score.state)})
    return ENV.achieved(row, task)


def values_of(score: Any) -> dict[str, float]:
    return {component.name: component.value for component in score.components}


def test_experiments_that_differ_in_more_than_the_factor_do_not_count() -> None:
    task = of_level(2)
    first, second = meta(task)["values"]
    other = next(name for name in FACTORS if name not in ("batch", meta(task)["factor"]))
    calls = [
        ("plan", {"hypothesis": first}),
        experiment(task, first),
        experiment(task, second, **{other: FACTORS[other][0]}),
        ("analyse", {"factor": meta(task)["factor"]}),
    ]
    steps, _ = study(task, *calls)
    compared = text(steps[-1]).partition(";")[0]
    assert not (f"{first}: " in compared and f"{second}: " in compared)


def test_an_experiment_that_fails_is_tried_again_three_times_at_most() -> None:
    dataset, (factor, value) = next(iter(ENV.lab.heavy.items()))
    heavy = ("run_experiment", {"dataset": dataset, "settings": {factor: value, "batch": 64}})
    steps, _ = study(TASKS[0], ("plan", {"hypothesis": 1}), *[heavy] * (RETRIES + 2))
    texts = [text(step) for step in steps[1:]]
    assert texts[: RETRIES + 1] == ["out of memory; batch 8 needs less"] * (RETRIES + 1)
    assert texts[-1] == f"this has failed {RETRIES + 1} times; change the settings"


def test_a_contradicted_hypothesis_is_revised_and_a_contradicted_paper_cited() -> None:
    task = of_level(3, agrees=False)
    right = json.loads(task.ground_truth)
    wrong = next(value for value in meta(task)["values"] if value != right)
    paper = paper_of(task)
    steps, _ = study(
        task,
        ("read", {"paper": paper.number}),
        ("plan", {"hypothesis": wrong}),
        *[experiment(task, value) for value in meta(task)["values"]],
        ("analyse", {"factor": meta(task)["factor"]}),
        ("submit", {}),
        ("plan", {"hypothesis": right}),
        ("write", {"section": "conclusion", "text": f"It is {right}."}),
        ("submit", {}),
        ("write", {"section": "conclusion", "text": f"It is {right}, against [{paper.number}]."}),
        ("submit", {}),
    )
    assert f"this contradicts the hypothesis {wrong}" in text(steps[-7])
    assert text(steps[-6]) == "the analysis contradicts the hypothesis; revise the plan first"
    assert text(steps[-3]) == f"the conclusion contradicts {paper.number}, which was read; cite it there"
    assert (text(steps[-1]), steps[-1].done) == ("submitted", True)


def test_steps_are_rewarded_up_to_a_cap() -> None:
    task = of_level(4)
    calls = [("plan", {"hypothesis": 1})] + [experiment(task, meta(task)["values"][0], seed) for seed in range(6)]
    steps, _ = study(task, *calls, calls[-1])
    assert [step.reward for step in steps] == pytest.approx([None, 0.1, 0.1, 0.1, 0, 0, 0, None])
    errors, _ = study(task, *[("read", {"paper": "P0"})] * 9)
    assert sum(step.reward for step in errors) == pytest.approx(-MOST)
    refused, _ = study(task, experiment(task, 1))
    assert text(refused[0]) == "there is no plan; state a hypothesis first"


@pytest.mark.parametrize(
    ("conclusion", "named"),
    [
        ("The best is 4, as [P12].", {4}),
        ("4 or 6.", {4, 6}),
        ("On alma-4 it is 12.", {12}),
        ("An accuracy of 4.5.", set()),
        ("", set()),
    ],
)
def test_what_a_conclusion_names(conclusion: str, named: set[int]) -> None:
    assert report.concluded({"conclusion": conclusion}, (2, 4, 6, 12)) == named


def test_numbers_of_a_report() -> None:
    assert report.numbers("4: 63.2, 6: 61.0; see [P3] and 2.5x") == {"63.2", "61.0"}
    assert report.invented_numbers({"results": "63.2 and 61.1."}, {"63.2"}) == {"61.1"}


def test_a_search_shows_as_many_papers_as_the_settings_say() -> None:
    few = Research(ResearchConfig(shown=1))
    assert few.tasks({"train": 200}, 0)["train"] == TASKS
    query = {"query": paper_of(TASKS[0]).title}
    for family, shown in ((ENV, 5), (few, 1)):
        episode = asyncio.run(family.reset(TASKS[0]))
        [seen] = asyncio.run(episode.step(episode.calling("search", **query))).messages
        count, *titles = seen.content.splitlines()
        assert len(titles) == shown
        assert count.startswith(f"{shown} of ")
        assert titles[0].startswith(paper_of(TASKS[0]).number)


def test_a_term_that_the_expert_lacks_is_taken_for_any_factor_unless_values_tell() -> None:
    names = list(TERMS)
    environment = Research(ResearchConfig(unknown=2))
    tasks = environment.tasks({"train": 300}, 0)["train"]
    taken: dict[str, set[str]] = {}
    for task in tasks:
        factor, named = meta(task)["factor"], set(re.findall(r"\w+", task.prompt))
        assert named & {*TERMS, *TERMS.values()} == {TERMS[factor] if factor in names[:2] else factor}
        if task.level == 1:
            episode = ResearchEpisode(environment, task)
            assert episode.advise() == ResearchEpisode(environment, task).advise(), "of one task always the same"
            query, dataset = json.loads(episode.advise().tool_calls[0].arguments)["query"].split()
            assert dataset == meta(task)["dataset"]
            taken.setdefault(factor, set()).add(query)
    assert taken.pop("depth") == taken.pop("batch") == {"depth", "batch"}
    assert taken == {factor: {factor} for factor in names[2:]}, "those are known"
    rows = [demonstrate(environment, task, 0.0, 0, "t") for task in tasks[:100]]
    assert all(row.success for row in rows if row.level > 1), "a comparison names values, which are those of one factor"
    assert not any(row.n_tool_errors for row in rows)


def test_a_report_on_another_factor_is_no_success_though_it_is_whole() -> None:
    environment = Research(ResearchConfig(levels=[1], unknown=len(TERMS)))
    tasks = environment.tasks({"train": 120}, 0)["train"]
    rows = [demonstrate(environment, task, 0.0, 0, "t") for task in tasks]
    right = [bool(row.success) for row in rows]
    assert 8 <= sum(right) <= 32, "one of six, by chance"
    assert {row.n_steps for row in rows} == {7}
    for row, task in zip(rows, tasks, strict=True):
        query = json.loads(row.messages[1].tool_calls[0].arguments)["query"]
        assert row.success == (query == f"{meta(task)['factor']} {meta(task)['dataset']}")
        by_luck = f" is {task.ground_truth}," in json.loads(row.final_state)["report"]["conclusion"]
        quality = 1 if row.success else 0.5 if by_luck else 0.25
        paid = 0.30 * quality + 0.15 * 0.93 + 0.10 + 0.45 * row.success
        assert row.reward == pytest.approx(paid), "4 is a depth and a number of groups; still it was not read"
        assert not json.loads(row.final_state)["violations"]


def test_tasks_without_terms_are_as_they_were() -> None:
    drawn = Research(ResearchConfig(levels=[1], size=90, shown=1)).tasks({"train": 3}, 0)["train"]
    assert [task.prompt.removesuffix(" Hand in a report.") for task in drawn] == [
        "According to the literature, which warmup gives the highest accuracy on delta-2?",
        "According to the literature, which batch gives the highest accuracy on brill-16?",
        "According to the literature, which dropout gives the highest accuracy on delta-5?",
    ]
    assert drawn[0].task_id == "research-3b1e43ba-train-00000", "the id has a digest of the settings"
