"""A Python interpreter as a tool (ReTool: Feng et al. 2025), for any episode of a family.

class MyEpisode(Interpreter, ToolEpisode["MyFamily"]):
    @property
    def sandbox(self) -> Sandbox:
        return self.family.config.sandbox
"""

from agentrl.environments.base import Observation, cut
from agentrl.environments.tools import tool
from agentrl.sandbox import ResourceLimits, Sandbox

LIMITS = ResourceLimits(cpu_s=5, wall_s=20, memory_mb=256, processes=16, file_mb=4, disk_mb=16, output_kb=64)
LONGEST = 2_000
"""Characters of what a program prints."""

EXECUTE = """
import _ast, sys

with open("code.py") as file:
    source = file.read()
names = {"__name__": "__main__"}
line = 0
try:
    *before, last = compile(source, "code.py", "exec", _ast.PyCF_ONLY_AST).body or [_ast.Pass()]
    for part in before:
        line = part.lineno
        exec(compile(_ast.Module([part], []), "code.py", "exec"), names)
    line = getattr(last, "lineno", 0)
    if isinstance(last, _ast.Expr):
        value = eval(compile(_ast.Expression(last.value), "code.py", "eval"), names)
        if value is not None:
            print(value)
    elif not isinstance(last, _ast.Pass):
        exec(compile(_ast.Module([last], []), "code.py", "exec"), names)
except Exception as error:
    where = f" (line {line})" if line else ""
    print(f"{type(error).__name__}: {error}{where}")
    sys.exit(1)
"""
"""Runs the statements, and prints the value of the last one if it is an expression. It imports what Python has loaded
already, since other modules, ``ast`` among them, take as long to load as Python takes to start."""


async def executed(sandbox: Sandbox, code: str) -> Observation:
    """What a program prints, and the value of its last expression. If it fails, the observation is an error."""
    files = {"run.py": EXECUTE.encode(), "code.py": code.encode("utf-8", "replace")}
    ran = await sandbox.run([sandbox.python, "-I", "-S", "run.py"], files)
    output = cut(ran.stdout.decode(errors="replace").strip(), LONGEST)
    if ran.stopped:
        output = f"{output}\nstopped: too much {ran.stopped.replace('_', ' ')}".strip()
    elif not output:
        output = "no output; print what you want to see" if ran.ok else f"ended with exit code {ran.code}"
    return Observation(output, error=not ran.ok)


class Interpreter:
    """The tool ``python``, for an episode whose family derives from it first."""

    @property
    def sandbox(self) -> Sandbox:
        """Where programs run."""
        raise NotImplementedError

    @tool
    async def python(self, code: str) -> Observation:
        """Run a Python program. Returns what it prints, and the value of its last line. Each call starts afresh.

        code: the program
        """
        return await executed(self.sandbox, code)
