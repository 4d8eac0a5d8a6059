import json

import pytest

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.lookup import NAMES
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

ENV = load_environment("lookup")


def path_of(task: Task) -> tuple[str, ...]:
    metadata = json.loads(task.metadata)
    path = [metadata["start"]]
    for relation in metadata["relations"]:
        path.append(metadata["facts"][path[-1]][relation])
    return tuple(path)


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Task]]:
    return ENV.tasks({"train": 768, "dev": 256, "heldout": 512}, seed=3)


def test_splits_share_no_question_and_no_path_of_entities(splits: dict[str, list[Task]]) -> None:
    for what in (lambda task: task.prompt, path_of):
        sets = [{what(task) for task in rows} for rows in splits.values()]
        assert sum(map(len, sets)) == len(set.union(*sets))
    assert [len(rows) for rows in splits.values()] == [768, 256, 512]


def test_ground_truth_is_the_end_of_the_path_and_level_its_length(splits: dict[str, list[Task]]) -> None:
    for task in splits["heldout"]:
        path = path_of(task)
        assert json.loads(task.ground_truth) == path[-1]
        assert task.level == len(path) - 1
        assert len(set(path)) == len(path), "an entity met twice would make a shortcut"


def test_tasks_are_the_same_for_the_same_seed_only(splits: dict[str, list[Task]]) -> None:
    sizes = {"train": 768, "dev": 256, "heldout": 512}
    assert ENV.tasks(sizes, seed=3) == splits
    assert ENV.tasks(sizes, seed=4) != splits


def test_two_draws_share_no_id(splits: dict[str, list[Task]]) -> None:
    sizes = {"train": 768, "dev": 256, "heldout": 512}
    more = load_environment('lookup{"names": 41}')
    draws = [splits, ENV.tasks(sizes, seed=4), ENV.tasks({**sizes, "dev": 255}, seed=3), more.tasks(sizes, seed=3)]
    ids = [task.task_id for draw in draws for rows in draw.values() for task in rows]
    assert len(ids) == len(set(ids))


def chain_of(task: Task) -> tuple[str, ...]:
    return tuple(json.loads(task.metadata)["relations"])


def test_compositional_tasks_are_chains_that_occur_nowhere_else_of_relations_that_do() -> None:
    splits = ENV.tasks({"train": 768, "dev": 256, "heldout": 512, "compositional": 256}, seed=3)
    ordinary = [chain_of(task) for name in ("train", "dev", "heldout") for task in splits[name]]
    novel = {chain_of(task) for task in splits["compositional"]}
    assert len(splits["compositional"]) == 256
    assert not novel & set(ordinary)
    assert {len(chain) for chain in novel} == {2, 3}
    assert {relation for chain in novel for relation in chain} <= {link for chain in ordinary for link in chain}
    sets = [{path_of(task) for task in rows} for rows in splits.values()]
    assert sum(map(len, sets)) == len(set.union(*sets))


def test_levels_are_those_asked_for() -> None:
    some = load_environment('lookup{"levels": [2, 1]}')
    sizes = {"train": 40, "heldout": 10}
    drawn = some.tasks(sizes, seed=0)
    assert [sum(task.level == level for task in drawn["train"]) for level in (1, 2, 3)] == [8, 32, 0]
    everything = {task.task_id for rows in ENV.tasks(sizes, seed=0).values() for task in rows}
    assert not everything & {task.task_id for rows in drawn.values() for task in rows}
    assert {task.level for task in some.tasks({"compositional": 5}, seed=0)["compositional"]} == {2}
    first = load_environment('lookup{"levels": [1]}')
    assert len(first.tasks({"train": 5, "compositional": 0}, seed=0)["train"]) == 5
    with pytest.raises(ValueError, match="compositional: questions of level 1"):
        first.tasks({"train": 5, "compositional": 5}, seed=0)
    with pytest.raises(ValueError, match="lookup has no level 4; it has 1 to 3"):
        load_environment('lookup{"levels": [4, 1]}')


def test_more_tasks_than_questions_is_an_error() -> None:
    with pytest.raises(ValueError, match="train: 50000 asks for more level-"):
        ENV.tasks({"train": 50_000}, seed=0)


def test_more_names_make_more_questions_and_the_first_names_stay() -> None:
    larger = load_environment('lookup{"names": 500}')
    names = larger.names  # type: ignore[attr-defined]
    assert len(set(names)) == 500
    assert names[:40] == NAMES
    rows = larger.tasks({"train": 6000, "heldout": 4000}, seed=0)
    prompts = [task.prompt for split in rows.values() for task in split]
    assert len(set(prompts)) == 10_000
    with pytest.raises(ValueError, match="names"):
        load_environment('lookup{"names": 5000}')


def call(name: str, arguments: object) -> ToolCall:
    return ToolCall(id="call_0", name=name, arguments=json.dumps(arguments))


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        (call("search", {"q": "Ann"}), "no tool search"),
        (call("find", {"who": "Ann"}), "find takes who and rel"),
        (call("find", [1, 2]), "find takes who and rel"),
        (call("find", {"who": "Nobody", "rel": "boss"}), "unknown"),
        (call("find", {"who": 3, "rel": None}), "unknown"),
    ],
)
def test_bad_calls_are_observations(splits: dict[str, list[Task]], asked: ToolCall, content: str) -> None:
    episode = blocking(ENV.reset(splits["train"][0]))
    step = blocking(episode.step(Message(role=Role.ASSISTANT, tool_calls=[asked])))
    assert [message.content for message in step.messages] == [content]
    assert step.info == {"tool_errors": 1}


FACTS = {
    "Ann": {"boss": "Bob", "job": "cook"},
    "Bob": {"boss": "Cid", "job": "vet", "friend": "Ann"},
    "Cid": {"boss": "Bob", "job": "judge"},
}


def walk(task: Task, *asked: tuple[str, str], answer: str) -> Trajectory:
    messages = [Message(role=Role.USER, content=task.prompt)]
    for who, rel in asked:
        messages.append(Message(role=Role.ASSISTANT, tool_calls=[call("find", {"who": who, "rel": rel})]))
        result = FACTS.get(who, {}).get(rel, "unknown")
        messages.append(Message(role=Role.TOOL, content=result, tool_call_id="call_0", name="find"))
    messages.append(Message(role=Role.ASSISTANT, content=answer))
    return Trajectory(
        trajectory_id="t", episode_id="t", task_id=task.task_id, source="model", env="lookup", split="train",
        prompt=task.prompt, reward=0.0, success=False, termination="answered", messages=messages,
    )  # fmt: skip


def test_a_failed_walk_has_solved_the_questions_whose_chain_of_calls_ends_at_its_answer() -> None:
    asked = Task(
        task_id="q", env="lookup", split="train", level=2, prompt="city of the boss of Ann?",
        metadata=json.dumps({"facts": FACTS, "start": "Ann", "relations": ["boss", "city"]}),
    )  # fmt: skip

    def achieved(*calls: tuple[str, str], answer: str) -> list[str]:
        return [new.prompt for new in ENV.achieved(walk(asked, *calls, answer=answer), asked)]  # type: ignore[attr-defined]

    assert achieved(("Ann", "boss"), ("Bob", "job"), answer="vet") == ["job of Bob?", "job of the boss of Ann?"]
    new = ENV.achieved(walk(asked, ("Ann", "boss"), ("Bob", "job"), answer="vet"), asked)[-1]  # type: ignore[attr-defined]
    assert (new.level, json.loads(new.ground_truth), new.split) == (2, "vet", "train")
    assert ENV.goal(new) == "Ann Bob vet"  # type: ignore[attr-defined]
    assert achieved(("Ann", "boss"), ("Bob", "job"), answer="cook") == [], "no call returned it"
    assert achieved(("Ann", "boss"), answer="Bob") == [], "no question asks for a name"
    assert achieved(("Bob", "job"), ("Ann", "boss"), answer="vet") == ["job of Bob?"], "calls in another order"
    back = achieved(("Bob", "friend"), ("Ann", "boss"), ("Bob", "job"), answer="vet")
    assert back == ["job of Bob?", "job of the boss of Ann?"], "nobody is met twice"


def test_a_perfect_expert_solves_everything_and_a_noisy_one_does_not(splits: dict[str, list[Task]]) -> None:
    def success(noise: float) -> float:
        runs = [demonstrate(ENV, task, noise, 0, f"expert-{n}") for n, task in enumerate(splits["train"][:200])]
        assert all(run.n_steps == run.n_tool_calls + 1 for run in runs)
        return sum(run.success for run in runs) / len(runs)

    assert success(0.0) == 1.0
    assert 0.3 < success(0.35) < 0.8


def test_unknown_environment_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no environment 'lokup'; did you mean 'lookup'"):
        load_environment("lokup")


def test_an_environment_of_ones_own_is_named_by_module_and_class() -> None:
    assert load_environment("agentrl.environments.lookup:LookupEnvironment").name == "lookup"


def test_expert_is_seeded(splits: dict[str, list[Task]]) -> None:
    task = splits["train"][0]
    first, second = (demonstrate(ENV, task, 0.5, 7, "x").messages for _ in range(2))
    assert first == second


def test_the_state_says_which_call_reached_which_relation(splits: dict[str, list[Task]]) -> None:
    task = next(task for task in splits["train"] if task.level == 2)
    metadata = json.loads(task.metadata)
    start, [first, second] = metadata["start"], metadata["relations"]
    middle = metadata["facts"][start][first]

    def state(*asked: tuple[str, str]) -> list[int | None]:
        calls = [call("find", {"who": who, "rel": rel}) for who, rel in asked]

        async def go() -> list[int | None]:
            episode = await ENV.reset(task)
            if calls:
                await episode.step(Message(role=Role.ASSISTANT, tool_calls=calls))
            return (await episode.score()).state["subgoals"]

        return blocking(go())

    assert state() == [None, None]
    assert state(("Nobody", first), (start, first), (middle, second)) == [1, 2]
    assert state((start, first), (start, second)) == [0, None]
