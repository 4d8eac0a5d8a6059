"""Stand-ins for what this machine lacks: `ssh` to machines that are all this one, and NVIDIA's driver."""

import os
import sys
from pathlib import Path

import pytest

SSH = f"""#!{sys.executable}
import os, sys, subprocess
options, rest = [], sys.argv[1:]
while rest and rest[0] == "-o":
    options.append(rest[1])
    rest = rest[2:]
host, command = rest
assert "BatchMode=yes" in options
with open(os.environ["FAKE_SSH_LOG"], "a") as log:
    log.write(host + "\\n")
if host == "gone":
    sys.exit("ssh: connect to host gone port 22: Connection refused")
clean = {{name: os.environ[name] for name in ("PATH", "HOME", "FAKE_SSH_LOG") if name in os.environ}}
os.execve("/bin/sh", ["sh", "-c", command], clean)
"""

DRIVER = """#!/bin/sh
case "$1" in
  *index*) i=0; while [ $i -lt GPUS ]; do echo $i; i=$((i+1)); done ;;
  *memory.total*) i=0; while [ $i -lt GPUS ]; do echo 81559; i=$((i+1)); done ;;
esac
"""


def fake(folder: Path, name: str, text: str, patch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def fake_ssh(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Every machine is this one, with hardly any environment, as over ssh. Returns a log of the machines called."""
    fake(folder, "ssh", SSH, patch)
    patch.setenv("FAKE_SSH_LOG", str(folder / "called"))
    return folder / "called"


def fake_gpus(folder: Path, number: int, patch: pytest.MonkeyPatch) -> None:
    fake(folder, "nvidia-smi", DRIVER.replace("GPUS", str(number)), patch)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
