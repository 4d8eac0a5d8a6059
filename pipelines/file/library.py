"""What ``uses`` names: a stage of the library, or ``module:function`` of the user's own code.

To add a stage to the library, write its module and name it in the table below.
"""

import importlib
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.stage import Stage
from agentrl.schemas.declared import OURS, declared, is_stage
from agentrl.schemas.installation import PACKAGE_ROOT

STAGES = {
    "evaluate.compare": "agentrl.pipelines.stages.evaluate:compare",
    "evaluate.policy": "agentrl.pipelines.stages.evaluate:evaluate",
    "evaluate.tags": "agentrl.pipelines.stages.tags:tags",
    "model.import": "agentrl.pipelines.stages.models:import_model",
    "notes.reflect": "agentrl.pipelines.methods.reflexion.notes:reflect",
    "notes.skills": "agentrl.pipelines.methods.voyager.skills:skills",
    "pairs.agentq": "agentrl.pipelines.methods.agentq.pairs:agentq",
    "pairs.from_feedback": "agentrl.pipelines.stages.feedback:pairs_from_feedback",
    "pairs.from_preferences": "agentrl.pipelines.stages.feedback:pairs_from_preferences",
    "pairs.outcome": "agentrl.pipelines.methods.eto.outcome:outcome",
    "report.training": "agentrl.pipelines.stages.report:training_report",
    "rewards.audit": "agentrl.pipelines.stages.audit:audit",
    "rewards.score": "agentrl.pipelines.methods.reward_model.score:score",
    "rewards.train": "agentrl.pipelines.methods.reward_model.train:train",
    "scores.from_feedback": "agentrl.pipelines.stages.feedback:scores_from_feedback",
    "scores.from_proposals": "agentrl.pipelines.methods.zero.judge:judge",
    "scores.from_verdicts": "agentrl.pipelines.methods.self_rewarding.judging:scores_from_verdicts",
    "search.tree": "agentrl.pipelines.methods.lats.search:tree",
    "steps.value": "agentrl.pipelines.methods.slicing.steps:value",
    "tasks.from_proposals": "agentrl.pipelines.methods.zero.ask:from_proposals",
    "tasks.from_trajectories": "agentrl.pipelines.stages.tasks:from_trajectories",
    "tasks.generate": "agentrl.pipelines.stages.tasks:generate",
    "tasks.import": "agentrl.pipelines.stages.tasks:import_",
    "tasks.judge": "agentrl.pipelines.methods.self_rewarding.judging:judge",
    "tasks.predict": "agentrl.pipelines.methods.rwml.predict:predict",
    "tasks.propose": "agentrl.pipelines.methods.webrl.propose:propose",
    "tasks.to_propose": "agentrl.pipelines.methods.zero.ask:to_propose",
    "tasks.vary": "agentrl.pipelines.stages.tasks:vary",
    "tasks.with_calls": "agentrl.pipelines.methods.toolrl.reference:with_calls",
    "tasks.with_skills": "agentrl.pipelines.methods.voyager.skills:with_library",
    "train.dpo": "agentrl.pipelines.stages.train:dpo",
    "train.grpo": "agentrl.pipelines.stages.grpo:grpo",
    "train.kto": "agentrl.pipelines.stages.train:kto",
    "train.offline": "agentrl.pipelines.stages.train:offline",
    "train.online": "agentrl.pipelines.stages.grpo:online",
    "train.preference": "agentrl.pipelines.stages.train:preference",
    "train.sft": "agentrl.pipelines.stages.train:sft",
    "trajectories.as_text": "agentrl.pipelines.methods.agentfounder.as_text:as_text",
    "trajectories.cast": "agentrl.pipelines.methods.team.cast:cast",
    "trajectories.correct": "agentrl.pipelines.methods.dagger.correct:correct",
    "trajectories.curate": "agentrl.pipelines.stages.curate:curate",
    "trajectories.cut": "agentrl.pipelines.stages.cut:cut",
    "trajectories.filter_calls": "agentrl.pipelines.methods.toolformer.filter_calls:filter_calls",
    "trajectories.fork": "agentrl.pipelines.methods.fork.fork:fork",
    "trajectories.import": "agentrl.pipelines.stages.imports:import_",
    "trajectories.import_cut": "agentrl.pipelines.stages.cut:import_cut",
    "trajectories.inverse": "agentrl.pipelines.methods.vpt.inverse:inverse",
    "trajectories.label_calls": "agentrl.pipelines.methods.vpt.label:label_calls",
    "trajectories.mix": "agentrl.pipelines.methods.agenttuning.mix:mix",
    "trajectories.negatives": "agentrl.pipelines.stages.trajectories:negatives",
    "trajectories.rationalize": "agentrl.pipelines.methods.star.rationalize:rationalize",
    "trajectories.redact": "agentrl.pipelines.stages.redact:redact",
    "trajectories.reject": "agentrl.pipelines.stages.trajectories:reject",
    "trajectories.relabel": "agentrl.pipelines.methods.hindsight.relabel:relabel",
    "trajectories.reopen": "agentrl.pipelines.stages.reopen:reopen",
    "trajectories.sample": "agentrl.pipelines.stages.trajectories:sample",
    "trajectories.score": "agentrl.pipelines.stages.score:score",
    "trajectories.segment": "agentrl.pipelines.methods.compress.segment:segment",
    "trajectories.select": "agentrl.pipelines.stages.select:select",
    "trajectories.splice": "agentrl.pipelines.methods.splice.splice:splice",
    "trajectories.synthesize": "agentrl.pipelines.stages.trajectories:synthesize",
    "trajectories.team": "agentrl.pipelines.methods.team.team:team",
}
"""Name -> ``module:function``."""


@cache
def builtin_stages() -> dict[str, Stage]:
    """Every stage of the library, by name. Their modules import nothing heavy at their top."""
    return {name: _built_in(name) for name in STAGES}


def _built_in(name: str) -> Stage:
    module, _, function = STAGES[name].partition(":")
    stage: Stage = getattr(importlib.import_module(module), function)
    return stage


def search_in(folders: Iterable[Path]) -> None:
    """Let the user's modules be found in these folders, before anything that is installed. ``agentrl`` itself is
    imported by now, so that a module of the same name cannot replace it."""
    for folder in reversed([str(folder.resolve()) for folder in folders]):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)


def resolve(uses: str) -> Stage:
    """The stage that ``uses`` names. A module is imported only if its source declares the stage.

    Raises LookupError with a message for the user if there is none.
    """
    if ":" not in uses:
        if uses in STAGES:
            return _built_in(uses)
        hint = did_you_mean(uses, STAGES) or f"; the library has: {', '.join(sorted(STAGES))}"
        raise LookupError(f"there is no stage {uses!r} in the library{hint} (write your own as module:function)")
    top = uses.partition(":")[0].partition(".")[0]
    if top == OURS and (shadow := _beside(top)):
        raise LookupError(f"{shadow} has the name of agentrl itself, and is never imported; rename it")
    imported = declared(uses, "stage", is_stage, "@stage(name, version=1)")
    if not isinstance(imported, Stage):
        raise LookupError(f"{uses!r} is not a stage; declare the function with @stage(name, version=1)")
    return imported


def _beside(package: str) -> Path | None:
    """A module of the user's that has our name, and comes before ours on the module path."""
    ours = PACKAGE_ROOT
    for folder in map(Path, sys.path):
        if folder.resolve() == ours:
            return None
        for path in (folder / f"{package}.py", folder / package / "__init__.py"):
            if path.is_file():
                return path
    return None
