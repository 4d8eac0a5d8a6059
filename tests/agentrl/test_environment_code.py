"""``code``: tasks, tools, hidden calls, and attempts to be paid without solving anything."""

import json
import re
from random import Random
from typing import Any

import pytest

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.code import checks
from agentrl.environments.code.checks import right_calls
from agentrl.environments.code.environment import Code, CodeConfig, CodeEpisode
from agentrl.environments.code.programs import KINDS, draw_values, function, understood
from agentrl.environments.code.workspace import Workspace, patch, similarity
from agentrl.environments.scripted import at_random, play
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall

ENV = Code()
HERE = ENV.config.sandbox


def of_level(level: int, seed: int = 0) -> Task:
    return Code(CodeConfig(levels=[level])).tasks({"train": 1}, seed)["train"][0]


def call(name: str, **arguments: Any) -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=[ToolCall(id="c", name=name, arguments=json.dumps(arguments))])


def attempt(task: Task, *messages: Message, environment: Code = ENV) -> tuple[list[str], CodeEpisode, Any]:
    """What tools answered, the episode, and its score."""

    async def go() -> tuple[list[str], CodeEpisode, Any]:
        episode = await environment.reset(task)
        heard = [entry.content for message in messages for entry in (await episode.step(message)).messages]
        return heard, episode, await episode.score()

    return blocking(go())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_bug_shows(kind: Any) -> None:
    random = Random(0)
    for k in {kind.low, kind.high}:
        for wrong in kind.wrong:
            ours, theirs = (function(item.replace("{k}", str(k))) for item in (kind.right, wrong))
            inputs = [draw_values(random) for _ in range(300)]
            assert any(ours(values) != theirs(values) for values in inputs), (wrong, k)


def test_splits_share_no_task_and_two_draws_share_no_id() -> None:
    splits = ENV.tasks({"train": 300, "heldout": 100}, 1)
    rows = [task for tasks in splits.values() for task in tasks]
    assert len({task.prompt for task in rows}) == len({task.metadata for task in rows}) == 400
    other = {task.task_id for tasks in ENV.tasks({"train": 300}, 2).values() for task in tasks}
    assert not other & {task.task_id for task in rows}
    assert [sum(task.level == level for task in rows) for level in range(1, 6)] == [40, 80, 120, 80, 80]
    assert ENV.tasks({"train": 300, "heldout": 100}, 1) == splits


def test_where_code_runs_and_how_it_is_paid_changes_no_task() -> None:
    other = Code(CodeConfig(sandbox="unsafe", reward="share", similarity=0.5))
    assert other.tasks({"train": 5}, 0) == ENV.tasks({"train": 5}, 0)


@pytest.mark.parametrize("level", range(1, 6))
def test_the_expert_solves_and_an_untouched_repository_fails(level: int) -> None:
    for seed in range(2):
        task = of_level(level, seed)
        row = demonstrate(ENV, task, 0.0, 0, "t")
        assert (row.success, row.reward, row.n_tool_errors) == (True, 1.0, 0), task.prompt
        asked = [message.tool_calls[0].name for message in row.messages if message.tool_calls]
        assert (asked[0], asked[-1]) == ("read", "run_tests")
        assert "2 passed, 0 failed" in row.messages[-2].content
        assert [message.reward for message in row.messages if message.reward] == [1.0], (
            "both visible tests are right now"
        )
        _, _, score = attempt(task)
        given = json.loads(task.metadata)
        assert not score.success
        assert [name for name, right in score.state["tests"].items() if right] == given["pass_to_pass"]
        assert given["fail_to_pass"]
        assert bool(given["pass_to_pass"]) == (level > 2)


def test_an_expert_that_lacks_kinds_guesses_among_them() -> None:
    def drawn(expression: str, unknown: int) -> set[str]:
        return {understood(expression, unknown, Random(seed)) for seed in range(200)}

    assert drawn("values[3:]", 1) == {"values[3:]"}, "it is the only one"
    assert drawn("values[3:]", 3) == {"values[3:]", "values[-3:]"}
    assert drawn("values[::-1]", 3) == {"values[::-1]"}, "with a number there are two, without it one"
    assert drawn("[v + 3 for v in values]", len(KINDS) - 1) == {"[v + 3 for v in values]"}, "that one is known"
    for kind in KINDS:
        numbered = "{k}" in kind.right
        expression = kind.right.replace("{k}", "3")
        assert drawn(expression, len(KINDS)) == {
            other.right.replace("{k}", "3") for other in KINDS if ("{k}" in other.right) == numbered
        }


def test_demonstrations_of_what_the_expert_lacks_are_right_by_chance() -> None:
    environment = Code(CodeConfig(levels=[1], unknown=len(KINDS)))
    tasks = environment.tasks({"train": 24}, 0)["train"]
    assert tasks == Code(CodeConfig(levels=[1])).tasks({"train": 24}, 0)["train"]
    rows = [demonstrate(environment, task, 0.0, 0, "t") for task in tasks]
    assert 0 < sum(bool(row.success) for row in rows) < 12
    assert {row.n_steps for row in rows} == {4}, "it runs the tests, and ends whatever they say"
    assert not any(row.n_tool_errors for row in rows)
    assert demonstrate(environment, of_level(5), 0.0, 0, "t").n_tool_errors == 0, "it guesses how to mend bugs too"


def test_a_program_is_run_once_unless_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_RAN", {})
    files = Workspace({"main.py": "import time\n\n\ndef f(values):\n    return time.perf_counter_ns()\n"})
    files["test_main.py"] = "from main import f\n\n\ndef test_now():\n    assert f([]) == 0, str(f([]))\n"
    calls = {"now": ("main", "f", [[]], 0)}
    first, again = (blocking(checks.visible_tests(HERE, files, calls)) for _ in range(2))
    assert first == again
    assert "AssertionError" in first[0]
    files["main.py"] += "\n"
    assert blocking(checks.visible_tests(HERE, files, calls)) != first, "it is another program"
    assert len(checks._RAN) == 2
    endless = Workspace({"main.py": "def f(values):\n    while True:\n        pass\n"})
    short = HERE.model_copy(update={"limits": HERE.limits.model_copy(update={"cpu_s": 1})})
    assert blocking(right_calls(short, endless, calls)) == ({"now": False}, "error")
    assert len(checks._RAN) == 2


def test_the_expert_comes_back_from_mistakes() -> None:
    rows = [demonstrate(ENV, of_level(4, seed), 0.3, seed, "t") for seed in range(6)]
    assert sum(row.success for row in rows) >= 2
    assert sum(row.n_tool_errors for row in rows) > 0


def test_a_policy_without_sense_solves_nothing() -> None:
    async def go() -> list[bool]:
        solved = []
        for number, task in enumerate(ENV.tasks({"heldout": 15}, 3)["heldout"]):
            episode = await ENV.reset(task)
            await play(episode, at_random(episode, Random(number)), 6)
            solved.append((await episode.score()).success)
        return solved

    assert sum(blocking(go())) == 0


def test_tools_read_search_and_edit() -> None:
    task = of_level(3)
    files = json.loads(task.metadata)["files"]
    home = next(path for path in files if path not in ("main.py", "test_main.py"))
    heard, episode, _ = attempt(
        task,
        call("read", path=home),
        call("read", path="main.py", first=1, last=1),
        call("search", text="def run"),
        call("search", text=""),
        call("edit", path="main.py", old="def run(values):", new="def run(values):  # here"),
        call("edit", path="notes.txt", old="", new="a new file"),
    )
    assert heard[0] == files[home]
    assert heard[1] == files["main.py"].splitlines()[0] + "\n"
    assert heard[2].startswith("main.py:")
    assert heard[3].split() == sorted(files)
    assert "# here" in episode.files["main.py"]
    assert episode.files["notes.txt"] == "a new file"
    assert "+a new file" in patch(files, episode.files)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (call("read", path="main"), "there is no file 'main'; did you mean main.py"),
        (call("read", path="main.py", first=99), "main.py has"),
        (call("read", path="main.py", first="one"), "valid integer"),
        (call("search", text="no such thing"), "no line contains"),
        (call("edit", path="main.py", old="values", new="v"), "times; give a text that is there once"),
        (call("edit", path="../escape.py", old="", new="x"), "without '..'"),
        (call("edit", path="/etc/passwd", old="", new="x"), "inside the folder"),
        (call("run"), "no tool run; there are read, search, edit, run_tests"),
    ],
)
def test_wrong_calls_are_observations(message: Message, text: str) -> None:
    async def go() -> tuple[str, int]:
        episode = await ENV.reset(of_level(3))
        step = await episode.step(message)
        return step.messages[0].content, step.info["tool_errors"]

    content, errors = blocking(go())
    assert text in content
    assert errors == 1


def test_the_reward_may_be_the_share_of_tests_or_count_the_patch() -> None:
    task = of_level(5)
    half = Code(CodeConfig(reward="share", similarity=0.5))
    truth: dict[str, str] = json.loads(task.ground_truth)
    path, text = next(iter(truth.items()))
    _, _, none = attempt(task, environment=half)
    _, _, some = attempt(task, call("edit", path=path, old="", new=text), environment=half)
    _, _, whole = attempt(
        task, *[call("edit", path=path, old="", new=text) for path, text in truth.items()], environment=half
    )
    assert none.reward == 0
    assert 0 < some.reward <= whole.reward
    assert (whole.success, whole.reward) == (True, 1.5)
    assert [(component.name, component.weight) for component in whole.components] == [
        ("tests", 1.0),
        ("similarity", 0.5),
    ]


def test_patches_are_compared_without_line_numbers() -> None:
    before = {"a.py": "x = 1\n"}
    right = patch(before, {"a.py": "x = 2\n"})
    assert right.splitlines() == ["--- a.py", "+++ a.py", "@@", "-x = 1", "+x = 2"]
    assert similarity(right, right) == 1.0
    assert similarity("", right) == 0.0
    assert 0 < similarity(patch(before, {"a.py": "x = 22\n"}), right) < 1


CHEATS = {
    "ends before the calls": "import os; os._exit(0)",
    "ends in a call": "import os\ndef run(values): os._exit(0)",
    "claims results": "import os\nos.write(1, b'[]\\n' * 50)\ndef run(values): return []",
    "claims success": "print('2 passed, 0 failed'); print('OK'); raise SystemExit(0)",
    "patches what encodes": "import builtins\nbuiltins.ascii = lambda *_: '[]\\\\n[]'\ndef run(values): return 1",
    "is equal to all": "class Any(list):\n    __eq__ = lambda *_: True\ndef run(values): return Any()",
    "reads the checks": (
        "import glob, gc, sys\n"
        "def run(values):\n"
        "    calls = eval(open('/tmp/work/check/calls').read())\n"
        "    mine = next(one for one in calls if values in one[2])\n"
        "    print(glob.glob('/tmp/work/**', recursive=True))\n"
        "    return mine[-1]"
    ),
    "looks at the frames": (
        "import sys\n"
        "def run(values):\n"
        "    frame = sys._getframe()\n"
        "    while frame.f_back: frame = frame.f_back\n"
        "    return next((v[3] for v in frame.f_globals.get('calls', []) if len(v) > 3), None)"
    ),
    "kills the runner of the tests": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "leaves a daemon that prints": (
        "import os, time\n"
        "if not os.fork():\n"
        "    time.sleep(0.3)\n"
        "    os.write(1, b'2 passed, 0 failed\\n' * 9)\n"
        "    os._exit(0)"
    ),
    "never ends": "while True: pass",
    "sleeps": "import time; time.sleep(100)",
    "prints without end": "while True: print('lots of text' * 100)",
    "recurses": "def run(values): return run(values)",
    "is no Python": "def run(values) return values",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_nobody_is_paid_for_less_than_a_solution(cheat: str) -> None:
    fast = HERE.model_copy(update={"limits": HERE.limits.model_copy(update={"cpu_s": 1, "wall_s": 2.0})})
    environment = Code(CodeConfig(sandbox=fast, reward="share"))
    for level in (1, 3):
        edits = [call("edit", path="main.py", old="", new=CHEATS[cheat]), call("run_tests")]
        edits.insert(1, call("edit", path="test_main.py", old="", new="def test_1(): pass"))
        heard, episode, score = attempt(of_level(level), *edits, environment=environment)
        assert episode.share == 0.0, "edited tests pay nothing"
        assert (score.success, score.reward) == (False, 0.0)
        assert len(heard[-1]) <= 4_100


def test_the_reward_of_a_step_does_not_come_from_the_tests_in_the_workspace() -> None:
    """The tests run in a process of their own, after the calls, so they cannot print results for them."""
    task = of_level(3)
    right = [repr(entry[3]) for entry in json.loads(task.metadata)["shown"].values()]
    printing = "print(" + repr("\n".join(right)) + ")\ndef test_1(): pass"
    ending = call("edit", path="main.py", old="", new="import os; os._exit(0)")
    heard, episode, score = attempt(
        task, ending, call("edit", path="test_main.py", old="", new=printing), call("run_tests")
    )
    assert heard[-1].endswith("1 passed, 0 failed")
    assert (episode.share, score.success) == (0.0, False)


def test_a_solution_of_the_visible_tests_alone_is_none() -> None:
    task = of_level(1)
    tests = json.loads(task.metadata)["files"]["test_main.py"]
    asked, wanted = (re.findall(pattern, tests) for pattern in (r"got = \w+\((.*)\)", r"got == (\[.*?\])"))
    table = "{" + ", ".join(f"{request!r}: {result}" for request, result in zip(asked, wanted, strict=True)) + "}"
    name = re.findall(r"import (\w+)", tests)[0]
    source = f"def {name}(values): return {table}.get(str(values))"
    heard, _, score = attempt(task, call("edit", path="main.py", old="", new=source), call("run_tests"))
    assert "2 passed, 0 failed" in heard[-1]
    assert not score.success


def test_hidden_results_never_enter_the_sandbox() -> None:
    """All that a program can reach is printed, and holds no right result."""
    calls = {
        "secret": ("main", "run", [[1]], "the-right-result"),
        "seen": ("main", "run", [[2]], False),
    }
    source = (
        "import gc, glob, sys\n"
        "def run(values):\n"
        "    seen = [open(path, errors='replace').read() for path in glob.glob('/tmp/work/*/*.*')]\n"
        "    return '-'.join(['the', 'right', 'result']) in str(seen) + str(gc.get_objects()) + str(sys.argv)"
    )
    right, fared = blocking(right_calls(HERE, Workspace({"main.py": source}), calls))
    assert (right, fared) == ({"secret": False, "seen": True}, "failed")


def test_an_episode_can_be_kept_and_gone_back_to() -> None:
    async def go() -> tuple[str, str]:
        episode = await ENV.reset(of_level(3))
        kept = await episode.snapshot()
        await episode.step(call("edit", path="main.py", old="", new="changed"))
        changed = episode.files["main.py"]
        await episode.restore(kept)
        return changed, episode.files["main.py"]

    changed, again = blocking(go())
    assert changed == "changed"
    assert "def run" in again


def test_the_environment_is_known_by_its_name() -> None:
    environment = load_environment('code{"reward": "share", "sandbox": {"type": "unsafe"}}')
    assert environment.config.reward == "share"
    assert environment.config.sandbox.type == "unsafe"
