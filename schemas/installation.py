"""What to install if an optional package is missing. It is in ``schemas``, because the learning code and the data tools
both need it and import nothing else in common."""

import hashlib
import importlib.util
import os
import shlex
import sys
from pathlib import Path

import agentrl

DISTRIBUTION = "agentrl-engine"
"""What this is called among installed packages; ``agentrl`` on the package index is another project."""

PACKAGE_ROOT = Path(agentrl.__file__).resolve().parents[1]
"""The folder that holds ``agentrl``: a checkout, or where packages are installed."""


def python_path() -> str:
    """``PYTHONPATH`` of a process that runs our code, and classes of the user's."""
    return os.pathsep.join(filter(None, [str(PACKAGE_ROOT), *sys.path]))


def leave_checkout() -> None:
    """Take a checkout off the module path, if the program does not run in it. Processes that we start have it there to
    find ``agentrl`` (:func:`python_path`), which is imported by now, and Python would take its ``schemas`` for a folder
    of the user's of this name that has no ``__init__.py``."""
    if (PACKAGE_ROOT / "schemas").is_dir() and Path.cwd().resolve() != PACKAGE_ROOT:
        sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != PACKAGE_ROOT]


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def install_hint(extra: str) -> str:
    """The command that installs an extra.

    In a checkout it is the command of the README, with our pins. Elsewhere it names the installed distribution, whose
    release pip keeps: it adds what the extra requires.
    """
    if (PACKAGE_ROOT / "pyproject.toml").is_file() and (PACKAGE_ROOT / "constraints.txt").is_file():
        here = Path.cwd() == PACKAGE_ROOT
        pins, source = ("constraints.txt", ".") if here else (str(PACKAGE_ROOT / "constraints.txt"), str(PACKAGE_ROOT))
        return shlex.join(["pip", "install", "-c", pins, "-e", f"{source}[{extra}]"])
    return shlex.join(["pip", "install", f"{DISTRIBUTION}[{extra}]"])


def missing(package: str, extra: str) -> str:
    """Empty if a package is installed, else what an error says about it."""
    return "" if is_installed(package) else f"{package} is not installed: {install_hint(extra)}"


def code_digest(*packages: str) -> str:
    """A short digest of the code of these packages of ours, without any of all: equal on machines with the same
    code."""
    ours = PACKAGE_ROOT / "agentrl"
    digest = hashlib.sha256()
    for name in packages or sorted(path.name for path in ours.iterdir() if path.is_dir()):
        for path in sorted((ours / name).rglob("*.py")):
            digest.update(f"{path.relative_to(ours)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
