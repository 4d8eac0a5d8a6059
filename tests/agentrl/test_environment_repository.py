"""``repository``: a real git repository with an issue, its tests, and attempts to pass them without solving it."""

import json
import re
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.blocking import blocking
from agentrl.environments.code.workspace import Workspace
from agentrl.environments.forks import rebuild
from agentrl.environments.repository.ended import assertion, ended_by, place
from agentrl.environments.repository.environment import LIMITS, Repository, RepositoryConfig
from agentrl.environments.repository.instances import instances, patched, snapshot
from agentrl.environments.repository.testing import HiddenTests
from agentrl.environments.repository.withheld import NAME, right, withheld
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.sandbox import Bubblewrap
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall

CORE = '''"""Prices."""


def price(count, each):
    """What ``count`` things cost. From ten on, they are a tenth cheaper."""
    total = count * each
    if count > 10:
        total -= total / 10
    return total


def label(name):
    return name.strip().title()
'''
FIXED = CORE.replace("count > 10", "count >= 10")
TESTS = """import unittest

import pytest

from shop.core import label, price


def test_few():
    assert price(2, 3) == 6


@pytest.mark.parametrize("name", ["ab", " c"])
def test_label(name):
    assert label(name) == name.strip().upper().title()
"""
MORE_TESTS = (
    TESTS
    + """

@pytest.fixture
def ten():
    return 10


@pytest.mark.parametrize(
    ("each", "whole"),
    [(1, 9), (10, 90)],
)
def test_ten(ten, each, whole):
    if each == 99:
        return
    assert price(ten, each) == whole


class TestShop(unittest.TestCase):
    def test_ten_of_nothing(self):
        self.assertEqual(price(10, 0), 0)

    def test_ten_of_two(self): self.assertEqual(price(10, 2), 18)
"""
)
FAIL = ["tests/test_core.py::test_ten[1-9]", "tests/test_core.py::test_ten[10-90]"]
FAIL.append("tests/test_core.py::TestShop::test_ten_of_two")
PASS = ["tests/test_core.py::test_few", "tests/test_core.py::test_label[ab]", "tests/test_core.py::test_label[ c]"]
PASS.append("tests/test_core.py::TestShop::test_ten_of_nothing")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-C", str(folder)]
    return subprocess.run([*command, *arguments], capture_output=True, check=True, text=True).stdout


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the clone ``acme__shop`` and the task file ``tasks.jsonl``."""
    folder = tmp_path_factory.mktemp("clones")
    clone = folder / "acme__shop"
    files = {"src/shop/core.py": CORE, "src/shop/__init__.py": "", "tests/test_core.py": TESTS, "logo.png": ""}
    for path, text in files.items():
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        (clone / path).write_text(text)
    (clone / "logo.png").write_bytes(b"\x89PNG\xff\xfe")
    (clone / "link.py").symlink_to("src/shop/core.py")
    git(folder, "init", "-q", str(clone))
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "begin")
    commit = git(clone, "rev-parse", "HEAD").strip()
    changes = {}
    for path, text in (("src/shop/core.py", FIXED), ("tests/test_core.py", MORE_TESTS)):
        (clone / path).write_text(text)
        changes[path] = git(clone, "diff", "--", path)
        git(clone, "checkout", "-q", "--", path)
    row = {
        "instance_id": "acme__shop-1", "repo": "acme/shop", "base_commit": commit, "version": "1.0", "hints_text": "",
        "problem_statement": "Ten things should be a tenth cheaper.\n\nprice(10, 1) is 10, not 9.",
        "patch": changes["src/shop/core.py"], "test_patch": changes["tests/test_core.py"],
        "FAIL_TO_PASS": json.dumps(FAIL), "PASS_TO_PASS": PASS,
    }  # fmt: skip
    (folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def environment(clones: Path, **settings: Any) -> Repository:
    return Repository(RepositoryConfig(file=str(clones / "tasks.jsonl"), repositories=str(clones), **settings))


@pytest.fixture(scope="module")
def lean(clones: Path, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """It pays shares. In its sandbox is pytest without the plugins that this interpreter has, which take most of a run;
    what the right patch tells is known after the first attempt."""
    packages = tmp_path_factory.mktemp("lean") / "packages"  # the folder above is its owner's alone
    needed = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
    for file in (file for name in needed for file in distribution(name).files or [] if ".." not in file.parts):
        (packages / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(file.locate()), packages / file)
    return environment(clones, reward="share", packages=[str(packages)])


@pytest.fixture
def task(clones: Path) -> Task:
    return environment(clones).tasks({"train": 1}, 0)["train"][0]


def call(name: str, **arguments: Any) -> Message:
    return Message(role=Role.ASSISTANT, tool_calls=[ToolCall(id="c", name=name, arguments=json.dumps(arguments))])


def attempt(environment: Repository, task: Task, *messages: Message) -> tuple[list[str], Any]:
    async def go() -> tuple[list[str], Any]:
        episode = await environment.reset(task)
        heard = [entry.content for message in messages for entry in (await episode.step(message)).messages]
        return heard, await episode.score()

    return blocking(go())


def test_the_expert_solves_the_issue(clones: Path, task: Task) -> None:
    row = demonstrate(environment(clones, similarity=0.5), task, 0.0, 0, "t")
    assert (row.success, row.reward) == (True, 1.5)
    state = json.loads(row.final_state)
    assert state["tests"] == dict.fromkeys([*FAIL, *PASS], True)
    assert "+    if count >= 10:" in state["patch"].splitlines()
    shown = [message.content for message in row.messages if message.role is Role.TOOL]
    assert shown[0] == CORE
    assert "3 passed" in shown[-1], "the tests of the repository, as the policy sees them"
    assert not any("test_ten" in entry for entry in shown), "hidden tests stay hidden"


def test_an_untouched_repository_passes_what_it_passed(lean: Repository, task: Task) -> None:
    _, score = attempt(lean, task)
    assert (score.success, score.reward, score.state["forged"]) == (False, 0.0, False)
    assert {name for name, passed in score.state["tests"].items() if passed} == set(PASS)


def test_a_change_that_breaks_another_test_is_no_solution(lean: Repository, task: Task) -> None:
    broken = FIXED.replace(".title()", ".upper()")
    _, score = attempt(lean, task, call("edit", path="src/shop/core.py", old="", new=broken))
    assert not score.success
    assert score.reward == 0.75, "all that failed, and three of the four that passed"


PATCH_PYTEST = """
import _pytest.reports
real = _pytest.reports.TestReport.from_item_and_call.__func__
def passing(cls, item, call):
    call.excinfo = None
    return real(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(passing)
"""
PATCH_ASSERTIONS = """
import builtins, _pytest.runner
def ok(*arguments, **named):
    return None
import _pytest.python
_pytest.python.pytest_pyfunc_call = ok
import sys, gc
for one in gc.get_objects():
    if type(one).__name__ == "HookImpl" and one.function.__name__ == "pytest_pyfunc_call":
        one.function = lambda *a, **k: True
"""
READ_CHECKER = """
import __main__, json, os
settings = __main__.settings
said = json.dumps([[name for name in settings["tests"]], {}])
os.write(__main__.out, f"{chr(10)}{settings.get('mark') or settings.get('suffix')}{said}{chr(10)}".encode())
os._exit(0)
"""
PATCH_CHECKER = """
import __main__
__main__.Report.passed = set(__main__.settings["tests"])
__main__.Report.failed = type("Never", (set,), {"add": lambda *_: None})()
"""
EDIT_TESTS = """
import glob
for path in glob.glob("/tmp/work/**/*.py", recursive=True):
    if "core" not in path:
        open(path, "w").write("")
"""
EQUAL_TO_ALL = """
class Yes(float):
    def __eq__(self, other):
        return True
    __hash__ = float.__hash__
def price(count, each):
    return Yes()
"""
PASS_OWN_ERRORS = """
import _pytest.reports
real = _pytest.reports.TestReport.from_item_and_call.__func__
class Own(BaseException):
    pass
def passing(cls, item, call):
    if call.excinfo and call.excinfo.errisinstance(Own):
        call.excinfo = None
    return real(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(passing)
def price(count, each):
    raise Own
"""
READ_FRAMES = """
import sys
def price(count, each):
    known = sys._getframe(1).f_code.co_consts
    return next((one for one in known if type(one) is int and one not in (count, each)), 0)
"""
CHEATS: dict[str, dict[str, str]] = {
    "ends before the tests": {"src/shop/core.py": "import os; os._exit(0)"},
    "ends well before the tests": {"src/shop/core.py": "raise SystemExit(0)"},
    "prints a report": {"src/shop/core.py": f"print('7 passed'); print('\\n_{'0' * 12}' + {json.dumps(FAIL)!r})"},
    "makes all reports pass": {"src/shop/core.py": CORE + PATCH_PYTEST},
    "calls no test": {"src/shop/core.py": CORE + PATCH_ASSERTIONS},
    "patches in conftest": {"conftest.py": PATCH_PYTEST, "tests/conftest.py": PATCH_PYTEST},
    "configures pytest": {"pytest.ini": "[pytest]\naddopts = -p no:terminal --collect-only\n"},
    "shadows pytest": {"src/pytest.py": "print('7 passed')", "pytest.py": "print('7 passed')"},
    "rewrites the tests": {"tests/test_core.py": "def test_ten(): pass\ndef test_few(): pass"},
    "reads the checker and writes its report": {"src/shop/core.py": CORE + READ_CHECKER},
    "patches the checker": {"src/shop/core.py": CORE + PATCH_CHECKER},
    "empties the tests as they are loaded": {"src/shop/core.py": CORE + EDIT_TESTS},
    "is equal to everything": {"src/shop/core.py": CORE + EQUAL_TO_ALL},
    "lets its own errors pass": {"src/shop/core.py": CORE + PASS_OWN_ERRORS},
    "starts before Python": {"sitecustomize.py": PATCH_PYTEST, "usercustomize.py": PATCH_PYTEST},
}


FORGED = ("makes all reports pass", "calls no test", "reads the checker and writes its report", "patches the checker")


@pytest.mark.parametrize("cheat", CHEATS)
def test_nobody_is_paid_for_less_than_a_solution(lean: Repository, task: Task, cheat: str) -> None:
    _, score = attempt(lean, task, *(call("edit", path=path, old="", new=text) for path, text in CHEATS[cheat].items()))
    assert (score.success, score.reward) == (False, 0.0), score.state
    assert score.state["forged"] == (cheat in FORGED)


def test_right_results_that_are_literals_cannot_be_read(clones: Path, task: Task) -> None:
    """They are not in the sandbox: a policy's code that reads them out of the test that calls it finds none."""
    literal = json.loads(task.metadata) | {"fail_to_pass": [FAIL[2]], "pass_to_pass": [PASS[0], PASS[3]]}
    task = task.model_copy(update={"metadata": json.dumps(literal)})
    edit = call("edit", path="src/shop/core.py", old="", new=CORE + READ_FRAMES)
    _, score = attempt(environment(clones, reward="share"), task, edit)
    assert (score.success, score.reward, score.state["tests"][FAIL[2]]) == (False, 0.0, False)
    assert attempt(environment(clones), task, call("edit", path="src/shop/core.py", old="", new=FIXED))[1].success


def test_comparisons_are_told_and_literals_are_left_out() -> None:
    source, literals = withheld(MORE_TESTS, {("test_few",), ("test_ten",), ("TestShop", "test_ten_of_two")})
    assert sorted(literals.values()) == [6, 18]
    assert "18" not in source
    assert re.search(rf"{NAME}\('[0-9:]+', price\(ten, each\), whole\)", source)
    assert "self.assertEqual(price(10, 0), 0)" in source, "of another test"
    [few] = [key for key, literal in literals.items() if literal == 6]
    assert right([[few, "6"], ["1:4", "[1, (2,)]", "[1, (2,)]"]], literals)
    for wrong in ([few, "7"], [few, "Yes()"], ["1:4", "1"], ["1:4", "1", "2"], [few, "__import__('os')", "6"]):
        assert not right([wrong], literals)
    assert withheld("no python (", {("test_few",)}) == ("no python (", {})


def test_what_cannot_be_compared_outside_is_compared_inside(tmp_path: Path) -> None:
    """Values that are no plain data, and those that only approximately agree, stay with the test."""
    tests = """import pytest
from work import Money, near, text

def test_money():
    assert Money(3) == Money(3)

def test_near():
    assert near() == pytest.approx(0.3)

def test_text():
    assert text() == "a"
"""
    solution = {
        "work.py": "class Money(int):\n    pass\nclass Price:\n    pass\ndef near():\n    return 0.1 + 0.2\n"
        "def text():\n    return 'a'\n",
        "test_work.py": tests,
    }
    names = [f"test_work.py::test_{name}" for name in ("money", "near", "text")]
    package = str(Path(pytest.__file__).parents[1])
    hidden = HiddenTests(names, solution, [package])
    sandbox = Bubblewrap(limits=LIMITS, readable=(package,))
    told = blocking(hidden.told_by(sandbox, solution))
    assert {name.rpartition("_")[2] for name in told} == {"money", "text"}
    passed, forged = blocking(replace(hidden, told=told).report(sandbox, Workspace(solution)))
    assert (passed, forged) == (dict.fromkeys(names, True), False)


def test_snapshots_have_every_file_and_patches_fit(clones: Path, task: Task) -> None:
    given = json.loads(task.metadata)
    files = snapshot(clones, "acme/shop", given["base_commit"])
    assert files["logo.png"].encode("utf-8", "surrogateescape") == b"\x89PNG\xff\xfe"
    assert files["link.py"] == CORE
    assert patched(files, json.loads(task.ground_truth)) == {**files, "src/shop/core.py": FIXED}
    with pytest.raises(ValueError, match="does not fit"):
        patched({**files, "src/shop/core.py": "else"}, json.loads(task.ground_truth))
    with pytest.raises(ValueError, match="has no commit 0000000"):
        snapshot(clones, "acme/shop", "0000000")
    with pytest.raises(ValueError, match="there is no clone of acme/other"):
        snapshot(clones, "acme/other", "0000000")
    with pytest.raises(ValueError, match="is no commit"):
        snapshot(clones, "acme/shop", "--output=/tmp/x")


@pytest.mark.parametrize(
    ("line", "message"),
    [("{}", "line 2: instance_id: Field required"), ("no json", "line 2: Invalid JSON"), (None, "is there twice")],
)
def test_wrong_task_files_are_errors_that_name_the_line(
    clones: Path, tmp_path: Path, line: str | None, message: str
) -> None:
    right = (clones / "tasks.jsonl").read_text()
    (tmp_path / "tasks.jsonl").write_text(right + (right if line is None else line))
    with pytest.raises(ValueError, match=message):
        instances(tmp_path / "tasks.jsonl")


def test_tests_end_with_an_assertion_however_they_end() -> None:
    names = [*FAIL, *PASS]
    places = {place(name) for name in names}
    assert ("tests/test_core.py", ("TestShop", "test_ten_of_two")) in places
    ends = {item: f"assert {number} == 0" for number, (_, item) in enumerate(sorted(places))}
    source, result = ended_by(MORE_TESTS, ends)
    assert result == set(ends)
    assert all(source.count(f"finally:\n{' ' * indent}assert") for indent in (8, 12))
    compile(source, "tests", "exec")
    early = "import pytest\ndef test_a():\n    return\ndef test_b():\n    pytest.skip()\nasync def test_c():\n    pass"
    for holds in (True, False):
        made: dict[str, Any] = {}
        source, _ = ended_by(early, {("test_a",): assertion(holds), ("test_b",): assertion(holds)})
        exec(source, made)
        with nullcontext() if holds else pytest.raises(AssertionError):
            made["test_a"]()
        with pytest.raises(BaseException) as caught:
            made["test_b"]()
        assert isinstance(caught.value, AssertionError) != holds


def test_what_is_no_test_file_stays_as_it_is() -> None:
    assert ended_by("no python (", {("test_few",): "pass"}) == ("no python (", set())
    source, result = ended_by('"""Doc."""\nfrom __future__ import annotations\n\ndef test_a():\n    pass', {})
    compile(source, "tests", "exec")
    assert result == set()


def test_a_stored_episode_is_made_again_with_its_files(clones: Path, task: Task) -> None:
    """What pytest prints does not say how long it took, so a replay is answered as the row was."""
    position, row = environment(clones), demonstrate(environment(clones), task, 0.0, 0, "r")
    assert row.success
    report = row.messages[-2].content
    assert re.search(r"[0-9]+ passed$", report), report
    end = max(number for number, message in enumerate(row.messages) if message.role is Role.ASSISTANT)

    async def again() -> bool:
        episode = await rebuild(position, task, row.messages[:end])
        await episode.step(row.messages[end])
        return (await episode.score()).success  # type: ignore[union-attr]

    assert blocking(again())
