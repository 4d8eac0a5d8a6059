"""What stages of a file are to each other."""

import pytest
from toy_project import Project

from agentrl.pipelines.file.problems import SpecError

TWINS = """
    name: twins
    seed: 4
    stages:
      one: {uses: "toy:numbers", with: {n: 5}}
      two: {uses: "toy:numbers", %s}
      more: {uses: "toy:add", inputs: {tables: one}}
      as_more: {uses: "toy:add", inputs: {tables: two}}
      both: {uses: "toy:add", inputs: {tables: [%s]}}
"""


@pytest.mark.parametrize(
    ("settings", "read", "what"),
    [
        ("with: {n: 5}", "one, two", "both.inputs.tables: two.table is the same as one.table, since"),
        ("with: {n: 5}, seed: 4", "one, two", "give two a seed of its own, such as seed: 5, or leave it out"),
        ("with: {n: 5}", "more.sums, one, as_more.sums", "as_more.sums is the same as more.sums"),
    ],
)
def test_what_two_equal_stages_make_is_not_taken_for_more(
    project: Project, settings: str, read: str, what: str
) -> None:
    with pytest.raises(SpecError, match=what):
        project.plan(TWINS % (settings, read))


@pytest.mark.parametrize(
    ("settings", "read"),
    [("with: {n: 6}", "one, two"), ("with: {n: 5}, seed: 5", "one, two"), ("with: {n: 5}", "one, one")],
)
def test_stages_that_differ_and_a_stage_read_twice_are_read(project: Project, settings: str, read: str) -> None:
    assert project.plan(TWINS % (settings, read)).to_run
