"""Pipeline files of task families and of methods at their smallest, to see that each stage runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agentrl.pipelines.file.document import find

SMALLEST = {"train": 16, "dev": 2, "heldout": 4, "steps": 2, "batch": 4, "iterations": 1, "tasks": 2, "samples": 2}


def smallest(name: str, most: Mapping[str, int] = SMALLEST) -> dict[str, Any]:
    """A file that extends one of the library, and makes its settings at most these. After two steps of training nothing
    is solved, so what trains on own successes is given the expert's demonstrations too."""
    stages: dict[str, Any] = {}
    for stage, spec in yaml.safe_load(find(name).read_text())["stages"].items():
        given, inputs = spec.get("with", {}), spec.get("inputs", {})
        small = {key: min(value, given[key]) for key, value in most.items() if isinstance(given.get(key), int)}
        stages[stage] = {"with": small} if small else {}
        if spec.get("uses") == "train.sft" and "model" in inputs:
            own = inputs["trajectories"]
            both = dict.fromkeys([*([own] if isinstance(own, str) else own), "expert"])
            stages[stage]["inputs"] = {"trajectories": list(both)}
    return {
        "name": f"smallest-{Path(name).name}",
        "extends": name,
        "stages": {key: stage for key, stage in stages.items() if stage},
    }
