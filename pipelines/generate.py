"""Trying a model out: one episode, at a task of the store or as a conversation. Nothing is written."""

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.external import as_folder
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.results.lineage import find_artifact, lineage
from agentrl.schemas.manifest import Kind, Manifest
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.environments.conversation import Ask
    from agentrl.models.policy import Policy
    from agentrl.pipelines.parts.budget import SamplingConfig


def policy_of(catalog: Catalog, model: str) -> "tuple[Policy, Manifest | None]":
    """The policy of a model folder, of a GGUF or of an artifact with a model, and the artifact.

    Raises LookupError with a message for the user if there is none of them, and ValueError if it cannot be read.
    """
    from agentrl.models.policy import Policy

    path = Path(model).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        return Policy.load(as_folder(model), path.stem if path.is_file() else None), None
    manifest = find_artifact(catalog, model)
    return Policy.load(_model_folder(catalog, manifest, model), manifest.ingredients.stage), manifest


def model_path(catalog: Catalog, model: str) -> str:
    """The path of a model, or the folder of an artifact with a model; else the name itself, for the hub. Raises
    LookupError if an artifact has no model."""
    if (path := Path(model).expanduser()).exists():
        return str(path)
    try:
        manifest = find_artifact(catalog, model)
    except LookupError:
        if model.count("/") == 1:
            return model
        raise
    return str(_model_folder(catalog, manifest, model))


def _model_folder(catalog: Catalog, manifest: Manifest, name: str) -> Path:
    if "model" not in manifest.outputs:
        outputs = ", ".join(manifest.outputs)
        raise LookupError(f"{name} has no model; its outputs: {outputs}. Name a stage that trains, or a model folder")
    return catalog.local(manifest, manifest.outputs["model"].path)


def question(prompt: str) -> Task:
    """A prompt as the task of a conversation."""
    from agentrl.environments.conversation import Conversation

    return Task(task_id="conversation", env=Conversation.name, split="", prompt=prompt, ground_truth="null")


def find_task(catalog: Catalog, task_id: str, near: Manifest | None) -> Task:
    """A task by its id: from the tasks that a model was made from, else from the newest artifact that has it.

    Raises LookupError with a message for the user if no artifact has it.
    """
    below = lineage(catalog, near.ingredients.stage, near.fingerprint).walk() if near else ()
    known: list[str] = []
    for manifest in [*(node.manifest for node in below), *catalog.all()]:
        for output in manifest.outputs.values() if manifest else ():
            if output.kind is not Kind.TASKS:
                continue
            assert manifest is not None
            table = pq.read_table(catalog.local(manifest, output.path))
            matches = table.filter(pc.equal(table["task_id"], task_id)).to_pylist()
            if matches:
                return Task.model_validate(matches[0])
            known += table["task_id"].to_pylist()
    hint = did_you_mean(task_id, known) or f"; there are {', '.join(known[:3]) or 'no tasks'}, ..."
    raise LookupError(f"there is no task {task_id!r} in this store{hint}")


def generate(
    policy: "Policy", task: Task, sampling: "SamplingConfig", seed: int, ask: "Ask | None" = None
) -> Trajectory:
    """One episode of ``policy`` at ``task``. A task of env ``conversation`` goes on as long as ``ask`` answers.

    Raises ValueError if the environment is not known, or the prompt does not fit.
    """
    from agentrl.engines.configs import DEFAULT_ENGINE
    from agentrl.environments import load_environment
    from agentrl.environments.base import Environment
    from agentrl.environments.conversation import Conversation
    from agentrl.pipelines.parts.budget import check_room
    from agentrl.rollouts.runner import Attempt, Limits, RolloutRunner

    talk = task.env == Conversation.name
    environment: Environment = Conversation(ask) if talk else load_environment(task.env)
    limits = Limits(tool_s=86_400.0, episode_s=86_400.0) if talk else Limits()  # a user may take a while
    engine = DEFAULT_ENGINE.build(policy)
    with RolloutRunner(policy, engine, environment, sampling.of(policy), limits=limits) as runner:
        check_room(policy, runner, [task])
        [row] = runner.run([Attempt(task)], seed, ["generated"], source="generated")
    return row
