"""Programs in a sandbox with small limits, and attacks that every sandbox is tried with."""

import textwrap

from agentrl.engines.blocking import blocking
from agentrl.sandbox import Bubblewrap, Ran, ResourceLimits, Sandbox

SMALL = ResourceLimits(cpu_s=1, wall_s=60, memory_mb=64, processes=16, file_mb=4, disk_mb=16, output_kb=16)
HERE = Bubblewrap(limits=SMALL)

FORK_BOMB = """
    import os, time
    made = 0
    while True:
        try:
            if os.fork() == 0:
                time.sleep(60)
            made += 1
        except OSError:
            print(made, flush=True)
            break
"""
"""Prints how many processes it could make."""

FULL_DISK = """
    import sys
    folder = sys.argv[-1]
    written = number = 0
    try:
        while True:
            with open(f"{folder}/{number}", "wb") as file:
                for _ in range(3):
                    written += file.write(bytes(1 << 20))
            number += 1
    except OSError as error:
        print(error.errno, written >> 20)
"""
"""Writes into the folder that its last argument names; prints the number of the error and the MiB that it wrote."""


def python(source: str, *arguments: str, limits: ResourceLimits = SMALL, sandbox: Sandbox = HERE) -> Ran:
    """How a Python program ran."""
    files = {"main.py": textwrap.dedent(source).encode()}
    return blocking(sandbox.run([sandbox.python, "-I", "-S", "main.py", *arguments], files, limits))
