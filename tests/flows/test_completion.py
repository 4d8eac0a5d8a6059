"""``agentrl --version``, and completion as bash does it."""

import subprocess
import sys
from pathlib import Path

import pytest

import agentrl

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose ``agentrl`` is this checkout's."""
    script = tmp_path / "bin" / "agentrl"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m agentrl.flows.cli "$@"\n')
    script.chmod(0o755)
    path = f"{script.parent}:/usr/bin:/bin"
    return {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "SHELL": "/bin/bash"}


def bash(text: str, env: dict[str, str]) -> str:
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=env, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_the_packages(shell: dict[str, str]) -> None:
    assert bash("agentrl --version", shell) == f"agentrl {agentrl.__version__}\n"


COMPLETE = """
source "$HOME/.bashrc"
COMP_WORDS=({words}); COMP_CWORD={last}
_agentrl_completion agentrl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_bash_completes_commands_and_options_once_installed(shell: dict[str, str]) -> None:
    text = bash("agentrl --install-completion; true", shell)
    assert "bash completion installed" in text
    for words, last, expected in (
        ("agentrl pl", 1, {"plan"}),
        ("agentrl buffer qu", 2, {"query", "quarantine"}),
        ("agentrl plan quickstart --pl", 3, {"--placement"}),
    ):
        assert set(bash(COMPLETE.format(words=words, last=last), shell).split()) == expected


def test_the_script_that_completion_shows_is_bashs(shell: dict[str, str]) -> None:
    shown = bash("agentrl --show-completion; true", shell)
    assert "complete -o default -F _agentrl_completion agentrl" in shown
    assert shown.count("_AGENTRL_COMPLETE=complete_bash") == 1
