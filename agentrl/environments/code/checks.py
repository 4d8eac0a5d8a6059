"""Checks in a sandbox: calls whose results are compared outside it, and tests that the policy may run."""

import json
from collections.abc import Mapping
from typing import Any

from agentrl.environments.base import cut
from agentrl.environments.code.workspace import LONGEST, Workspace
from agentrl.sandbox import Ran, Sandbox

Calls = Mapping[str, tuple[str, str, list[Any], Any]]
"""Name -> module, function, arguments, and the result that is right."""

MAKE_CALLS = """
import json, os, sys
from importlib import import_module

def result(module, name, arguments):
    try:
        return json.dumps({"value": getattr(import_module(module), name)(*arguments)})
    except BaseException as error:
        return json.dumps({"raised": type(error).__name__})

with open("check/calls.json") as file:
    calls = json.load(file)
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.chdir("repository")
sys.path.insert(0, os.getcwd())
for call in calls:
    print(result(*call), file=out, flush=True)
"""
"""Prints the JSON of each result on a line. What the code itself prints is no result."""

RUN_TESTS = """
import glob, os, sys
from importlib import import_module

os.chdir("repository")
sys.path.insert(0, os.getcwd())
passed, failed = 0, []
for path in sorted(glob.glob("test_*.py")):
    try:
        module = import_module(path[:-3])
    except BaseException as error:
        failed.append(f"{path}: {type(error).__name__}: {error}")
        continue
    for name, test in list(vars(module).items()):
        if name.startswith("test_") and callable(test):
            try:
                test()
                passed += 1
            except BaseException as error:
                failed.append(f"{path} {name}: {type(error).__name__}: {error}")
print(f"{passed} passed, {len(failed)} failed")
print(*failed, sep="\\n")
sys.exit(bool(failed))
"""
"""Runs the functions ``test_*`` of the files ``test_*.py``, and prints what failed."""


async def right_calls(sandbox: Sandbox, workspace: Workspace, calls: Calls) -> dict[str, bool]:
    """Which calls of a workspace's functions give the right result. The sandbox is told the arguments alone, so no code
    in it can read the results or claim to be right: what it prints is compared here."""
    asked = json.dumps([one[:3] for one in calls.values()])
    ran = await _run(sandbox, workspace, MAKE_CALLS, {"calls.json": asked})
    lines = ran.stdout.decode(errors="replace").split("\n")
    given = [*lines[: len(calls)], *[""] * (len(calls) - len(lines))]
    return {name: _same(text, one[3]) for text, (name, one) in zip(given, calls.items(), strict=True)}


async def visible_tests(sandbox: Sandbox, workspace: Workspace) -> str:
    """What the tests in the workspace say, for the policy to read."""
    ran = await _run(sandbox, workspace, RUN_TESTS, {})
    return told(ran)


def told(ran: Ran) -> str:
    """The output of a run of tests, or why there is none."""
    said = ran.stdout.decode(errors="replace").strip()
    if ran.stopped:
        said += f"\nstopped: too much {ran.stopped.replace('_', ' ')}"
    elif not said:
        said = f"ended with exit code {ran.code} and no report\n{ran.stderr.decode(errors='replace')}"
    return cut(said.strip(), LONGEST)


async def _run(sandbox: Sandbox, workspace: Workspace, script: str, more: Mapping[str, str]) -> Ran:
    files = workspace.encoded("repository/") | {"check/run.py": script.encode()}
    files |= {f"check/{name}": text.encode() for name, text in more.items()}
    return await sandbox.run([sandbox.python, "-I", "-S", "check/run.py"], files)


def _same(text: str, wanted: Any) -> bool:
    """Whether a line of output is the JSON of a value."""
    try:
        return json.dumps(json.loads(text)) == json.dumps({"value": wanted})
    except (ValueError, RecursionError):
        return False
