"""Servers of a store as processes of their own, for notebooks: the viewer, and a model that agents ask."""

import html
import json
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

from agentrl.flows.terminal import say
from agentrl.schemas.installation import PACKAGE_ROOT


@dataclass(frozen=True)
class ServerProcess:
    """A process that serves until ``close`` or the end of this process."""

    url: str
    process: "Popen[str]"

    def __post_init__(self) -> None:
        weakref.finalize(self, self.process.terminate)

    def close(self) -> None:
        """End it as Ctrl-C does; what it holds is stored."""
        self.process.terminate()
        self.process.communicate(timeout=60)


@dataclass(frozen=True)
class View(ServerProcess):
    """A viewer that serves a store at ``url``. A notebook shows it inline, ``height`` pixels high."""

    height: int

    @classmethod
    def of(cls, store: str, height: int, write: bool, port: int) -> "View":
        """Raises RuntimeError with what the viewer said if it does not start."""
        notebooks = ("http://localhost:*", "http://127.0.0.1:*")  # where Jupyter and its like serve their pages
        options = [
            *(["--write"] if write else []),
            *(word for ancestor in notebooks for word in ("--frame-ancestors", ancestor)),
        ]
        answer, process = _started("view", "--store", store, "--port", str(port), *options)
        return cls(answer["url"], process, height)

    def _repr_html_(self) -> str:
        return f'<iframe src="{html.escape(self.url)}" width="100%" height="{self.height}" style="border:0"></iframe>'


@dataclass(frozen=True)
class ModelServer(ServerProcess):
    """A model that is served to agents, whose conversations become rows. ``url`` is the base URL for clients of OpenAI,
    and without its ``/v1`` for those of Anthropic; episodes are opened and scored at ``episodes``."""

    model: str
    episodes: str

    @classmethod
    def of(cls, store: str, model: str, port: int, api_key: str | None, options: dict[str, Any]) -> "ModelServer":
        """Raises RuntimeError with what the server said if it does not start."""
        key = {"AGENTRL_API_KEY": api_key} if api_key else {}
        answer, process = _started(
            "serve", "--model", model, "--record", store, "--port", str(port), *_words(options), environment=key
        )
        return cls(answer["base_url"], process, answer["model"], answer["episodes"])


def _words(options: dict[str, Any]) -> list[str]:
    """Options as the command takes them: ``idle_s=60`` is ``--idle-s 60``, a mapping is written as JSON."""
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words += [option, value if isinstance(value, str) else json.dumps(value)]
    return words


def _started(*arguments: str, environment: dict[str, str] | None = None) -> "tuple[dict[str, Any], Popen[str]]":
    """Begin a command that serves, and return what it says of itself once it does."""
    path = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # of this code
    process = Popen(
        [sys.executable, "-m", "agentrl.flows.cli", *arguments, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(path)},
    )
    assert process.stdout
    assert process.stderr
    lines = ""
    for line in process.stdout:
        lines += line
        if line != "}\n":  # an object takes several lines
            continue
        answer = json.loads(lines)
        if "url" in answer or "base_url" in answer:
            return answer, process
        say(": ".join(map(str, answer.values())), stderr=True)  # what became of episodes that were left open
        lines = ""
    raise RuntimeError(f"agentrl {arguments[0]} did not start: {process.stderr.read().strip()}")
