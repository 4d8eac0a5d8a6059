"""One run of an agent program in a sandbox, with a workspace of its own and a door to its episode, and nothing else."""

import inspect
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.environments.harness import inside
from agentrl.sandbox import Bubblewrap, Ran, ResourceLimits, SandboxError
from agentrl.sandbox.bubblewrap import DOOR, FOLDER, WORKSPACE
from agentrl.sandbox.run import checked

HOME = f"{FOLDER}/home"
_MORE_S = 60.0  # for copying files in and out
_SET_UP_FAILED = 125  # the exit code of a sandbox that could not be made


@dataclass(frozen=True)
class ProgramRun:
    """What an agent program is started with. ``variables`` are added to its environment, ``home`` are files of its home
    folder. It has ``seconds``, and ``setup``, a shell command before it, has ``setup_s``. At most ``most`` bytes of the
    workspace come back."""

    command: Sequence[str]
    prompt: str
    variables: Mapping[str, str]
    home: Mapping[str, str]
    workspace: Mapping[str, bytes]
    setup: str
    seconds: float
    setup_s: float
    most: int


@dataclass(frozen=True)
class ProgramEnd:
    """How it ended: its exit ``code``, the ends of what it ``printed`` and complained of, and the files of the
    workspace. ``files`` is None if there are none to be had: ``lost`` says why."""

    code: int
    printed: str = ""
    complained: str = ""
    timed_out: bool = False
    files: Mapping[str, bytes] | None = None
    lost: str = ""
    seconds: float = 0.0
    setup_failed: str = ""


async def run_program(sandbox: Bubblewrap, program: ProgramRun, door: Path) -> ProgramEnd:
    """Run an agent program to its end. When this returns, or is cancelled, nothing of it runs any more. Raises
    SandboxError if there is no sandbox here."""
    python = Path(sandbox.python).parent
    settings = {
        "command": list(program.command),
        "env": {
            "HOME": HOME,
            "LANG": "C.UTF-8",
            "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            **program.variables,
        },
        "workspace": WORKSPACE,
        "door": DOOR,
        "setup": program.setup,
        "setup_s": program.setup_s,
        "seconds": program.seconds,
        "most": program.most,
    }
    files = {
        "inside.py": inspect.getsource(inside).encode(),
        "settings.json": json.dumps(settings).encode(),
        "prompt": program.prompt.encode(),
        "home/.keep": b"",
        **{f"home/{path}": text.encode() for path, text in program.home.items()},
        **{f"workspace/{path}": data for path, data in program.workspace.items()},
    }
    wall = program.seconds + _MORE_S + (program.setup_s if program.setup else 0.0)
    given = sandbox.limits
    more = {"wall_s": wall, "cpu_s": max(given.cpu_s, int(wall) + 1), "output_kb": 2 * program.most // 1024 + 1024}
    limits = ResourceLimits(**{**given.model_dump(), **more})
    ran = await sandbox.run([sandbox.python, "-I", "-S", "inside.py"], files, limits, door)
    if ran.code == _SET_UP_FAILED and not ran.stdout:
        raise SandboxError(
            f"the agent's sandbox could not be made: {ran.stderr.decode(errors='replace').strip()[-300:]}"
        )
    return _read(ran)


def _read(ran: Ran) -> ProgramEnd:
    """What a run handed back. What ended the sandbox before that, it did itself, or a limit did."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(ran.stdout)) as tar:
            for member in tar:
                content = tar.extractfile(member)
                if content is not None:
                    files[checked(member.name)] = content.read()
        report = json.loads(files.pop(inside.REPORT))
        setup, agent = report.get("setup"), report.get("agent")
        if agent is None:
            output = (setup["stdout"] + setup["stderr"]).strip()[-300:]
            return ProgramEnd(setup["code"] or 0, setup_failed=f"setup ended with code {setup['code']}: {output}")
        too_large = bool(report["too_large"])
        return ProgramEnd(
            code=int(agent["code"] if agent["code"] is not None else -9),
            printed=str(agent["stdout"]),
            complained=str(agent["stderr"]),
            timed_out=bool(agent["timed_out"]),
            files=None if too_large else {path.removeprefix("workspace/"): data for path, data in files.items()},
            lost="workspace_too_large" if too_large else "",
            seconds=float(agent["seconds"]),
        )
    except (tarfile.TarError, KeyError, ValueError, TypeError, AttributeError, EOFError):
        why = ran.stopped or f"code_{ran.code}"
        complained = ran.stderr.decode(errors="replace")[-1000:]
        return ProgramEnd(ran.code, complained=complained, timed_out=ran.stopped == "wall_time", lost=f"stopped:{why}")
