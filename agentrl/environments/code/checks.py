"""Checks in a sandbox: calls whose results are compared outside it, and tests that the policy may run."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from agentrl.environments.base import cut
from agentrl.environments.code.workspace import LONGEST, Workspace
from agentrl.sandbox import Ran, Sandbox

MOST_REMEMBERED = 8192
"""Runs whose output is kept; the oldest is forgotten first."""
_RAN: dict[bytes, tuple[bytes, Ran]] = {}

Calls = Mapping[str, tuple[str, str, list[Any], Any]]
"""Name -> module, function, arguments, and the result that is right."""

Execution = Literal["passed", "failed", "error", "uncompiled"]
"""How a program fared, by the worst of its calls: all results are right; one is wrong; one raised, or never came; or a
module does not compile."""

MAKE_CALLS = """
def result(module, name, arguments):
    try:
        __import__(module)
    except SyntaxError:
        return "uncompiled"
    except BaseException:
        return "raised"
    try:
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


async def made_calls(sandbox: Sandbox, workspace: Workspace, calls: Sequence[tuple[str, str, list[Any]]]) -> Ran:
    """A run that makes some calls: module, function, arguments. It prints a line for each that came back: the result as
    Python writes it, ``raised``, or ``uncompiled``."""
    made, ran = await _run(sandbox, workspace, CALLS_ALONE, calls)
    return replace(ran, stdout=made)


async def right_calls(sandbox: Sandbox, workspace: Workspace, calls: Calls) -> tuple[dict[str, bool], Execution]:
    """Which calls of a workspace's functions give the right result, and how the program fared. The sandbox is told the
    arguments alone, so no code in it can read the results or claim to be right: what it prints is compared here."""
    return _compared((await made_calls(sandbox, workspace, _asked(calls))).stdout, calls)


async def visible_tests(sandbox: Sandbox, workspace: Workspace, calls: Calls) -> tuple[str, dict[str, bool], Execution]:
    """What the tests in the workspace say, for the policy to read; which calls give the right result; and how the
    program fared. The policy may have edited the tests, which does not change the calls."""
    made, ran = await _run(sandbox, workspace, RUN_TESTS, _asked(calls))
    return told(ran), *_compared(made, calls)


def told(ran: Ran) -> str:
    """The output of a run of tests, or why there is none."""
    report = ran.stdout.decode(errors="replace").strip()
    if ran.stopped:
        report += f"\nstopped: too much {ran.stopped.replace('_', ' ')}"
    elif not report:
        report = f"ended with exit code {ran.code} and no report\n{ran.stderr.decode(errors='replace')}"
    return cut(report.strip(), LONGEST)


PARSE = """
import ast, hashlib
for number in range(int(sys.argv[1])):
    try:
        with open(f"check/{number}.py", encoding="utf-8", errors="surrogateescape") as file:
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        print()
        continue
    dumped = (ascii(ast.dump(node)).encode() for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.expr)))
    print(*(hashlib.sha1(text).hexdigest()[:8] for text in dumped))
"""


async def syntax_match(sandbox: Sandbox, ours: Mapping[str, str], right: Mapping[str, str]) -> float:
    """The share of the subtrees of the ``right`` files' syntax trees that ``ours`` have too, each as often as it is
    there (CodeBLEU's syntactic match: Ren et al. 2020, section 2.2), over the Python files that differ from each other;
    1 if none does. Subtrees are statements and expressions, with their names. Nothing is run; both are parsed in the
    sandbox, since a parser can be broken."""
    paths = [path for path in sorted({*ours, *right}) if path.endswith(".py") and ours.get(path) != right.get(path)]
    texts = [files.get(path, "") for path in paths for files in (ours, right)]
    scripts = {f"check/{number}.py": text.encode("utf-8", "surrogateescape") for number, text in enumerate(texts)}
    printed, _ = await _once(sandbox, {"check/run.py": f"import sys{PARSE}".encode(), **scripts}, str(len(texts)))
    lines = [Counter(line.split()) for line in printed.split(b"\n")[: len(texts)]]
    lines += [Counter()] * (len(texts) - len(lines))
    total = sum(subtrees.total() for subtrees in lines[1::2])
    shared = sum((made & wanted).total() for made, wanted in zip(lines[::2], lines[1::2], strict=True))
    return shared / total if total else 1.0


def _asked(calls: Calls) -> list[tuple[str, str, list[Any]]]:
    return [(module, name, arguments) for module, name, arguments, _ in calls.values()]


async def _run(
    sandbox: Sandbox, workspace: Workspace, script: str, calls: Sequence[tuple[str, str, list[Any]]]
) -> tuple[bytes, Ran]:
    """What calls of a workspace's functions print, and the run with what its tests print."""
    files = {"check/run.py": script.encode(), "check/calls": repr(calls).encode()} | workspace.encoded("repository/")
    return await _once(sandbox, files)


async def _once(sandbox: Sandbox, files: Mapping[str, bytes], *arguments: str) -> tuple[bytes, Ran]:
    """What ``check/run.py`` prints before it prints a secret word, and the run with what comes after that.

    Policies write the same programs again and again. What this process has run is not run again, unless it was stopped:
    a busy machine may have been the reason."""
    key = hashlib.sha256(repr((sandbox.model_dump_json(), sorted(files.items()), arguments)).encode()).digest()
    if key in _RAN:
        return _RAN[key]
    word = secrets.token_hex(8)
    ran = await sandbox.run([sandbox.python, "-I", "-S", "check/run.py", *arguments, word], files)
    before, _, after = ran.stdout.partition(f"{word}\n".encode())
    result = before, replace(ran, stdout=after)
    if not ran.stopped and len(ran.stdout) + len(ran.stderr) <= LONGEST:
        if len(_RAN) >= MOST_REMEMBERED:
            _RAN.pop(next(iter(_RAN)), None)
        _RAN[key] = result
    return result


def _compared(printed: bytes, calls: Calls) -> tuple[dict[str, bool], Execution]:
    """Which of the lines are the right results, as Python writes them, and what they say of the program."""
    lines = printed.split(b"\n")
    given = [*lines[: len(calls)], *[b""] * (len(calls) - len(lines))]
    right = {name: text == ascii(check[3]).encode() for text, (name, check) in zip(given, calls.items(), strict=True)}
    if b"uncompiled" in given:
        return right, "uncompiled"
    if b"raised" in given or b"" in given:
        return right, "error"
    return right, "passed" if all(right.values()) else "failed"
