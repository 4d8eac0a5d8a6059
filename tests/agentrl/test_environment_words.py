import json
from collections import Counter

import pytest
import yaml

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.lookup import LINKS, NAMES, VALUES
from agentrl.environments.words import WORDS, WordsEnvironment
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.pipelines.file.document import LIBRARY
from agentrl.rollouts.demonstrations import demonstrate, optimal_steps
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

ENV = load_environment("words")
SIZES = {"train": 400, "dev": 100, "heldout": 200, "compositional": 100}


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Task]]:
    return ENV.tasks(SIZES, seed=3)


def relations_of(task: Task) -> list[str]:
    return list(json.loads(task.metadata)["relations"])


def asked(row: Trajectory) -> list[str]:
    return [json.loads(call.arguments)["rel"] for message in row.messages for call in message.tool_calls]


def test_questions_name_relations_by_words_which_are_the_names_of_subgoals(splits: dict[str, list[Task]]) -> None:
    for task in splits["train"]:
        metadata = json.loads(task.metadata)
        words = [WORDS[relation] for relation in metadata["relations"]]
        assert task.prompt == " of the ".join(reversed(words)) + f" of {metadata['start']}?"
        assert metadata["subgoals"] == words
        assert not set(task.prompt.split()) & set(WORDS), "no relation is called by its name"
    assert set(WORDS) == {*LINKS, *VALUES}
    assert len(set(WORDS.values())) == len(WORDS)


def test_splits_share_no_question_and_chains_of_compositional_tasks_occur_nowhere_else(
    splits: dict[str, list[Task]],
) -> None:
    prompts = [task.prompt for rows in splits.values() for task in rows]
    assert len(prompts) == len(set(prompts)) == sum(SIZES.values())
    ordinary = {tuple(relations_of(task)) for name in SIZES if name != "compositional" for task in splits[name]}
    assert not ordinary & {tuple(relations_of(task)) for task in splits["compositional"]}
    assert {task.level for task in splits["compositional"]} == {2, 3}
    assert Counter(task.level for task in splits["train"]) == {1: 80, 2: 200, 3: 120}


def test_an_error_is_not_right_by_luck(splits: dict[str, list[Task]]) -> None:
    for task in splits["heldout"]:
        facts = json.loads(task.metadata)["facts"]
        for person, known in facts.items():
            assert len({known[link] for link in LINKS} - {person}) == len(LINKS)
        for value in VALUES:
            assert len({known[value] for known in facts.values()}) == len(facts)


def test_the_expert_guesses_unknown_words_within_their_kind_and_knows_the_others(
    splits: dict[str, list[Task]],
) -> None:
    taken: dict[str, Counter[str]] = {relation: Counter() for relation in WORDS}
    for number, task in enumerate(splits["train"]):
        for relation, guess in zip(
            relations_of(task), asked(demonstrate(ENV, task, 0.0, 0, f"d{number}")), strict=True
        ):
            taken[relation][guess] += 1
    for position, (relation, guesses) in enumerate(taken.items()):
        if position < 7:
            assert set(guesses) == set(LINKS if relation in LINKS else VALUES)
            assert max(guesses.values()) < 0.4 * guesses.total()
        else:
            assert set(guesses) == {relation}


def test_unknown_words_are_so_many_or_these() -> None:
    few = load_environment('words{"unknown": ["meal", "foe"]}')
    assert isinstance(few, WordsEnvironment)
    assert few.unknown == {"dish", "rival"}
    counted = load_environment('words{"unknown": 2}')
    assert isinstance(counted, WordsEnvironment)
    assert counted.unknown == {"rival", "pet"}


def test_an_expert_who_knows_all_words_solves_everything_in_the_steps_that_tasks_say(
    splits: dict[str, list[Task]],
) -> None:
    knowing = load_environment('words{"unknown": 0}')
    for task in splits["train"][:50]:
        row = demonstrate(knowing, task, 0.0, 0, "d")
        assert row.success
        assert row.n_steps == optimal_steps(ENV, task) == task.level + 1
    assert knowing.tasks(SIZES, seed=3)["dev"][0].prompt == splits["dev"][0].prompt, "tasks do not depend on the expert"


def test_subgoals_are_reached_by_the_right_relation(splits: dict[str, list[Task]]) -> None:
    task = next(task for task in splits["train"] if task.level == 2)
    start, [first, second] = json.loads(task.metadata)["start"], relations_of(task)

    async def state(*relations: str) -> object:
        episode, who = await ENV.reset(task), start
        for relation in relations:
            arguments = json.dumps({"who": who, "rel": relation})
            call = ToolCall(id="call_0", name="find", arguments=arguments)
            who = (await episode.step(Message(role=Role.ASSISTANT, tool_calls=[call]))).messages[0].content
        score = await episode.score()
        assert score is not None
        return score.state["subgoals"]

    wrong = next(link for link in LINKS if link != first)
    assert blocking(state(first, second)) == [0, 1]
    assert blocking(state(first)) == [0, None]
    assert blocking(state(wrong, second)) == [None, None]


def test_a_failed_walk_solves_another_question_in_words(splits: dict[str, list[Task]]) -> None:
    task = next(task for task in splits["train"] if task.level == 2 and relations_of(task) == ["rival", "pet"])
    metadata = json.loads(task.metadata)
    guesser = next(row for n in range(99) if asked(row := demonstrate(ENV, task, 0.0, n, "d"))[0] != "rival")
    [*_, new] = ENV.achieved(guesser, task)  # type: ignore[attr-defined]
    words = [WORDS[relation] for relation in asked(guesser)]
    assert new.prompt == f"{words[1]} of the {words[0]} of {metadata['start']}?"
    assert json.loads(new.metadata)["subgoals"] == words


def test_settings_are_checked() -> None:
    for settings, text in (
        ('{"unknown": 11}', "unknown"),
        ('{"unknown": ["foe", "rival"]}', "'rival' is no word of questions; they are foe, beast"),
        ('{"names": 5}', "names"),
        ('{"levels": [4]}', "words has no"),
    ):
        with pytest.raises(ValueError, match=text):
            load_environment(f"words{settings}")


def test_every_word_of_the_quickstart_is_one_token() -> None:
    """One that is several is copied wrongly from the first rollout on, and no reward ever says what is right."""
    stages = yaml.safe_load((LIBRARY / "quickstart.yaml").read_text())["stages"]
    size = TinySize.model_validate(stages["warm"]["with"]["model"].get("size", {}))
    drawn = ENV.tasks({"train": stages["tasks"]["with"]["train"]}, seed=11)["train"]
    shown = [demonstrate(ENV, task, 0.0, 11, task.task_id).messages for task in drawn]
    words = [*WORDS, *WORDS.values(), *NAMES, *(option for options in VALUES.values() for option in options)]
    tokenizer = tiny_policy(shown, 11, size).tokenizer
    assert {word for word in words if len(tokenizer.encode(word)) > 1} == set()
    smaller = tiny_policy(shown, 11, TinySize(vocabulary=480)).tokenizer
    assert any(len(smaller.encode(word)) > 1 for word in words), "the size is what matters"
