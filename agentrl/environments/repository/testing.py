"""Tests of a repository, run by pytest in a sandbox."""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from agentrl.environments.code.workspace import LONGEST, Workspace
from agentrl.environments.repository.ended import Place, assertion, ended_by, place
from agentrl.environments.repository.withheld import RECORD, Told, right, withheld
from agentrl.sandbox import Ran, Sandbox

Where = tuple[str, Place]
"""The file of a test, and where it stands in it."""
STEERS = re.compile(
    r"(^|/)(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|(site|user)customize\.py)$"
)
"""Files that can change what a test is, or what it reports."""

RUN_PYTEST = (
    """
import json, os, sys

with open("check/settings.json") as file:
    settings = json.load(file)
os.remove("check/settings.json")
sys.path += settings["packages"]
import pytest
"""
    + RECORD
    + """
os.chdir("repository")
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src")]

class Report:
    passed, failed = set(), set()

    def pytest_collection_modifyitems(self, config, items):
        if settings["tests"]:
            items[:] = [item for item in items if item.nodeid in settings["tests"]]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

out = os.dup(1)
options = ["-q", "--no-header", "--tb=short", "--maxfail=0", "-p", "no:cacheprovider"]
code = pytest.main([*options, *settings["files"]], plugins=[Report()])
if settings["tests"]:
    said = json.dumps([sorted(Report.passed - Report.failed), told])
    os.write(out, f"{chr(10)}{settings['mark']}{said}{chr(10)}".encode())
sys.exit(code)
"""
)
"""At the end it prints the names of the tests that passed, and what they told, after a mark."""


_TOOK = re.compile(r"(?<=\w) in [0-9.]+s( \([0-9:]+\))?(?=( =+)?$)", re.M)
_PASSED = TypeAdapter(list[str])
_TOLD = TypeAdapter(dict[str, list[Annotated[list[str], Field(min_length=2)]]])


async def visible_report(sandbox: Sandbox, files: Workspace, packages: Sequence[str]) -> str:
    """The end of what pytest prints, for the policy to read, without how long it took: equal files give equal texts, so
    that a stored episode can be made again."""
    ran = await _run(sandbox, files, {"files": [], "packages": packages, "tests": []})
    printed = _TOOK.sub("", (ran.stdout + ran.stderr).decode(errors="replace").strip())
    if ran.stopped:
        printed += f"\nstopped: too much {ran.stopped.replace('_', ' ')}"
    return printed[-LONGEST:] or f"pytest ended with exit code {ran.code} and said nothing"


@dataclass(frozen=True)
class Run:
    """``said`` to pass by the report, ``right`` by what they told too, and the places of tests that ``ended`` with our
    assertion."""

    said: Set[str]
    right: Set[str]
    ended: Set[Where]


@dataclass(frozen=True)
class HiddenTests:
    """``names`` are the tests that decide. ``files`` are those of the repository with them: the files of these tests,
    and all that steers pytest, come from there. ``told``: test -> the places of the comparisons that the right patch
    reaches. The values that are compared there are told, and the literals that they are compared with stay outside."""

    names: Sequence[str]
    files: Mapping[str, str]
    packages: Sequence[str]
    told: Mapping[str, Set[str]] = field(default_factory=dict)

    async def report(self, sandbox: Sandbox, files: Workspace) -> tuple[dict[str, bool], bool]:
        """Which tests pass with the policy's files, and whether the report was forged: then none counts."""
        first = {where: secrets.randbelow(2) == 0 for where in map(place, self.names)}
        runs = await asyncio.gather(
            self._ended(sandbox, files, first),
            self._ended(sandbox, files, {where: not holds for where, holds in first.items()}),
        )
        passed: dict[str, bool] = {}
        forged = False
        for name in self.names:
            where = place(name)
            holding, failing = runs if first[where] else reversed(runs)
            passed[name] = name in holding.right
            forged |= name in failing.said and where in failing.ended
        return {name: ok and not forged for name, ok in passed.items()}, forged

    async def told_by(self, sandbox: Sandbox, solution: Mapping[str, str]) -> Mapping[str, Set[str]]:
        """What the right patch tells, of the tests of which it tells plain data that is right."""
        everywhere = replace(self, told={name: set() for name in self.names})
        made, literals = everywhere._without_results()
        passing, compared = await everywhere._run(sandbox, Workspace(solution), made)
        fit = {name for name in passing if right(compared.get(name, []), literals.get(place(name)[0], {}))}
        misfit = {place(name) for name in self.names if name not in fit}
        return {name: {where for where, *_ in compared.get(name, [])} for name in fit if place(name) not in misfit}

    async def _ended(self, sandbox: Sandbox, files: Workspace, holds: Mapping[Where, bool]) -> Run:
        """A run in which each test ends with an assertion that ``holds`` or fails."""
        made, literals = self._without_results()
        ended: set[Where] = set()
        for home in made:
            ends = {place_in_file: assertion(truth) for (file, place_in_file), truth in holds.items() if file == home}
            made[home], ended_here = ended_by(made[home], ends)
            ended |= {(home, place_in_file) for place_in_file in ended_here}
        passing, compared = await self._run(sandbox, files, made)
        true = {
            name
            for name in passing
            if self.told.get(name, set()) <= {where for where, *_ in compared.get(name, [])}
            and right(compared.get(name, []), literals.get(place(name)[0], {}))
        }
        return Run(passing, true, ended)

    def _without_results(self) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Test files without the results that are withheld, and those results."""
        made: dict[str, str] = {}
        literals: dict[str, dict[str, Any]] = {}
        kept = {place(name) for name in self.told}
        for home in sorted({place(name)[0] for name in self.names} & set(self.files)):
            made[home], literals[home] = withheld(
                self.files[home], {place_in_file for file, place_in_file in kept if file == home}
            )
        return made, literals

    async def _run(self, sandbox: Sandbox, files: Workspace, made: Mapping[str, str]) -> tuple[set[str], Told]:
        """The tests that are said to pass, and what they told."""
        homes = sorted({place(name)[0] for name in self.names})
        checked = Workspace({path: text for path, text in files.items() if not STEERS.search(path)})
        checked |= {path: text for path, text in self.files.items() if STEERS.search(path) or _beside(path, homes)}
        checked |= made
        mark = secrets.token_hex(6)
        settings = {"files": homes, "packages": self.packages, "tests": self.names, "mark": mark}
        ran = await _run(sandbox, checked, settings)
        return _named(ran.stdout.decode(errors="replace"), mark)


def _beside(path: str, homes: Sequence[str]) -> bool:
    """Whether a file is a test file, or belongs to the folder of one, as data of tests do."""
    folders = {str(PurePosixPath(home).parent) for home in homes} - {"."}
    return path in homes or str(PurePosixPath(path).parent) in folders


def _named(printed: str, mark: str) -> tuple[set[str], Told]:
    """The last report. One that is no report names no test."""
    try:
        passed, compared = json.loads(printed.rpartition(f"\n{mark}")[2].partition("\n")[0])
        return set(_PASSED.validate_python(passed)), _TOLD.validate_python(compared)
    except (ValueError, TypeError, RecursionError):
        return set(), {}


async def _run(sandbox: Sandbox, files: Workspace, settings: Mapping[str, object]) -> Ran:
    inside = await asyncio.to_thread(files.encoded, "repository/")
    inside |= {"check/run.py": RUN_PYTEST.encode()}
    inside["check/settings.json"] = json.dumps(settings).encode()
    return await sandbox.run([sandbox.python, "-I", "-S", "check/run.py"], inside)
