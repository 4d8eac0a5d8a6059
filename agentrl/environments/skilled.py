"""``skilled``: another environment, whose tools include skills. A skill is a few calls under one name.

Its code is data, which needs no sandbox: each call is of a tool, or of another skill, and each argument of it a
parameter of the skill, what an earlier call returned, or a constant. A skill returns what its last call does. The first
call that the environment refuses ends it, and its answer says which.

Tasks of this environment are those of the other one, with tools that include the skills on offer; they are made by the
stage ``tasks.with_skills``.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.environments.adapted import protocol
from agentrl.environments.agent import AgentEnvironment
from agentrl.environments.base import MAX_STEPS, Environment, Episode, Score, Step, tool_message
from agentrl.environments.hosts import Threads
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall

DEEPEST = 8
"""Skills within skills."""


class Argument(BaseModel):
    """Where an argument comes from: one of these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parameter: str | None = Field(None, description="a parameter of the skill")
    call: int | None = Field(None, ge=0, description="the answer of an earlier call, from 0")
    value: Any = Field(None, description="a constant")

    @model_validator(mode="after")
    def _from_one(self) -> "Argument":
        if len(self.model_fields_set) != 1:
            raise ValueError("an argument has one of parameter, call and value")
        return self


class SkillCall(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: str = Field(description="a tool of the environment, or another skill")
    arguments: dict[str, Argument] = Field(
        {}, description="its arguments: each a parameter, a call's answer or a value"
    )


class Skill(BaseModel):
    """Some calls under one name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$", description="what policies call it by")
    description: str = Field(description="what policies are told of it")
    parameters: dict[str, dict[str, Any]] = Field({}, description="name -> JSON schema; all are required")
    calls: list[SkillCall] = Field(min_length=1, description="what it calls, one after the other")

    @model_validator(mode="after")
    def _arguments_are_known(self) -> "Skill":
        for number, call in enumerate(self.calls):
            for name, argument in call.arguments.items():
                if argument.parameter is not None and argument.parameter not in self.parameters:
                    known = ", ".join(self.parameters) or "none"
                    raise ValueError(f"calls.{number}.{name}: no parameter {argument.parameter!r}; there are {known}")
                if argument.call is not None and argument.call >= number:
                    raise ValueError(f"calls.{number}.{name}: call {argument.call} is not before it")
        return self

    def tool(self) -> dict[str, Any]:
        """The skill as a tool in OpenAI's form."""
        properties = {"type": "object", "properties": self.parameters, "required": list(self.parameters)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": properties},
        }


class SkilledEpisode:
    """An attempt, in which calls of skills become calls of an episode of the other environment. What is not said here,
    such as ``advise`` and ``snapshot``, is that episode's."""

    def __init__(self, skills: Mapping[str, Skill], inner: Episode) -> None:
        self.skills, self.inner = skills, inner
        self.opening = inner.opening
        own = json.loads(inner.tools)
        names = {entry["function"]["name"] for entry in own}  # some environments take the tools of their tasks
        self.tools = json.dumps([*own, *(skill.tool() for name, skill in skills.items() if name not in names)])

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # copies are made without it
            raise AttributeError(name)
        return getattr(self.inner, name)

    async def step(self, message: Message) -> Step:
        if not any(call.name in self.skills for call in message.tool_calls):
            return await self.inner.step(message)
        steps: list[Step] = []
        for call in message.tool_calls:
            steps.append(await self._called(call, message.content if not steps else ""))
            if steps[-1].done:
                break
        return _joined(steps)

    async def score(self) -> Score | None:
        return await self.inner.score()

    async def close(self) -> None:
        await self.inner.close()

    async def _called(self, call: ToolCall, content: str = "", depth: int = 0) -> Step:
        """What answers one call. A skill's answer is that of its last call, or of the first that is refused."""
        skill = self.skills.get(call.name)
        if skill is None:
            return await self.inner.step(Message(role=Role.ASSISTANT, content=content, tool_calls=[call]))
        given = call.parsed()
        if not isinstance(given, dict) or set(given) != set(skill.parameters) or depth == DEEPEST:
            takes = " and ".join(skill.parameters) or "nothing"
            why = "calls itself" if depth == DEEPEST else f"takes {takes}"
            return Step([tool_message(call, f"{skill.name} {why}", error=True)], info={"tool_errors": 1})
        steps: list[Step] = []
        for number, inner_call in enumerate(skill.calls):
            arguments = {name: _value(argument, given, steps) for name, argument in inner_call.arguments.items()}
            text = json.dumps(arguments, ensure_ascii=False)
            made = ToolCall(id=f"{call.id}.{number}", name=inner_call.tool, arguments=text)
            steps.append(await self._called(made, depth=depth + 1))
            if steps[-1].done or not steps[-1].messages or steps[-1].messages[0].error:
                break
        whole = _joined(steps)
        answers = [
            tool_message(call, f"{answer.name}: {answer.content}" if answer.error else answer.content, answer.error)
            for answer in steps[-1].messages[:1]
        ]
        return Step(answers, whole.reward, whole.done, whole.info)


def _value(argument: Argument, given: Mapping[str, Any], steps: Sequence[Step]) -> Any:
    if argument.parameter is not None:
        return given[argument.parameter]
    return argument.value if argument.call is None else steps[argument.call].messages[0].content


def _joined(steps: Sequence[Step]) -> Step:
    """Steps one after the other as one, with the sums of their rewards and numbers."""
    rewards = [step.reward for step in steps if step.reward is not None]
    names = {name: 0 for step in steps for name in step.info}
    info = {name: sum(step.info.get(name, 0) for step in steps) for name in names}
    messages = [message for step in steps for message in step.messages]
    return Step(messages, sum(rewards) if rewards else None, steps[-1].done, info)


class Skilled:
    """The environment; see the module's docstring. What is not said here, such as ``goal`` and ``vary``, is that of the
    other one, and so is its name."""

    name = "skilled"

    def __init__(
        self,
        env: Annotated[str, Field(description="the other environment, as tasks name it")] = "",
        skills: Annotated[list[Skill], Field(description="its skills")] = [],  # noqa: B006  (it is never changed)
    ) -> None:
        from agentrl.environments import load_environment

        if not env:
            raise ValueError("tasks of skilled are those of another environment; make them by tasks.with_skills")
        other = load_environment(env)
        if isinstance(other, AgentEnvironment):
            raise ValueError(
                f"env {env!r} is an agent program, which has tools of its own: skills are for calls of ours"
            )
        self._host = Threads(16)
        self.inner: Environment = protocol(other, self._host)
        self.name, self.version = self.inner.name, f"{self.inner.version}+skills"
        self.max_steps: int = getattr(self.inner, "max_steps", MAX_STEPS)
        self.skills = {skill.name: skill for skill in skills}

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(getattr(self.inner, "plain", self.inner), name)

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Those of the other environment, each with all skills."""
        made = self.inner.tasks(sizes, seed)
        return {split: [with_tools(task, self.skills.values()) for task in tasks] for split, tasks in made.items()}

    async def reset(self, task: Task) -> SkilledEpisode:
        names = {entry["function"]["name"] for entry in json.loads(task.tools)}
        inner = await self.inner.reset(task)
        return SkilledEpisode({name: skill for name, skill in self.skills.items() if name in names}, inner)

    async def close(self) -> None:
        close = getattr(getattr(self.inner, "plain", self.inner), "close", None)
        await self._host.close()
        if close is not None:
            await close()


def with_tools(task: Task, skills: Iterable[Skill]) -> Task:
    """A task whose tools include skills; those that it offers already stay. Raises ValueError if another tool of it has
    the name of one."""
    tools = json.loads(task.tools)
    known = {entry["function"]["name"]: entry for entry in tools}
    for skill in skills:
        entry = skill.tool()
        if known.setdefault(skill.name, entry) != entry:
            raise ValueError(f"skill {skill.name!r} has the name of a tool of task {task.task_id}; rename it")
    return task.model_copy(update={"tools": json.dumps(list(known.values()))})
