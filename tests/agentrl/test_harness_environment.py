"""Coding agents as an environment: a scripted one in the real sandbox, in front of the real recorder."""

import json
import time
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from recording import ScriptedTokens, check, policy_for_tests

from agentrl.engines.base import EngineError, Sampling, TurnError
from agentrl.environments.harness.environment import HarnessConfig, HarnessEnvironment
from agentrl.models.policy import Policy
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Termination, Trajectory

AGENT = Path(__file__).with_name("scripted_agent.py").read_text()
TESTS = {"there": "test -f out.txt", "right.sh": '[ "$(cat out.txt)" = hi ]', "py.py": "import helper; helper.check()"}
HELPERS = {"helper.py": "def check():\n    assert open('out.txt').read()"}
LIMITS = {"memory_mb": 256, "processes": 64, "disk_mb": 32, "file_mb": 16}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


def harness(**settings: Any) -> HarnessEnvironment:
    limits = {"type": "bubblewrap", "limits": {**LIMITS, **settings.pop("limits", {})}}
    given = {"agent": ["python", "-c", AGENT], "timeout": 20.0, "turns": 6, "sandbox": limits, **settings}
    return HarnessEnvironment(HarnessConfig.model_validate(given))


def task(prompt: str, tests: dict[str, str] = TESTS, **metadata: Any) -> Task:
    about = json.dumps({"tests": tests, "helpers": HELPERS, **metadata})
    return Task(task_id=prompt, env="harness", split="train", prompt=prompt, verifier="tests", metadata=about)


def says(command: str = "echo hi > out.txt") -> Any:
    """Runs a command in the first turn of a conversation, and ends it in the next."""
    return lambda text: f"run: {command}" if text.count("<|im_start|>assistant") == 1 else "Sunny."


def played(
    policy: Policy, environment: HarnessEnvironment, tasks: list[Task], words: Any = None, **more: Any
) -> dict[str, list[Trajectory]]:
    """The rows of one attempt at each task, by its prompt's first word. Nothing is left over."""
    before = set(psutil.Process().children(recursive=True))
    engine = ScriptedTokens(policy, words or says())
    engine.fails = more.pop("fails", [])
    sampling = Sampling(max_tokens=more.pop("room", 4000), max_turn_tokens=more.pop("turn_tokens", 400))
    with RolloutRunner(policy, engine, environment, sampling, limits=Limits(**more)) as runner:
        names = [f"r{number}" for number in range(len(tasks))]
        rows = runner.run([Attempt(task, group=task.task_id) for task in tasks], 0, names)
    assert engine.open_sessions == 0
    assert set(psutil.Process().children(recursive=True)) <= before
    by_word: dict[str, list[Trajectory]] = {}
    for row in rows:
        by_word.setdefault(row.prompt.partition(":")[0], []).append(row)
    return by_word


def test_agents_work_at_once_and_tests_decide(policy: Policy) -> None:
    tasks = [task(f"{word}: write hi", files={"a/b.txt": "old\n"}) for word in ("work", "title", "helper", "key")]
    rows = played(policy, harness(setup="echo made > made.txt"), tasks)
    [row] = rows["work"]
    check(policy, row)
    assert (row.reward, row.success, row.termination, row.agent) == (1.0, True, Termination.ANSWERED, "main")
    assert [(part.name, part.value) for part in row.reward_components] == [("there", 1), ("right.sh", 1), ("py.py", 1)]
    state = json.loads(row.final_state)
    assert "+++ out.txt" in state["diff"]
    assert "+hi" in state["diff"]
    assert "b.txt" not in state["diff"]
    main, title = rows["title"]
    assert (main.agent, main.segment, title.agent, title.reward) == ("main", 0, "side", None)
    assert "not-trained" in title.tags
    main, helper = rows["helper"]
    assert (main.reward, helper.reward, helper.agent, helper.episode_id) == (1.0, 1.0, "agent-2", main.episode_id)
    [row] = rows["key"]
    assert row.reward == 1.0, row.tags
    told = json.loads(row.final_state)["diff"]
    assert "[401, 401," in told, "another's key, and none"
    assert "answered" not in told


def test_of_eight_at_once_one_is_killed_and_the_others_go_on(policy: Policy) -> None:
    def words(text: str) -> str:
        return says("kill -9 $PPID" if "number 3" in text else "echo hi > out.txt")(text)

    rows = played(policy, harness(at_once=8), [task(f"work: number {number}") for number in range(8)], words)["work"]
    by_task = {row.task_id: row for row in rows}
    killed = by_task.pop("work: number 3")
    assert (killed.reward, killed.termination) == (None, Termination.ENV_ERROR)
    assert [(row.reward, row.termination) for row in by_task.values()] == [(1.0, Termination.ANSWERED)] * 7
    for row in by_task.values():
        check(policy, row)


def test_a_test_that_fails_is_a_component_and_the_agent_cannot_change_it(policy: Policy) -> None:
    cheats = "mkdir -p ../tests tests; echo true > tests/right.sh; echo true > ../tests/right.sh; echo no > out.txt"
    [row] = played(policy, harness(), [task("work: cheat")], says(cheats))["work"]
    assert {part.name: part.value for part in row.reward_components} == {"there": 1, "right.sh": 0, "py.py": 1}
    assert row.reward == pytest.approx(2 / 3)
    assert row.success is False
    [row] = played(policy, harness(), [task("work: nothing", tests={})])["work"]
    assert (row.reward, row.success, [part.name for part in row.reward_components]) == (0.0, True, ["finished"])


@pytest.mark.parametrize(
    ("command", "reward", "tag"),
    [
        ("echo hi > out.txt; kill -9 $PPID", None, "the agent ended with code -9"),
        ("echo hi > out.txt; kill -9 -1", 0.0, "stopped:code_"),
        ("echo hi > out.txt; dd if=/dev/zero of=big bs=1M count=20 2>&1; cat big big big > bigger", 1.0, ""),
        ("echo hi > out.txt; sleep 1000 >&- 2>&- & (f(){ f|f& }; f) >&- 2>&-", 1.0, ""),
    ],
)
def test_what_a_policy_does_to_its_sandbox_stays_there(
    policy: Policy, command: str, reward: float | None, tag: str
) -> None:
    [row] = played(policy, harness(), [task("work: harm")], says(command))["work"]
    assert row.reward == reward, row.tags
    assert any(tag in given for given in row.tags) or not tag
    assert row.termination is (Termination.ENV_ERROR if reward is None else Termination.ANSWERED)


@pytest.mark.slow
@pytest.mark.ci
def test_failures_of_the_program_are_told_apart_from_those_of_the_policy(policy: Policy) -> None:
    tasks = [task(f"{word}: x") for word in ("silent", "crash", "hang")]
    rows = played(policy, harness(timeout=3.0), tasks)
    [silent], [crash], [hang] = rows["silent"], rows["crash"], rows["hang"]
    assert (silent.termination, silent.reward) == (Termination.ENV_ERROR, None)
    assert "without an answered request" in silent.tags[0]
    assert "code 3" in silent.tags[0]
    assert (crash.termination, crash.reward) == (Termination.ENV_ERROR, None)
    assert "the agent ended with code -11" in crash.tags[0]
    assert (hang.termination, hang.reward) == (Termination.TIME_LIMIT, 1.0), hang.tags
    [row] = played(policy, harness(setup="echo wrong; exit 7"), [task("work: x")])["work"]
    assert row.termination is Termination.ENV_ERROR
    assert "setup ended with code 7: wrong" in row.tags[0]


@pytest.mark.slow
@pytest.mark.ci
def test_limits_of_an_episode_are_no_failures(policy: Policy) -> None:
    always = lambda _: "run: echo hi > out.txt"  # noqa: E731
    [row] = played(policy, harness(turns=3), [task("work: x")], always)["work"]
    assert (row.termination, row.n_steps, row.reward) == (Termination.MAX_STEPS, 3, 1.0), row.tags
    [row] = played(policy, harness(), [task("work: x")], always, room=150)["work"]
    assert (row.termination, row.reward) == (Termination.MAX_TOKENS, 1.0), row.tags
    started = time.monotonic()
    [row] = played(policy, harness(timeout=100.0), [task("hang: x")], episode_s=2.0)["hang"]
    assert (row.termination, row.reward) == (Termination.TIME_LIMIT, 1.0), row.tags
    assert time.monotonic() - started < 15


@pytest.mark.slow
@pytest.mark.ci
def test_an_engine_that_fails_is_infrastructure(policy: Policy) -> None:
    once = {"retry": {"attempts": 1}}
    tasks = [task("work: x"), task("work: y")]
    rows = played(policy, harness(), tasks, fails=[TurnError("no answer")], **once)["work"]
    row, other = sorted(rows, key=lambda row: row.reward is not None)
    assert (row.termination, row.reward, other.reward) == (Termination.INFRA_ERROR, None, 1.0)
    assert row.tags == ["failed_turns:1", "infra_error: no answer"]
    rows = played(policy, harness(), tasks, fails=[TurnError("no answer")])["work"]
    assert [row.reward for row in rows] == [1.0, 1.0], "it is begun again"
    with pytest.raises(EngineError, match="gone"):
        played(policy, harness(), [task("work: x")], fails=[EngineError("gone")])


def test_bad_settings_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'claude-code'"):
        harness(agent="claude-cod")
    with pytest.raises(
        ValueError, match=r"has no node_modules/@openai/codex-linux.*npm install .* @openai/codex@0\.169"
    ):
        harness(agent="codex", agents=str(tmp_path))
    with pytest.raises(ValueError, match="is no folder"):
        harness(folder=str(tmp_path / "no"))
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": "y", "tests": {"../z": "true"}}\n')
    with pytest.raises(ValueError, match=r"line 2: tests: .*without '\.\.'"):
        harness(file=str(file)).tasks({"train": 1}, 0)
    with pytest.raises(ValueError, match="none is set"):
        harness().tasks({"train": 1}, 0)
    odd = Task(task_id="t", env="harness", split="train", prompt="x", metadata='{"solution": ["ls"]}')
    with pytest.raises(ValueError, match="no known shell tool"):
        next(harness().demonstrate(odd, 0.0, Random(0)))
