"""Where untrusted code runs: a program gets files and limits, and gives back its output and its exit code.

    ran = await Bubblewrap().run([sandbox.python, "main.py"], {"main.py": b"print(1)"})

Every run starts afresh: the files are written into an empty folder in memory, and nothing of it stays.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from agentrl.sandbox.bubblewrap import Bubblewrap
from agentrl.sandbox.docker import Docker
from agentrl.sandbox.run import Ran, ResourceLimits, SandboxError
from agentrl.sandbox.unsafe import Unsafe


def _by_name(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


Sandbox = Annotated[Bubblewrap | Docker | Unsafe, Field(discriminator="type"), BeforeValidator(_by_name)]
"""Type of a config field that chooses a sandbox, by name or with settings: ``{type: docker, image: "python:3.12"}``."""

__all__ = ["Bubblewrap", "Docker", "Ran", "ResourceLimits", "Sandbox", "SandboxError", "Unsafe"]
