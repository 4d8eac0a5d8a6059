"""Every extra: what needs it is refused without it by a line that names it, and works once that is installed.

Unmarked, one process tries all programs of ``extra_cases.py`` where the packages of no extra can be imported. Marked
``extras`` (``make test-extras``), the wheel is installed into an environment of its own; for each extra another one is
laid over it, in which the program is refused, then what the refusal says is installed, and then it works.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from extra_cases import CASES, PRELUDE, TOOLS
from test_one_name import build
from xxhash import xxh3_64_hexdigest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

BLOCK = """
import sys
from importlib.machinery import PathFinder

class Lean(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {%s} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Lean
"""

ALL = """
import contextlib, io, traceback
said = {}
for extra, program in json.loads(sys.stdin.read()).items():
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            exec(program)
        except BaseException:
            traceback.print_exc()
    said[extra] = text.getvalue()
print(json.dumps(said))
"""


def refusal(extra: str) -> str:
    """What an error says to install, in a checkout or where a wheel is installed."""
    return rf"pip install [^\n]*\[{extra}\]'"


@pytest.fixture(scope="module")
def prelude(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a tokenizer that ``renderers`` knows, and a model of llama.cpp."""
    pytest.importorskip("trl")
    from tiny_gguf import write

    from benchmarks.chat_families import tokenizer_of

    folder = tmp_path_factory.mktemp("models")
    tokenizer_of("qwen3").save_pretrained(folder / "qwen3")
    write(folder / "tiny.gguf")
    names = {"TESTS": str(TESTS), "QWEN3": str(folder / "qwen3"), "GGUF": str(folder / "tiny.gguf")}
    return "\n".join([PRELUDE, *(f"{name} = {value!r}" for name, value in names.items()), ""])


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory, prelude: str) -> dict[str, str]:
    """What each program says where the packages of no extra can be imported."""
    folder = tmp_path_factory.mktemp("lean")
    blocked = ", ".join(sorted({repr(module) for case in CASES.values() for module in case.blocked}))
    (folder / "sitecustomize.py").write_text(BLOCK % blocked)
    done = subprocess.run(
        [sys.executable, "-c", prelude + ALL],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        input=json.dumps({extra: case.program for extra, case in CASES.items()}),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_extra_has_a_program() -> None:
    assert sorted(EXTRAS) == sorted([*CASES, *TOOLS])


@pytest.mark.parametrize("extra", CASES)
@pytest.mark.slow
@pytest.mark.ci
def test_what_needs_an_extra_is_refused_by_a_line_that_names_it(refused: dict[str, str], extra: str) -> None:
    assert re.search(refusal(extra), refused[extra]), refused[extra]
    assert CASES[extra].says not in refused[extra]


@pytest.fixture(scope="session")
def base() -> Path:
    """The folder of an environment with the wheel of this checkout and what that requires, and nothing more. It is kept
    in EXTRAS_VENV, and made anew if a requirement changes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = ROOT / "constraints.txt"
    home = Path(os.environ.get("EXTRAS_VENV", ROOT / ".venv-extras"))
    state = home / xxh3_64_hexdigest(f"{sys.version} {project['dependencies']} {pins.read_text()}".encode())
    if not state.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True, symlinks=True)
    shutil.rmtree(home / "wheel", ignore_errors=True)
    wheel = build(home / "wheel")
    install = [str(home / "bin/python"), "-m", "pip", "install", "-q", "-c", str(pins)]
    subprocess.run([*install, str(wheel)], check=True)
    subprocess.run([*install, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    state.touch()
    return home


def over(base: Path, folder: Path) -> Path:
    """The interpreter of an environment of its own, in which the packages of another one can be imported too."""
    venv.create(folder, with_pip=False, symlinks=True)
    paths = [Path(sysconfig.get_path("purelib", vars={"base": str(home)})) for home in (folder, base)]
    (paths[0] / "base.pth").write_text(str(paths[1]))
    return folder / "bin/python"


def called(python: Path, folder: Path, program: str) -> tuple[int, str]:
    """Exit code and output of a program, in a folder outside the checkout."""
    outside = {"PYTHONPATH", "VIRTUAL_ENV"}
    env = {key: value for key, value in os.environ.items() if key not in outside and not key.startswith("PREFECT_")}
    env |= {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200"}
    env |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    (folder / "program.py").write_text(program)
    done = subprocess.run(
        [python, "program.py"], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def install(base: Path, python: Path, *what: str) -> None:
    command = [str(base / "bin/python"), "-m", "pip", "--python", str(python), "install", "-q"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # which may name another agentrl
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *what], check=True, env=env)


@pytest.mark.extras
@pytest.mark.parametrize("extra", CASES)
def test_a_program_works_with_the_wheel_and_the_extra_that_it_asks_for(
    base: Path, prelude: str, tmp_path: Path, extra: str
) -> None:
    case = CASES[extra]
    python = over(base, tmp_path / "venv")
    code, text = called(python, tmp_path, prelude + case.program)
    assert case.says not in text
    hint = re.search(refusal(extra), text)
    assert hint, text
    install(base, python, *shlex.split(hint[0])[2:])
    code, text = called(python, tmp_path, prelude + case.program)
    assert case.says in text
    assert code == 0


@pytest.mark.extras
@pytest.mark.parametrize("extra", TOOLS)
def test_tools_of_the_house_are_installed_by_their_extra(base: Path, prelude: str, tmp_path: Path, extra: str) -> None:
    python = over(base, tmp_path / "venv")
    install(base, python, f"agentrl-engine[{extra}]")
    code, text = called(python, tmp_path, prelude + TOOLS[extra])
    assert code == 0, text
