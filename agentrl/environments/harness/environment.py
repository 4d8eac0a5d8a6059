"""The environment ``harness``: a coding agent as it is works at a task in a sandbox, and the policy is its model. Tests
that it never saw decide, after it has ended."""

import asyncio
import json
import shlex
import warnings
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from agentrl.environments.agent import AgentEnd, AgentEnvironment, Endpoint
from agentrl.environments.base import Score, cut
from agentrl.environments.code.workspace import patch
from agentrl.environments.harness.box import ProgramEnd, ProgramRun, run_program
from agentrl.environments.harness.inside import PORT
from agentrl.environments.harness.profiles import PROFILES, AgentProfile, filled, of_command
from agentrl.environments.scripted import NoExpertError
from agentrl.environments.task_splits import Draft, draw
from agentrl.sandbox import Bubblewrap, ResourceLimits
from agentrl.sandbox.bubblewrap import WORKSPACE
from agentrl.sandbox.run import checked
from agentrl.schemas.annotations import External
from agentrl.schemas.hints import did_you_mean
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, Termination, ToolCall

LIMITS = ResourceLimits(cpu_s=3600, wall_s=3600, memory_mb=2048, processes=512, file_mb=64, disk_mb=256)
TEST_LIMITS = ResourceLimits(cpu_s=60, wall_s=120, memory_mb=1024, processes=128, file_mb=64, disk_mb=256)
SETUP_S = 300.0
LONGEST_DIFF = 100_000


def _split(value: Any) -> Any:
    return shlex.split(value) if isinstance(value, str) and value not in PROFILES else value


class HarnessTask(BaseModel):
    """What a task is, beside its prompt: a line of ``file``, or the metadata of an imported task."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    files: dict[str, str] = Field({}, description="path in the workspace -> text, over those of `folder`")
    tests: dict[str, str] = Field({}, description="name -> script that exits with 0 if the test passes")
    helpers: dict[str, str] = Field({}, description="files beside the tests that are no tests themselves")
    solution: list[str] = Field([], description="shell commands of an expert, one turn each")

    @field_validator("files", "tests", "helpers")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        for path in files:
            checked(path)
        return files


class TaskLine(HarnessTask):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str
    level: int = 1


class HarnessConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: Annotated[str | list[str], BeforeValidator(_split)] = Field(
        description="claude-code, codex, opencode, or a command, which finds the task on its standard input and the "
        "endpoint in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and AGENTRL_MODEL"
    )
    arguments: list[str] = Field([], description="more arguments of the agent, such as --bare of Claude Code")
    agents: str = Field("build/agents", description="folder in which the agent is installed, as `make agents` does")
    file: Annotated[str, External("file")] | None = Field(
        None, description="tasks as JSON Lines: prompt, files, tests, solution, level; None: tasks come by tasks.import"
    )
    folder: Annotated[str, External("file")] | None = Field(
        None, description="files that every workspace begins with; their content counts"
    )
    setup: str = Field("", description="shell command in the workspace before the agent begins")
    timeout: float = Field(900.0, gt=0, description="seconds of the agent")
    turns: int = Field(40, ge=1, description="turns of an episode, those of sub-agents and side calls included")
    at_once: int = Field(8, ge=1, description="agents that run at the same time")
    workspace_mb: int = Field(64, ge=1, description="size of a workspace that can be tested")
    sandbox: Bubblewrap = Field(Bubblewrap(limits=LIMITS), description="where the agent runs, and its limits")
    test_limits: ResourceLimits = Field(TEST_LIMITS, description="limits of each test, in a sandbox of its own")

    @field_validator("agent")
    @classmethod
    def _is_no_typo(cls, agent: str | list[str]) -> str | list[str]:
        if isinstance(agent, list) and not agent:
            raise ValueError("give claude-code, codex, opencode, or a command")
        if isinstance(agent, list) and len(agent) == 1 and (hint := did_you_mean(agent[0], PROFILES)):
            raise ValueError(f"{agent[0]!r} is no agent that is known here{hint}, or give a command with its arguments")
        return agent


class HarnessEnvironment(AgentEnvironment):
    """The environment; see the module's docstring."""

    name = "harness"
    version = "1"

    def __init__(self, config: HarnessConfig) -> None:
        """Raises ValueError if the agent is not installed, or if ``folder`` is no folder."""
        self.config = config
        self.max_steps, self.at_once = config.turns, config.at_once
        known = isinstance(config.agent, str)
        self.profile: AgentProfile = (
            PROFILES[config.agent] if isinstance(config.agent, str) else of_command(config.agent)
        )
        self._agents = Path(config.agents).expanduser().resolve()
        self.profile.command(self._agents)
        installed = self.profile.installed(self._agents)
        if installed and installed != self.profile.version:
            warnings.warn(
                f"{self._agents} has {config.agent} {installed}; {self.profile.version} was tried", stacklevel=2
            )
        readable = [*config.sandbox.readable, *([str(self._agents)] if known else [])]
        self._sandbox = config.sandbox.model_copy(update={"readable": tuple(readable)})
        self._base = _read_folder(Path(config.folder).expanduser()) if config.folder else {}

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Tasks of ``file`` for each split, none of them twice. Raises ValueError if there are not as many."""
        if self.config.file is None:
            raise ValueError("env harness draws tasks from `file`, and none is set; set it, or use tasks.import")
        lines = list(_lines(Path(self.config.file).expanduser()))
        levels: dict[int, int] = {}
        for line in lines:
            levels[line.level] = levels.get(line.level, 0) + 1

        def drafts(level: int, random: Random) -> Iterator[Draft]:
            for line in random.sample(lines, len(lines)):
                if line.level == level:
                    given = line.model_dump(exclude={"prompt", "level"})
                    steps = {"optimal_steps": len(line.solution) + 1} if line.solution else {}
                    key = json.dumps([line.prompt, given], sort_keys=True)
                    yield Draft(line.prompt, metadata={**given, **steps}, key=key)

        def finish(draft: Draft, task_id: str, split: str, level: int) -> Task:
            return draft.task(task_id, self.name, split, level, "[]", "tests")

        return draw(self.name, sizes, seed, {level: float(number) for level, number in levels.items()}, drafts, finish)

    async def run(self, task: Task, endpoint: Endpoint) -> AgentEnd:
        """Raises SandboxError, and RuntimeError if the set-up of the workspace fails."""
        about = HarnessTask.model_validate_json(task.metadata)
        before = {**self._base, **{path: text.encode() for path, text in about.files.items()}}
        url = f"http://127.0.0.1:{PORT}"
        values = {
            "base_url": f"{url}/v1",
            "anthropic_base_url": url,
            "api_key": endpoint.api_key,
            "model": endpoint.model,
            "workspace": WORKSPACE,
        }
        variables = {
            "OPENAI_BASE_URL": values["base_url"],
            "OPENAI_API_KEY": endpoint.api_key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": endpoint.api_key,
            "AGENTRL_MODEL": endpoint.model,
            **{name: filled(text, values) for name, text in self.profile.variables.items()},
        }
        command = [filled(part, values) for part in self.profile.command(self._agents)]
        ended = await run_program(
            self._sandbox,
            ProgramRun(
                command=[*command, *self.config.arguments],
                prompt=task.prompt,
                variables=variables,
                home={path: filled(text, values) for path, text in self.profile.files.items()},
                workspace=before,
                setup=self.config.setup,
                seconds=min(self.config.timeout, endpoint.seconds),
                setup_s=SETUP_S,
                most=self.config.workspace_mb << 20,
            ),
            endpoint.door,
        )
        if ended.setup_failed:
            raise RuntimeError(ended.setup_failed)
        return self._end(ended, await self._score(about, before, ended))

    def _end(self, ended: ProgramEnd, score: Score) -> AgentEnd:
        failure = "" if ended.lost or ended.timed_out else self.profile.failure(ended.printed)
        if not failure and ended.code and not (ended.lost or ended.timed_out):
            failure = "it failed"
        if failure:
            failure = f"the agent ended with code {ended.code}: {failure} {ended.complained.strip()[-300:]}".strip()
        stopped = Termination.TIME_LIMIT if ended.timed_out else None
        return AgentEnd(score, failure, stopped, (ended.lost,) if ended.lost else ())

    async def _score(self, about: HarnessTask, before: Mapping[str, bytes], ended: ProgramEnd) -> Score:
        """Each test is a component. Without tests the episode has a reward of 0, to which those of a stage are added,
        and succeeds if the agent ended. A workspace that is lost fails all tests."""
        state: dict[str, Any] = {
            "diff": cut(_diff(before, ended.files or {}), LONGEST_DIFF) if ended.files is not None else None
        }
        state |= {"code": ended.code, "seconds": round(ended.seconds, 2)}
        if not about.tests:
            finished = float(not (ended.lost or ended.timed_out))
            return Score(finished > 0, (RewardComponent(name="finished", value=finished, weight=0.0),), state)
        passed = await asyncio.gather(*(self._passes(name, about, ended.files) for name in about.tests))
        weight = 1.0 / len(passed)
        components = tuple(
            RewardComponent(name=name, value=float(ok), weight=weight)
            for name, ok in zip(about.tests, passed, strict=True)
        )
        return Score(all(passed), components, state)

    async def _passes(self, name: str, about: HarnessTask, files: Mapping[str, bytes] | None) -> bool:
        """Whether a test passes in a copy of the workspace, beside which are the files of all tests."""
        if files is None:
            return False
        given = {f"workspace/{path}": data for path, data in files.items()}
        given |= {"workspace/.keep": b""} if not files else {}
        given |= {f"tests/{path}": text.encode() for path, text in {**about.helpers, **about.tests}.items()}
        script = shlex.quote(f"../tests/{name}")
        shell = shlex.quote(self._sandbox.python) if name.endswith(".py") else "/bin/sh"
        ran = await self._sandbox.run(
            ["/bin/sh", "-c", f"cd workspace && {shell} {script}"], given, self.config.test_limits
        )
        return ran.ok

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """The commands of the task's ``solution``, each left out with probability ``noise``, and "Done."."""
        about = HarnessTask.model_validate_json(task.metadata)
        if self.profile.shell is None or not about.solution:
            what = (
                "its tasks have no solution" if self.profile.shell else "an agent of your own has no known shell tool"
            )
            raise NoExpertError(f"env {self.name!r} has no scripted expert here: {what}")
        tool, argument = self.profile.shell
        for number, command in enumerate(about.solution):
            if random.random() >= noise:
                call = ToolCall(id=f"call_{number}", name=tool, arguments=json.dumps({argument: command}))
                yield Message(role=Role.ASSISTANT, tool_calls=[call])
        yield Message(role=Role.ASSISTANT, content="Done.")


def _read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by their paths in it. Raises ValueError if it is no folder."""
    if not folder.is_dir():
        raise ValueError(f"folder: {folder} is no folder; give one with the files that every workspace begins with")
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _lines(path: Path) -> Iterator[TaskLine]:
    """The tasks of a JSON Lines file. Raises ValueError that names the line and what is wrong with it."""
    if not path.is_file():
        raise ValueError(f"file: there is no {path}; give tasks as JSON Lines")
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield TaskLine.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path}, line {number}: {where + ': ' if where else ''}{first['msg']}") from None


def _diff(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    """What the agent changed, as a unified diff. Files that are no text count as their size."""

    def texts(files: Mapping[str, bytes]) -> dict[str, str]:
        return {path: _text(data) for path, data in files.items() if not path.startswith(".git/")}

    return patch(texts(before), texts(after))


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"[{len(data)} bytes that are no text]"
