"""Ask the machines of a pipeline whether a run can start on them."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from agentrl.flows.commands._common import FAILED, fail, load_pipeline
from agentrl.flows.options import Json, PipelineOptions, Store, command
from agentrl.flows.terminal import console, say_json

if TYPE_CHECKING:
    from agentrl.schemas.pipeline import Execution
    from agentrl.training.cluster_check import ClusterFinding

app = typer.Typer()

COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red"}


@command(app, name="check-cluster")
def check_cluster(source: PipelineOptions, store: Store = "store", as_json: Json = False) -> None:
    """Check the machines of a pipeline's stages in about a minute: addresses, shared folder, clocks, versions, devices,
    disks, a sum over all of them, and weights. Exit code 1 if something is wrong."""
    if "://" in store:
        raise fail(f"error: --store {store}: machines share a folder, and this is none; name one on shared storage")
    pipeline = load_pipeline(source, as_json, runs_here=False)
    places = _places({name: node.execution for name, node in pipeline.nodes.items()})
    if not places:
        raise fail(
            "error: no stage of this pipeline has other machines or GPUs; set execution.launcher or execution.gpus"
        )
    from agentrl.training.cluster_check import ClusterCheck

    wrong, answer = False, []
    for stages, execution in places:
        findings = list(ClusterCheck(execution, Path(store) / "tmp").findings())
        wrong = wrong or any(finding.verdict == "wrong" for finding in findings)
        answer.append({"stages": stages, "launcher": execution.launches, "findings": list(map(vars, findings))})
        if not as_json:
            _print(f"launcher {execution.launches}, of {', '.join(stages)}", findings)
    if as_json:
        say_json({"ok": not wrong, "machines": answer})
    raise typer.Exit(FAILED if wrong else 0)


def _places(stages: "dict[str, Execution]") -> "list[tuple[list[str], Execution]]":
    """Executions that are placed alike, each once, with the names of their stages."""
    by_place: dict[str, tuple[list[str], Execution]] = {}
    about = {"launcher", "nodes", "hostfile", "gpus", "env", "limits"}
    for name, execution in stages.items():
        if execution.launches != "external" and (execution.spreads or execution.gpus):
            by_place.setdefault(execution.model_dump_json(include=about), ([], execution))[0].append(name)
    return list(by_place.values())


def _print(title: str, findings: "list[ClusterFinding]") -> None:
    out = console()
    out.print(title)
    for finding in findings:
        verdict = Text(f"{finding.verdict:<8}", COLOURS[finding.verdict])
        out.print(verdict, f"{finding.check:<9}", f"{finding.where}:", finding.evidence, soft_wrap=True)
        if finding.remedy:
            out.print(f"{'':18} {finding.remedy}", soft_wrap=True)
