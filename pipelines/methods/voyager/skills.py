"""The stages of a library of skills: what successes have in common becomes skills, and tasks offer these as tools."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
from pydantic import Field, field_validator

from agentrl.datastore.search.embedding import EMBEDDED, EmbedderChoice
from agentrl.environments import ENVIRONMENT, EnvironmentChoice
from agentrl.environments.skilled import Skill, with_tools
from agentrl.pipelines.handles import NoteTable, Table, Tasks, Trajectories
from agentrl.pipelines.methods.voyager.again import MadeAgain, env_of, verified
from agentrl.pipelines.methods.voyager.induce import Induced, induced
from agentrl.pipelines.methods.voyager.retrieval import SkillTests, fitting, skill_of
from agentrl.pipelines.parts.common import count, environment, refuse_measured, warn_of_error
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.parts.in_context import check_training
from agentrl.pipelines.parts.stored_tasks import KnownTasks
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.choice import plain
from agentrl.schemas.note import Note, NoteScope
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, Trajectory

TRACEBACK = 2000
"""Characters of an environment's traceback that are shown."""
AS_IN = 3
"""Prompts of tasks that a skill's note names."""

TRIED = pa.schema(
    [
        pa.field("env", pa.string(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("calls", pa.int32(), nullable=False),
        pa.field("tasks", pa.int32(), nullable=False),
        pa.field("verified", pa.int32(), nullable=False),
        pa.field("failed", pa.int32(), nullable=False),
        pa.field("kept", pa.bool_(), nullable=False),
    ]
)
"""Skills that were tried: how many ``calls`` one stands for, the ``tasks`` of the rows that it was found in, how many
tasks it was used in that are solved again (``verified``) and not (``failed``), and whether it was kept."""


class SkillsConfig(StageConfig):
    longest: int = Field(4, ge=2, description="calls of a skill at most")
    support: int = Field(3, ge=1, description="tasks that a skill has to be found in, and to be verified on")
    n: int = Field(8, ge=1, description="skills of each environment that are tried, those first that save most calls")
    embedder: EmbedderChoice | None = Field(
        None, description="what makes vectors of the tests' prompts: minilm, a model's name or path; null: words"
    )

    @field_validator("embedder")
    @classmethod
    def _not_fitted(cls, value: str | None) -> str | None:
        if value == EMBEDDED:
            raise ValueError(f"{EMBEDDED} knows the words of the tests alone; leave it out, and words are compared")
        return value


class Skills(NamedTuple):
    notes: NoteTable
    trajectories: Trajectories
    tried: Table
    tests: Table


@stage("notes.skills", version=2)
def skills(
    context: Context,
    config: SkillsConfig,
    trajectories: list[Trajectories],
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
    notes: NoteTable | None = None,
    tests: Table | None = None,
) -> Skills:
    """A library of skills (Voyager: Wang et al. 2023, arXiv 2305.16291), induced from successes as in ASI (Wang et al.
    2025, arXiv 2504.06821): calls that rows of ``support`` tasks have in common but for their arguments. Each row is
    made again with skills in place of their calls, and a skill is kept if as many tasks are solved so, by their
    verifier's word. These are its ``tests``, by which it is retrieved. ``notes`` and ``tests`` are the library of
    rounds before: it stays, and it is counted how many rows call its skills (``trials``), and how many of these succeed
    (``wins``). The new rows are text, of tasks with all skills.

    Raises ValueError if a row is not of the train split, its task is not known, or a library lacks its tests.
    """
    if (notes is None) != (tests is None):
        raise ValueError("inputs: a library is notes and tests; give both outputs of notes.skills, or none")
    earlier = notes.read() if notes else []
    check_training(earlier)
    rows, calls = _successes(context, trajectories)
    known = KnownTasks(trajectories, tasks)
    library, made, table, errors = _counted(earlier, calls), list[Trajectory](), list[dict[str, object]](), list[str]()
    solved = _solved(tests, library, rows)
    for env in sorted({base_of(row.env) for row in rows}):
        environment(context, env)  # refused if no stage chose it
        own, before = [row for row in rows if base_of(row.env) == env], skills_of(library, env)
        names = [skill.name for skill in before]
        new = [skill for skill in induced(own, config.longest, config.support, names) if not _is_there(skill, before)]
        first, kept, again = verified(env, own, before, new[: config.n], config.support, known, context.progress)
        made, errors = made + again.rows, errors + again.errors
        table += [_line(env, skill, first, skill in kept) for skill in new[: config.n]]
        for skill in kept:
            verified_on = again.solved[skill.skill.name]
            library.append(_note(context.trajectory_id(len(library)), env, skill, verified_on))
            for row in own:
                if row.task_id in verified_on:
                    solved.add(env, row.task_id, row.prompt, [skill.skill.name])
    context.append([row.model_copy(update=_named(context, number)) for number, row in enumerate(made)])
    _count(context, config, rows, made, table, library, errors)
    tried = context.table(pa.Table.from_pylist(table, TRIED), "tried")
    tests_table = context.table(solved.table(config.embedder), "tests")
    return Skills(context.notes(library), context.select(), tried, tests_table)


def _count(
    context: Context,
    config: SkillsConfig,
    rows: Sequence[Trajectory],
    made: Sequence[Trajectory],
    table: Sequence[Mapping[str, object]],
    library: Sequence[Note],
    errors: Sequence[str],
) -> None:
    """The metrics of ``notes.skills``, and its warnings."""
    kept = sum(bool(line["kept"]) for line in table)
    context.metrics.update(
        successes=len(rows), rows=len(made), not_solved_again=len(rows) - len(made), tried=len(table)
    )
    context.metrics.update(kept=kept, skills=len(library))
    count(context, {"env_error": len(errors)} if errors else {})
    warn_of_error(next(iter(errors), "")[-TRACEBACK:])
    if rows and not library:
        warnings.warn(
            f"there is no skill: {len(table)} were tried; rows of {config.support} tasks have to make the same calls, "
            "two or more in turns one after the other, and to succeed with the skill in their place",
            stacklevel=2,
        )


def _solved(tests: Table | None, library: Sequence[Note], rows: Sequence[Trajectory]) -> SkillTests:
    """The tests of rounds before, and the tasks of rows that call skills of the library."""
    solved = SkillTests()
    for test in tests.table().to_pylist() if tests else []:
        solved.add(test["env"], test["task_id"], test["prompt"], test["skills"])
    names = {(note.env, skill_of(note).name) for note in library}
    for row in rows:
        env = base_of(row.env)
        called = [call.name for message in row.messages for call in message.tool_calls if (env, call.name) in names]
        if called:
            solved.add(env, row.task_id, row.prompt, called)
    return solved


class WithSkillsConfig(StageConfig):
    env: EnvironmentChoice = Field("skilled", validate_default=True, description="what runs skills")
    k: int | None = Field(
        5, ge=1, description="skills that each task is offered, those that solved the tasks most like it; null: all"
    )


@stage("tasks.with_skills", version=2)
def with_library(context: Context, config: WithSkillsConfig, tasks: Tasks, notes: NoteTable, tests: Table) -> Tasks:
    """The tasks, with skills among their tools (Voyager retrieves the 5 that fit best): of those of their environment
    the ``k`` that solved most of the tests whose prompts are nearest, by their vectors if the library has an embedder
    and else by their words. Held-out tasks may be given: skills come from train rows alone.

    Raises ValueError if the embedder is not the one that made the library's vectors."""
    library, given, rows = notes.read(), tasks.read(), tests.table().to_pylist()
    check_training(library)
    made, counts = dict[int, Task](), Counter[str](offered=0, without=0)
    for base in dict.fromkeys(base_of(task.env) for task in given):
        own = {number: task for number, task in enumerate(given) if base_of(task.env) == base}
        known = [note for note in library if note.env == base]
        env = env_of(base, map(skill_of, known))
        prompts = [task.prompt for task in own.values()]
        offered = fitting(known, [row for row in rows if row["env"] == base], prompts, config.k)
        for (number, task), chosen in zip(own.items(), offered, strict=True):
            counts.update(offered=len(chosen), without=not chosen)
            made[number] = with_tools(task, chosen).model_copy(update={"env": env if chosen else task.env})
    context.metrics.update(tasks=len(made), **counts)
    if made and counts["without"] == len(made):
        warnings.warn("no task has a skill: the notes hold none of their environments", stacklevel=2)
    return context.tasks([made[number] for number in sorted(made)])


def base_of(env: str) -> str:
    """An environment without its skills, as tasks name it."""
    return str(ENVIRONMENT.read(env).values()["env"]) if plain(env) == "skilled" else env


def skills_of(notes: Iterable[Note], env: str) -> list[Skill]:
    return [skill_of(note) for note in notes if note.env == env]


def _successes(
    context: Context, trajectories: Sequence[Trajectories]
) -> tuple[list[Trajectory], Mapping[tuple[str, str], tuple[int, int]]]:
    """Whole rows that succeeded, each once, and by environment and tool how many rows call it, and how many of these
    succeed. The metrics count what was left out, by reason."""
    rows, left_out = dict[str, Trajectory](), Counter[str]()
    trials, wins = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row in rows_of(trajectories):
        names = {(base_of(row.env), call.name) for message in row.messages for call in message.tool_calls}
        trials.update(names)
        wins.update(names if row.success else ())
        reason = "not_successes" if not row.success else "not_trained" if NOT_TRAINED in row.tags else ""
        reason = reason or ("part_of_episode" if row.segment or row.agent != "main" else "")
        left_out.update([reason] if reason else [])
        if not reason:
            rows[row.trajectory_id] = row
    refuse_measured({name: row.split for name, row in rows.items()})
    count(context, left_out)
    return list(rows.values()), {name: (trials[name], wins[name]) for name in trials}


def _counted(notes: Sequence[Note], calls: Mapping[tuple[str, str], tuple[int, int]]) -> list[Note]:
    """Skills of rounds before, with the rows that call them now."""
    counted = []
    for note in notes:
        trials, wins = calls.get((note.env, skill_of(note).name), (0, 0))
        counted.append(note.model_copy(update={"trials": note.trials + trials, "wins": note.wins + wins}))
    return counted


def _is_there(skill: Induced, library: Sequence[Skill]) -> bool:
    """Whether a skill does what another one does under its name."""
    code = (skill.skill.calls, skill.skill.parameters)
    return any((other.calls, other.parameters) == code for other in library)


def _line(env: str, skill: Induced, again: MadeAgain, kept: bool) -> dict[str, object]:
    name = skill.skill.name
    counts = {"verified": len(again.solved[name]), "failed": len(again.failed[name])}
    return {"env": env, "name": name, "calls": len(skill.shape), "tasks": len(skill.tasks), **counts, "kept": kept}


def _note(note_id: str, env: str, skill: Induced, verified_on: set[str]) -> Note:
    """A skill in the library. Its text says what it does, and names prompts of tasks that it was in."""
    prompts = dict.fromkeys(run.row.prompt for run in skill.runs if run.row.task_id in verified_on)
    as_in = "; ".join(list(prompts)[:AS_IN])
    return Note(
        note_id=note_id,
        scope=NoteScope.SKILL,
        task_id=None,
        env=env,
        split="train",
        text=f"{skill.skill.name}({', '.join(skill.skill.parameters)}): {skill.skill.description} As in: {as_in}",
        code=skill.skill.model_dump_json(exclude_unset=True),
        made_from=skill.runs[0].row.trajectory_id,
        by="induction",
        trials=len(verified_on),
        wins=len(verified_on),
    )


def _named(context: Context, number: int) -> dict[str, str]:
    name = context.trajectory_id(number)
    return {"trajectory_id": name, "episode_id": name}
