"""Tests of a repository, run by pytest in a sandbox."""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from agentrl.environments.code.workspace import LONGEST, Workspace
from agentrl.environments.repository.ended import Place, assertion, ended_by, place
from agentrl.sandbox import Ran, Sandbox

STEERS = re.compile(
    r"(^|/)(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|(site|user)customize\.py)$"
)
"""Files that can change what a test is, or what it reports."""

RUN_PYTEST = """
import json, os, sys

with open("check/settings.json") as file:
    settings = json.load(file)
os.remove("check/settings.json")
sys.path += settings["packages"]
import pytest

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
    said = json.dumps(sorted(Report.passed - Report.failed))
    os.write(out, f"{chr(10)}{settings['mark']}{said}{chr(10)}".encode())
sys.exit(code)
"""
"""Prints the names of the tests that passed at the end, after a mark."""


async def visible_report(sandbox: Sandbox, files: Workspace, packages: Sequence[str]) -> str:
    """The end of what pytest prints, for the policy to read."""
    ran = await _run(sandbox, files, {"files": [], "packages": packages, "tests": []})
    said = (ran.stdout + ran.stderr).decode(errors="replace").strip()
    if ran.stopped:
        said += f"\nstopped: too much {ran.stopped.replace('_', ' ')}"
    return said[-LONGEST:] or f"pytest ended with exit code {ran.code} and said nothing"


async def hidden_report(
    sandbox: Sandbox, files: Workspace, right: Mapping[str, str], tests: Sequence[str], packages: Sequence[str]
) -> tuple[dict[str, bool], bool]:
    """Which hidden tests pass with the policy's files, and whether the report was forged: then none counts.

    ``right`` are the files with the hidden tests. From them come the files of these tests, and all that steers pytest.
    """
    first = {where: secrets.randbelow(2) == 0 for where in map(place, tests)}
    runs = await asyncio.gather(
        _passed(sandbox, files, right, tests, packages, first),
        _passed(sandbox, files, right, tests, packages, {where: not holds for where, holds in first.items()}),
    )
    passed: dict[str, bool] = {}
    forged = False
    for name in tests:
        where = place(name)
        (holding, _), (failing, ended) = runs if first[where] else reversed(runs)
        passed[name] = name in holding
        forged |= name in failing and where in ended
    return {name: one and not forged for name, one in passed.items()}, forged


async def _passed(
    sandbox: Sandbox,
    files: Workspace,
    right: Mapping[str, str],
    tests: Sequence[str],
    packages: Sequence[str],
    holds: Mapping[tuple[str, Place], bool],
) -> tuple[set[str], set[tuple[str, Place]]]:
    """The hidden tests that are said to pass if each ends with an assertion that ``holds`` or fails, and the places of
    those that do end so."""
    homes = sorted({home for home, _ in holds})
    checked = Workspace({path: text for path, text in files.items() if not STEERS.search(path)})
    checked |= {path: text for path, text in right.items() if STEERS.search(path) or _beside(path, homes)}
    ended: set[tuple[str, Place]] = set()
    for home in homes:
        if home in right:
            ends = {one: assertion(truth) for (file, one), truth in holds.items() if file == home}
            checked[home], found = ended_by(right[home], ends)
            ended |= {(home, one) for one in found}
    mark = secrets.token_hex(6)
    ran = await _run(sandbox, checked, {"files": homes, "packages": packages, "tests": tests, "mark": mark})
    return _named(ran.stdout.decode(errors="replace"), mark), ended


def _beside(path: str, homes: Sequence[str]) -> bool:
    """Whether a file is a test file, or belongs to the folder of one, as data of tests do."""
    folders = {str(PurePosixPath(home).parent) for home in homes} - {"."}
    return path in homes or str(PurePosixPath(path).parent) in folders


def _named(said: str, mark: str) -> set[str]:
    """The names in the last report."""
    try:
        return set(json.loads(said.rpartition(f"\n{mark}")[2].partition("\n")[0]))
    except (ValueError, TypeError, RecursionError):
        return set()


async def _run(sandbox: Sandbox, files: Workspace, settings: Mapping[str, object]) -> Ran:
    inside = await asyncio.to_thread(files.encoded, "repository/")
    inside |= {"check/run.py": RUN_PYTEST.encode()}
    inside["check/settings.json"] = json.dumps(settings).encode()
    return await sandbox.run([sandbox.python, "-I", "-S", "check/run.py"], inside)
