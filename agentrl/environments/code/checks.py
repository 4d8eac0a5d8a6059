"""Checks in a sandbox: calls whose results are compared outside it, and tests that the policy may run."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl.environments.base import cut
from agentrl.environments.code.workspace import LONGEST, Workspace
from agentrl.sandbox import Ran, Sandbox

Calls = Mapping[str, tuple[str, str, list[Any], Any]]
"""Name -> module, function, arguments, and the result that is right."""

MAKE_CALLS = """
def result(module, name, arguments):
    try:
        __import__(module)
        return ascii(getattr(sys.modules[module], name)(*arguments))
    except BaseException:
        return "raised"

def make_calls():
    out = open(posix.dup(1), "w")
    posix.dup2(2, 1)
    for call in calls:
        print(result(*call), file=out, flush=True)

import posix, sys
with open("check/calls") as file:
    calls = eval(file.read())
posix.chdir("repository")
sys.path.insert(0, posix.getcwd())
"""
"""Prints each result on a line. What the code itself prints is no result. It imports what Python has loaded already,
since other modules take as long to load as Python takes to start."""

CALLS_ALONE = MAKE_CALLS + "make_calls()"

RUN_TESTS = (
    MAKE_CALLS
    + """
child = posix.fork()
if not child:
    make_calls()
    posix._exit(0)
posix.waitpid(child, 0)
print(sys.argv[1], flush=True)
passed, failed = 0, []
for path in sorted(posix.listdir(".")):
    if path[:5] != "test_" or path[-3:] != ".py":
        continue
    try:
        module = __import__(path[:-3])
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
)
"""Makes the calls in a process of their own. Then it prints a word, runs the functions ``test_*`` of the files
``test_*.py``, and prints what failed."""


async def right_calls(sandbox: Sandbox, workspace: Workspace, calls: Calls) -> dict[str, bool]:
    """Which calls of a workspace's functions give the right result. The sandbox is told the arguments alone, so no code
    in it can read the results or claim to be right: what it prints is compared here."""
    return _compared((await _run(sandbox, workspace, CALLS_ALONE, calls)).stdout, calls)


async def visible_tests(sandbox: Sandbox, workspace: Workspace, calls: Calls) -> tuple[str, dict[str, bool]]:
    """What the tests in the workspace say, for the policy to read; and which calls give the right result. The policy
    may have edited the tests, which does not change the calls."""
    word = secrets.token_hex(8)
    ran = await _run(sandbox, workspace, RUN_TESTS, calls, word)
    made, _, printed = ran.stdout.partition(f"{word}\n".encode())
    return told(replace(ran, stdout=printed)), _compared(made, calls)


def told(ran: Ran) -> str:
    """The output of a run of tests, or why there is none."""
    report = ran.stdout.decode(errors="replace").strip()
    if ran.stopped:
        report += f"\nstopped: too much {ran.stopped.replace('_', ' ')}"
    elif not report:
        report = f"ended with exit code {ran.code} and no report\n{ran.stderr.decode(errors='replace')}"
    return cut(report.strip(), LONGEST)


async def _run(sandbox: Sandbox, workspace: Workspace, script: str, calls: Calls, *arguments: str) -> Ran:
    asked = repr([check[:3] for check in calls.values()])
    files = {"check/run.py": script.encode(), "check/calls": asked.encode()} | workspace.encoded("repository/")
    return await sandbox.run([sandbox.python, "-I", "-S", "check/run.py", *arguments], files)


def _compared(printed: bytes, calls: Calls) -> dict[str, bool]:
    """Which of the lines are the right results, as Python writes them."""
    lines = printed.split(b"\n")
    given = [*lines[: len(calls)], *[b""] * (len(calls) - len(lines))]
    return {name: text == ascii(check[3]).encode() for text, (name, check) in zip(given, calls.items(), strict=True)}
