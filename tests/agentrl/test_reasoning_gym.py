"""Questions of reasoning-gym, against the package itself."""

import json
import warnings
from importlib.util import find_spec
from random import Random

import pytest

from agentrl.environments import load_environment
from agentrl.environments.adapters.reasoning_gym import Question, ReasoningGym

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra reasoning-gym")

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SIZES = {"train": 20, "dev": 10, "heldout": 10}


def sums(**more: object) -> ReasoningGym:
    return ReasoningGym("chain_sum", SUMS, **{"prompt": "{expression} =", **more})  # type: ignore[arg-type]


def test_no_question_is_asked_twice_and_what_is_left_out_is_counted() -> None:
    with pytest.warns(UserWarning, match=r"^\d+ of \d+ questions came before, and are left out$") as caught:
        splits = sums().tasks(SIZES, 0)
    prompts = [task.prompt for tasks in splits.values() for task in tasks]
    # The package may warn too, where it is imported here first.
    [message] = [text for text in map(str, (warning.message for warning in caught)) if "came before" in text]
    left_out, drawn = (int(word) for word in message.split() if word.isdigit())
    assert (len(prompts), len(set(prompts)), drawn - left_out) == (40, 40, 40)
    assert {split: len(tasks) for split, tasks in splits.items()} == SIZES


def test_seeds_draw_other_questions() -> None:
    """The package draws question n of seed s from s + n, so seeds 0 and 1 would share all but one."""
    gym = ReasoningGym("chain_sum", {"min_digits": 5, "max_digits": 5})
    first, second = ({task.prompt for task in gym.tasks(SIZES, seed)["train"]} for seed in (0, 1))
    assert not first & second


def test_only_a_whole_point_is_a_success() -> None:
    gym = ReasoningGym("chain_sum", {})
    task = gym.tasks({"train": 1}, 0)["train"][0]
    right = json.loads(task.ground_truth)
    assert Question(gym, task).score(f" {right} ").success
    assert not any(Question(gym, task).score(wrong).success for wrong in (f"It is {right}.", "", None, "x"))


@pytest.mark.parametrize(
    "family", ["family_relationships", "sudoku", "game_of_life", "shortest_path", "letter_counting"]
)
def test_the_own_verifier_takes_what_is_demonstrated(family: str) -> None:
    """Also where its metadata is no JSON, as that of family_relationships."""
    gym = ReasoningGym(family)
    for task in gym.tasks({"train": 3}, 4)["train"]:
        [shown] = gym.demonstrate(task, 0.0, Random(0))
        score = Question(gym, task).score(shown.content)
        assert score.success
        assert score.reward == 1.0


def test_a_family_without_answers_has_no_expert() -> None:
    gym = ReasoningGym("graph_color")
    task = gym.tasks({"train": 1}, 0)["train"][0]
    with pytest.raises(ValueError, match="graph_color checks answers, and knows none to show"):
        next(gym.demonstrate(task, 0.0, Random(0)))


def test_shots_are_turns_before_the_question_and_in_no_split() -> None:
    gym = sums(shots=4)
    with warnings.catch_warnings(action="ignore"):
        splits = gym.tasks(SIZES, 0)
    opening = Question(gym, splits["heldout"][0]).opening()
    assert [message.role.value for message in opening] == ["user", "assistant"] * 4 + ["user"]
    shown = {message.content for message in opening[:-1:2]}
    assert not shown & {task.prompt for tasks in splits.values() for task in tasks}
    assert all(
        eval(message.content.rstrip(" =")) == int(then.content)
        for message, then in zip(opening[:-1:2], opening[1::2], strict=True)
    )


def test_few_shot_and_none_ask_the_same_questions_unless_one_of_them_is_shown() -> None:
    plain, shot = ReasoningGym("chain_sum"), ReasoningGym("chain_sum", shots=2)
    tasks = [[(task.task_id, task.prompt) for task in gym.tasks(SIZES, 3)["heldout"]] for gym in (plain, shot)]
    assert tasks[0] == tasks[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "chain_sums"}, "refuses family 'chain_sums'.*not registered"),
        (
            {"family": "chain_sum", "config": {"terms": 2}},
            "refuses family 'chain_sum'.*unexpected keyword argument 'terms'",
        ),
        ({"family": "chain_sum", "config": {"min_terms": 4, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"family": "chain_sum", "prompt": "{sum} ="}, "prompt '{sum} =' wants 'sum'; there are .*expression"),
    ],
)
def test_what_the_package_does_not_know_is_refused_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        ReasoningGym(**settings).tasks({"train": 1}, 0)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_too_few_questions_are_said() -> None:
    with pytest.raises(ValueError, match="ask for more of level 1 than exist"):
        sums().tasks({"train": 500}, 0)


def test_a_question_that_the_package_no_longer_draws_is_not_scored() -> None:
    gym = sums()
    with warnings.catch_warnings(action="ignore"):
        task = gym.tasks(SIZES, 0)["train"][0]
    with pytest.raises(RuntimeError, match="another version of reasoning_gym"):
        Question(gym, task.model_copy(update={"prompt": "1 + 1 ="})).score("2")


def test_pipelines_name_it_with_its_settings() -> None:
    environment = load_environment('reasoning_gym{"family": "chain_sum"}')
    assert environment.name == "reasoning_gym"
