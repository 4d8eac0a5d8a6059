"""Whether the dialects of a pipeline's models do what its tasks need, proved before anything runs."""

import asyncio
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.pipelines.file.external import as_folder
from agentrl.pipelines.file.load import Node, ResolvedPipeline
from agentrl.pipelines.file.problems import Origin, Problem

if TYPE_CHECKING:
    from agentrl.chat.dialects import Trial
    from agentrl.environments.base import Environment
    from agentrl.pipelines.plan.plan import Plan


def proved(path: str, dialect: str | None = None) -> "Trial":
    """What becomes of conversations in the dialect of a model's tokenizer, in a folder or of a name on the Hugging Face
    hub; in ``dialect``, if one is chosen. Raises ValueError if no dialect fits, and OSError if there is no tokenizer.
    """
    from agentrl.chat.dialects import KEY, prove
    from agentrl.models.policy import load_tokenizer

    tokenizer = load_tokenizer(path)
    if dialect:
        tokenizer.init_kwargs[KEY] = dialect
    return prove(tokenizer)


def unspeakable(pipeline: ResolvedPipeline, to_run: list[Node]) -> Iterator[Problem]:
    """Problems of models from outside that are GGUF and cannot be read, or whose dialect cannot write tools though they
    act in tasks with tools. Names on the hub and environments that cannot be opened here are left to the stage that
    uses them."""
    origin = Origin(str(pipeline.path), None)
    for node in to_run:
        model: Any = getattr(node.config, "model", None)
        path = getattr(model, "path", None)
        if not path or not Path(path).expanduser().exists():
            continue
        try:
            folder = Path(as_folder(path, weights=False))
            if folder.is_file():
                raise ValueError(f"{path} is a file, and no GGUF; give a model folder, a GGUF or a name on the hub")
            cannot = _cannot(str(folder), model.dialect, _stamp(folder))
        except ValueError as error:
            yield Problem(f"stage {node.name}: with.model.path: {error}", origin)
            continue
        except (OSError, LookupError):
            continue
        if "tools" not in cannot:
            continue
        near = pipeline.ancestors(pipeline.downstream([node.name]))
        environments = {str(env) for name in near if (env := getattr(pipeline.nodes[name].config, "env", None))}
        for env in sorted(environments):
            if _has_tools(env, node.seed):
                yield Problem(
                    f"stage {node.name}: with.model.path: tasks of {env} have tools, and the dialect of {path} has no "
                    f"way with them: {cannot['tools']}; see `agentrl dialect {path}`",
                    origin,
                )


def cannot_know(plan: "Plan") -> list[str]:
    """What no plan finds, and only a run can: dialects of models that are no folders here, and what the workers of a
    pool have. Of the stages that would run."""
    unknowns = []
    for step in plan.to_run:
        path = getattr(getattr(step.node.config, "model", None), "path", None)
        if path and not Path(path).expanduser().exists():
            what = f"whether the dialect of {path} does what its tasks need"
            unknowns.append(f"stage {step.name}: {what}; see `agentrl dialect {path}`")
        if pool := step.node.execution.pool:
            unknowns.append(f"stage {step.name}: packages, variables and GPUs of the workers of pool {pool}")
    return unknowns


def _stamp(folder: Path) -> tuple[float, ...]:
    return tuple(
        sorted(file.stat().st_mtime for pattern in ("token*", "chat_template*") for file in folder.glob(pattern))
    )


@lru_cache(maxsize=32)
def _cannot(folder: str, dialect: str | None, stamp: tuple[float, ...]) -> dict[str, str]:
    return proved(folder, dialect).codec.cannot


def _has_tools(env: str, seed: int) -> bool:
    """Whether the first task of an environment has tools; False if it cannot be opened here."""
    from agentrl.environments import load_environment

    try:
        return asyncio.run(_first_tools(load_environment(env), seed)) not in ("", "[]")
    except Exception:  # an environment raises what it likes; the stage that uses it says so
        return False


async def _first_tools(environment: "Environment", seed: int) -> str:
    made: dict[str, Any] = environment.tasks({"train": 1, "dev": 0, "heldout": 0}, seed)
    first = next(task for tasks in made.values() for task in tasks)
    episode = await environment.reset(first)
    try:
        return episode.tools
    finally:
        await episode.close()
