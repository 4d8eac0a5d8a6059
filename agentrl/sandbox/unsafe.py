"""No sandbox: a temporary folder and time limits, for machines that have nothing better and code that is trusted."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from agentrl.sandbox.run import LocalPrograms, Ran, ResourceLimits, archive, attended, checked, kill, room


class Unsafe(LocalPrograms):
    """Runs programs as the user who runs agentrl. They can read and write what that user can, and use the network; only
    time, output, and the size of a file are limited. Environment variables are not handed on."""

    type: Literal["unsafe"] = "unsafe"

    async def run(
        self, command: Sequence[str], files: Mapping[str, bytes], limits: ResourceLimits | None = None
    ) -> Ran:
        """Run a command in a temporary folder with these files."""
        limits = limits or self.limits
        with tempfile.TemporaryDirectory(prefix="agentrl-unsafe-") as folder, archive({}) as nothing:
            for path, content in files.items():
                file = Path(folder, checked(path))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            # one limit each, since dash takes no more
            limited = f"ulimit -S -t {limits.cpu_s}; ulimit -H -t {limits.cpu_s + 1}; ulimit -c 0; "
            limited += f"ulimit -f {limits.file_mb * 2048}"
            shell = f'{limited}; cd "$1" && shift && exec "$@" </dev/null'
            environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "PYTHONHASHSEED": "0"}
            async with room():
                return await attended(
                    ["/bin/sh", "-c", shell, "sh", folder, *command], nothing, limits, environment, kill
                )
