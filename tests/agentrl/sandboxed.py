"""Programs in a sandbox with small limits."""

import textwrap

from agentrl.engines.blocking import blocking
from agentrl.sandbox import Bubblewrap, Ran, ResourceLimits, Sandbox

SMALL = ResourceLimits(cpu_s=1, wall_s=60, memory_mb=64, processes=16, file_mb=4, disk_mb=16, output_kb=16)
HERE = Bubblewrap(limits=SMALL)


def python(source: str, *arguments: str, limits: ResourceLimits = SMALL, sandbox: Sandbox = HERE) -> Ran:
    """How a Python program ran."""
    files = {"main.py": textwrap.dedent(source).encode()}
    return blocking(sandbox.run([sandbox.python, "-I", "-S", "main.py", *arguments], files, limits))
