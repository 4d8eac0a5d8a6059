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

SRUN = f"""#!{sys.executable}
import os, sys, subprocess
rest, options = sys.argv[1:], {{}}
while rest and rest[0].startswith("--"):
    name, _, value = rest.pop(0)[2:].partition("=")
    options[name] = value
assert options["nodes"] == options["ntasks"] == options["kill-on-bad-exit"] == "1", options
with open(os.environ["FAKE_SRUN_LOG"], "a") as log:
    log.write(options["nodelist"] + "\\n")
kept = ("PATH", "HOME", "FAKE_SRUN_LOG")
everything = options["export"] != "NONE"
env = {{name: value for name, value in os.environ.items() if everything or name in kept}}
task = subprocess.Popen(rest, env={{**env, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}}, start_new_session=True)
code = task.wait()
if code:
    print(f"srun: error: {{options['nodelist']}}: task 0: exited with {{code}}", flush=True)
sys.exit(code if code >= 0 else 128 - code)
"""

SCONTROL = """#!/bin/sh
test "$1 $2" = "show hostnames" || exit 1
echo "$3" |
  sed 's/\\(.*\\)\\[\\(.*\\)-\\(.*\\)\\]/\\1 \\2 \\3/' |
  { read name first last && seq -f "$name%g" "$first" "$last"; }
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


def fake_slurm(folder: Path, patch: pytest.MonkeyPatch, machines: str = "gpu-[1-2]") -> Path:
    """An allocation of machines that are all this one. Returns a log of the machines that srun was called for."""
    fake(folder, "srun", SRUN, patch)
    fake(folder, "scontrol", SCONTROL, patch)
    patch.setenv("SLURM_JOB_NODELIST", machines)
    patch.setenv("FAKE_SRUN_LOG", str(folder / "called"))
    return folder / "called"


def fake_gpus(folder: Path, number: int, patch: pytest.MonkeyPatch) -> None:
    fake(folder, "nvidia-smi", DRIVER.replace("GPUS", str(number)), patch)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
