"""Generated repositories: files with a function to write or a bug to fix, tests that the policy sees, and calls that it
does not see."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl.environments.code.programs import (
    ProgramStep,
    Values,
    call,
    draw_steps,
    draw_values,
    function_body,
    run,
    sentence,
    with_bug,
)
from agentrl.environments.task_splits import Draft

VISIBLE, INPUTS = 2, 8
"""Tests that the policy sees, and lists that are drawn for them and for the hidden calls."""


@dataclass(frozen=True)
class Recipe:
    """``steps`` of a program, in so many ``modules`` besides ``main.py``. No module: the function is to be written."""

    steps: int
    modules: int = 0
    bugs: int = 0


LEVELS = {1: Recipe(1), 2: Recipe(2), 3: Recipe(3, 1, 1), 4: Recipe(5, 2, 1), 5: Recipe(7, 3, 2)}
MODULES = ("clean", "shape", "order", "table", "series", "filters", "basics", "report")
VERBS = ("adapt", "adjust", "arrange", "build", "change", "convert", "fix", "make", "map", "prepare", "treat", "turn")
NOUNS = ("bins", "costs", "counts", "days", "grades", "items", "loads", "marks", "prices", "rates", "scores", "steps")
STUB = "    raise NotImplementedError"


def drafts(level: int, random: Random) -> Iterator[Draft]:
    """Tasks of a level, without end."""
    while True:
        made = _draft(LEVELS[level], random)
        if made is not None:
            yield made


def _draft(level: Recipe, random: Random) -> Draft | None:
    """A task; None if what was drawn tells too little."""
    steps = draw_steps(level.steps, random)
    inputs = [draw_values(random) for _ in range(INPUTS)]
    results = [run(steps, values) for values in inputs]
    telling = len({str(result) for result in results}) == INPUTS and all(results)
    if not telling or max(map(_size, results)) > 10**6:
        return None
    return _bugs(level, steps, inputs, random) if level.bugs else _function(steps, inputs, random)


def _function(steps: Sequence[ProgramStep], inputs: Sequence[Values], random: Random) -> Draft:
    """A function to write."""
    name, words = f"{random.choice(VERBS)}_{random.choice(NOUNS)}", sentence(steps)
    head = f'def {name}(values):\n    """{words}."""\n'
    files = {"main.py": f"{head}{STUB}\n", "test_main.py": _tests(name, steps, inputs[:VISIBLE])}
    calls = [["main", name, [values], run(steps, values)] for values in inputs[VISIBLE:]]
    prompt = f"In main.py, write {name}(values): {words}."
    return Draft(
        prompt,
        {"main.py": head + function_body(steps)},
        {"files": files, **_named(name, steps, inputs[:VISIBLE], calls, [])},
    )


def _bugs(level: Recipe, steps: list[ProgramStep], inputs: list[Values], random: Random) -> Draft | None:
    """A repository with bugs. An example and the tests show wrong results of ``run``, and so do some hidden calls."""
    written = list(steps)
    for index in random.sample(range(len(steps)), level.bugs):
        written[index] = with_bug(steps[index], random)
    names = random.sample(MODULES, level.modules)
    homes = [names[index * level.modules // len(steps)] for index in range(len(steps))]
    shown = [values for values in inputs if run(written, values, written=True) != run(steps, values)]
    if len(shown) <= VISIBLE + 1:
        return None
    example, *seen = shown[: VISIBLE + 1]
    failing, passing = _calls(written, homes, [values for values in inputs if values not in (example, *seen)])
    wrong = {name for _, name, *_ in failing}
    if not passing or any(step.name not in wrong for step in written if step.written != step.right):
        return None
    now, then = _files(written, homes), _files(steps, homes)
    files = now | {"test_main.py": _tests("run", steps, seen)}
    prompt = (
        f"In main.py, {call('run', example)} returns {run(written, example, written=True)}, but "
        f"{run(steps, example)} is right. The docstrings say what each function has to do. Fix the code."
    )
    fixed = {path: text for path, text in then.items() if now[path] != text}
    return Draft(prompt, fixed, {"files": files, **_named("run", steps, seen, failing, passing)})


def _calls(
    written: Sequence[ProgramStep], homes: Sequence[str], inputs: Sequence[Values]
) -> tuple[list[Any], list[Any]]:
    """Calls of ``run`` and of each step that give a wrong result now, and those that give the right one."""
    calls = [["main", "run", [values], run(written, values)] for values in inputs]
    now = [run(written, values, written=True) for values in inputs]
    for step, home in zip(written, homes, strict=True):
        for values in inputs[:2]:
            calls.append([home, step.name, [values], run([step], values)])
            now.append(run([step], values, written=True))
    failing = [check for check, result in zip(calls, now, strict=True) if check[3] != result]
    return failing, [check for check, result in zip(calls, now, strict=True) if check[3] == result]


def _named(
    name: str, steps: Sequence[ProgramStep], seen: Sequence[Values], failing: Sequence[Any], passing: Sequence[Any]
) -> dict[str, Any]:
    """The visible tests as calls; the hidden calls by name, and the names of those that fail and pass before."""
    shown = {f"test_{number}": ["main", name, [values], run(steps, values)] for number, values in enumerate(seen, 1)}
    numbered = enumerate([*failing, *passing], 1)
    calls = {f"{check[0]}.{check[1]} {number}": check for number, check in numbered}
    names = list(calls)
    return {
        "shown": shown,
        "calls": calls,
        "fail_to_pass": names[: len(failing)],
        "pass_to_pass": names[len(failing) :],
    }


def _files(steps: Sequence[ProgramStep], homes: Sequence[str]) -> dict[str, str]:
    """The modules of a program, and ``main.py``, which calls their functions in turn."""
    files: dict[str, str] = {}
    for step, home in zip(steps, homes, strict=True):
        path, words = f"{home}.py", step.words[0].upper() + step.words[1:]
        before = files[path] + "\n\n" if path in files else ""
        files[path] = before + f'def {step.name}(values):\n    """{words}."""\n    return {step.written}\n'
    imports = "".join(f"import {home}\n" for home in sorted(set(homes)))
    body = "".join(f"    values = {home}.{step.name}(values)\n" for step, home in zip(steps, homes, strict=True))
    return files | {"main.py": f"{imports}\n\ndef run(values):\n{body}    return values\n"}


def _tests(name: str, steps: Sequence[ProgramStep], inputs: Sequence[Values]) -> str:
    """The tests that the policy sees."""
    text = f"from main import {name}\n"
    for number, values in enumerate(inputs, 1):
        asked, wanted = call(name, values), run(steps, values)
        text += f"\n\ndef test_{number}():\n    got = {asked}\n"
        text += f'    assert got == {wanted}, f"{asked} is {{got}}, not {wanted}"\n'
    return text


def _size(values: Values) -> int:
    return max(map(abs, values), default=0)
