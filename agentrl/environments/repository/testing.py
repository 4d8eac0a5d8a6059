"""Tests of a repository, run by pytest in a sandbox."""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from agentrl.environments.code.workspace import LONGEST, Workspace
from agentrl.environments.repository.decoys import with_decoys
from agentrl.sandbox import Ran, Sandbox

STEERS = re.compile(r"(^|/)(conftest\.py|\.?pytest\.ini|tox\.ini|setup\.cfg|pyproject\.toml|(site|user)customize\.py)$")
"""Files that can change what a test is, or what it reports."""

RUN_PYTEST = """
import json, os, sys

with open("check/settings.json") as file:
    settings = json.load(file)
os.remove("check/settings.json")
sys.path += settings["packages"]
os.chdir("repository")
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "src")]
import pytest

class Report:
    passed, failed = set(), set()

    def pytest_collection_modifyitems(self, config, items):
        wanted, suffix = set(settings["tests"]), settings["suffix"]
        decoys = [item for item in items if item.name.partition("[")[0].endswith(suffix)]
        if suffix:
            items[:] = [*decoys, *(item for item in items if item.nodeid in wanted)]

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

out = os.dup(1)
options = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
code = pytest.main([*options, *settings["files"]], plugins=[Report()])
if settings["suffix"]:
    said = json.dumps(sorted(Report.passed - Report.failed))
    os.write(out, f"{chr(10)}{settings['suffix']}{said}{chr(10)}".encode())
sys.exit(code)
"""
"""Prints the names of the tests that passed at the end, after a word that only the caller knows."""


async def visible_report(sandbox: Sandbox, files: Workspace, packages: Sequence[str]) -> str:
    """The end of what pytest prints, for the policy to read."""
    ran = await _run(sandbox, files, {"files": [], "packages": packages, "tests": [], "suffix": ""})
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
    suffix = f"_{secrets.token_hex(6)}"
    homes = sorted({name.partition("::")[0] for name in tests})
    checked = Workspace({path: text for path, text in files.items() if not STEERS.search(path)})
    checked |= {path: text for path, text in right.items() if STEERS.search(path) or _beside(path, homes)}
    for home in homes:
        names = {re.split(r"::", name.partition("[")[0])[-1] for name in tests if name.startswith(f"{home}::")}
        if home in right:
            checked[home] = with_decoys(right[home], names, suffix)
    ran = await _run(sandbox, checked, {"files": homes, "packages": packages, "tests": tests, "suffix": suffix})
    passed = _passed(ran.stdout.decode(errors="replace"), suffix)
    forged = any(name.partition("[")[0].endswith(suffix) for name in passed)
    return {name: name in passed and not forged for name in tests}, forged


def _beside(path: str, homes: Sequence[str]) -> bool:
    """Whether a file is a test file, or belongs to the folder of one, as data of tests do."""
    folders = {str(PurePosixPath(home).parent) for home in homes} - {"."}
    return path in homes or str(PurePosixPath(path).parent) in folders


def _passed(said: str, suffix: str) -> set[str]:
    try:
        return set(json.loads(said.rpartition(f"\n{suffix}")[2].partition("\n")[0]))
    except (ValueError, TypeError, RecursionError):
        return set()


async def _run(sandbox: Sandbox, files: Workspace, settings: Mapping[str, object]) -> Ran:
    inside = await asyncio.to_thread(files.encoded, "repository/")
    inside |= {"check/run.py": RUN_PYTEST.encode()}
    inside["check/settings.json"] = json.dumps(settings).encode()
    return await sandbox.run([sandbox.python, "-I", "-S", "check/run.py"], inside)
