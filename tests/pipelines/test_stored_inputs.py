"""Inputs that name an artifact of the store instead of a stage of the pipeline."""

import pytest
from toy_project import Project

from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.plan.plan import Selection
from agentrl.pipelines.results.gc import find_garbage
from agentrl.pipelines.results.lineage import lineage

MAKES = """
    name: makes
    stages:
      a: {uses: "toy:numbers", with: {n: 5}}
"""
READS = """
    name: reads
    stages:
      b: {uses: "toy:add", inputs: {tables: ARTIFACT}}
      c: {uses: "toy:add", inputs: {tables: [b.sums, ARTIFACT.table]}}
      d: {uses: "toy:add", matrix: {inputs.tables: [ARTIFACT, b.sums]}}
"""


@pytest.fixture
def made(project: Project) -> str:
    return f"a/{project.run(MAKES)['a'].manifest.fingerprint}"


def test_a_stage_reads_an_artifact_of_another_pipeline(project: Project, made: str) -> None:
    text = READS.replace("ARTIFACT", made[:10])
    plan = project.plan(text)
    assert {step.name.partition("-")[0] for step in plan.to_run} == {"b", "c", "d"}
    assert plan.steps["c"].to_json()["inputs"] == {"tables": ["b.sums", f"{made[:10]}.table"]}
    outcomes = project.run(text)
    assert project.run(text) == {}
    inputs = outcomes["c"].manifest.ingredients.inputs["tables"]
    assert [(input_.stage, input_.output) for input_ in inputs] == [("b", "sums"), ("a", "table")]
    root = lineage(project.catalog, "b", outcomes["b"].manifest.fingerprint)
    assert [below.key for _, below in root.inputs] == [tuple(made.split("/"))]
    project.catalog.tag("kept", "b", outcomes["b"].manifest.fingerprint)
    assert "a" not in [artifact.ingredients.stage for artifact in find_garbage(project.catalog, 1).artifacts]


def test_its_content_counts_and_not_its_name(project: Project, made: str) -> None:
    """A stage of the pipeline with the same content gives the same fingerprint; another artifact gives another."""
    first = project.run(READS.replace("ARTIFACT", made[:10]), Selection(only=("b",)))["b"].manifest.fingerprint
    whole = MAKES.replace("name: makes", "name: reads") + '      b: {uses: "toy:add", inputs: {tables: a}}\n'
    assert project.plan(whole).steps["b"].fingerprint == first
    other = project.run(MAKES, settings=["stages.a.with.n=6"])["a"].manifest.fingerprint
    step = project.plan(READS.replace("ARTIFACT", f"a/{other[:8]}")).steps["b"]
    assert (str(step.status), step.reasons) == ("run", ["input a changed"])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("a/00000000", "inputs.tables: artifact a/00000000 is not in the store; fingerprints of a: "),
        ("nothing/00000000", "is not in the store; fingerprints of nothing: none"),
        ("a/FINGERPRINT.sums", "takes one output of kind table, not a/"),
    ],
)
def test_what_is_not_there_is_said_before_anything_runs(
    project: Project, made: str, written: str, message: str
) -> None:
    text = READS.replace("ARTIFACT.table", "ARTIFACT").replace("ARTIFACT", written)
    with pytest.raises(SpecError, match=message):
        project.plan(text.replace("FINGERPRINT", made[2:10]))


@pytest.mark.parametrize("written", ["a/short", "../a/00000000", "a/", "/00000000", "a/0000000G", "a/00000000/b"])
def test_what_names_no_artifact_is_refused_when_the_file_is_read(project: Project, written: str) -> None:
    with pytest.raises(SpecError, match="names no artifact: write STAGE/FINGERPRINT"):
        project.load(f'name: p\nstages:\n  b: {{uses: "toy:add", inputs: {{tables: "{written}"}}}}\n')
