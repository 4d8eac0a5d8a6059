"""Programs with inputs that somebody proposes, and what the executor says of them (Absolute Zero: Zhao et al. 2025,
arXiv 2505.03335, section 3.3.3: a proposal is a task if its program runs, is safe, and gives the same again)."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.environments.base import NoTaskError
from agentrl.environments.code.checks import made_calls
from agentrl.environments.code.workspace import Workspace
from agentrl.environments.program_io.programs import PROBES, known_by
from agentrl.environments.program_io.values import LONGEST, arguments, equal, literal, unfenced
from agentrl.sandbox import Ran, Sandbox

FORM = (
    "a Python function f that imports nothing, and below it a call, such as f([1, 2]). If examples are shown: 4 to 12 "
    "calls, and if you like a line # that says what f does"
)
LONGEST_PROGRAM = 2000
"""Characters of a program."""
CALLS = range(4, 13)
"""How many inputs a program has that is to be inferred."""
FORBIDDEN = re.compile(r"__|\b(import|open|exec|eval|compile|input|getattr|globals|vars)\b")
"""What a proposed program may not name: it is a function of its input. Its wall is the sandbox, not this."""


class Proposal(NamedTuple):
    """``inputs`` are texts, as they stand in the calls."""

    program: str
    inputs: list[str]
    message: str = ""

    @property
    def text(self) -> str:
        """As it is proposed, in the form :data:`FORM`."""
        message = [f"# {self.message}"] if self.message else []
        return "\n".join([self.program, *(f"f({given})" for given in self.inputs), *message])


class Executed(NamedTuple):
    """``outputs`` of the inputs, as texts, and what the program is ``known_by``."""

    outputs: list[str]
    known_by: str


def read(text: str, several: bool) -> Proposal:
    """What a text proposes: ``several`` inputs, or one. Raises NoTaskError: form, forbidden."""
    program, calls, message = [], list[str](), ""
    for line in unfenced(text).splitlines():
        call = re.fullmatch(r"f\((.*)\)\s*", line)
        if call:
            calls.append(call[1].strip())
        elif not calls:
            program.append(line)
        elif line.startswith("#") and several and not message:
            message = line.strip("# ")
        elif line.strip():
            raise NoTaskError("form")
    written = "\n".join(program).strip("\n")
    if not 0 < len(written) <= LONGEST_PROGRAM or len(message) > LONGEST:
        raise NoTaskError("form")
    if (len(calls) not in CALLS or len(set(calls)) < len(calls)) if several else len(calls) != 1:
        raise NoTaskError("form")
    try:
        for call_text in calls:
            arguments(call_text)
    except ValueError:
        raise NoTaskError("form") from None
    if FORBIDDEN.search(written):
        raise NoTaskError("forbidden")
    return Proposal(written, calls, message)


async def run_program(sandbox: Sandbox, program: str, inputs: Sequence[str]) -> tuple[list[str], Ran]:
    """What ``f`` of a program returns for each input, as text; ``raised``, ``uncompiled``, or nothing if it did not
    come back. The sandbox is told the inputs alone. Raises ValueError if an input is none."""
    calls = [("main", "f", arguments(given)) for given in inputs]
    ran = await made_calls(sandbox, Workspace({"main.py": program}), calls)
    lines = ran.stdout.decode(errors="replace").split("\n")[: len(calls)]
    return [*lines, *[""] * (len(calls) - len(lines))], ran


async def execute(sandbox: Sandbox, proposal: Proposal) -> Executed:
    """What a proposed program does: it runs twice, in another order of its inputs and each of them twice.

    Raises NoTaskError: uncompiled, raised, stopped, too_long, not_plain, not_deterministic, or constant, if all outputs
    of several inputs are equal, so that no input matters.
    """
    inputs, probes = proposal.inputs, [repr(values) for values in PROBES]
    results, ran = await run_program(sandbox, proposal.program, [*inputs, *probes])
    outputs, of_probes = results[: len(inputs)], results[len(inputs) :]
    for output in outputs:
        if output in ("uncompiled", "raised"):
            raise NoTaskError(output)
        if not output:
            raise NoTaskError("stopped" if ran.stopped else "raised")
        if len(output) > LONGEST:
            raise NoTaskError("too_long")
        try:
            literal(output)
        except ValueError:
            raise NoTaskError("not_plain") from None
    again, _ = await run_program(sandbox, proposal.program, [*reversed(inputs), *inputs])
    if not all(map(equal, again, [*reversed(outputs), *outputs])):
        raise NoTaskError("not_deterministic")
    if len(outputs) > 1 and len(set(outputs)) == 1:
        raise NoTaskError("constant")
    runs = any(result not in ("raised", "") for result in of_probes)
    return Executed(outputs, known_by(of_probes if runs else [proposal.program]))
