"""A family of one's own uses the ground of ours, as docs/how-to/own-family.md shows it."""

from collections.abc import Iterator
from pathlib import Path

import own_classes
import pytest
from own_classes import EXAMPLES, ROOT, copied

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import Plan, Status, make_plan
from agentrl.pipelines.run.execute import job_of, perform

EXAMPLE = EXAMPLES / "own_family"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with copied("own_family", tmp_path) as folder:
        yield folder


def planned(folder: Path) -> Plan:
    return own_classes.planned(folder / "pipeline.yaml", "stages.warm.with.steps=2")


def test_the_example_runs_with_faults_and_an_edit_of_the_ground_re_runs_it(folder: Path) -> None:
    plan = planned(folder)
    for name in ("tasks", "expert"):
        perform(job_of(plan.steps[name], plan, "r"))
    rows = TrajectoryBuffer(folder / "store").scan().select("env", "n_tool_errors", "success").collect()
    assert set(rows["env"]) == {'my_family.safe:Safes{"faults": {"timeout": 0.1}, "levels": [4], "lowest": 3}'}
    assert sum(rows["n_tool_errors"]) > 0
    assert 0 < sum(rows["success"]) < len(rows)
    again = planned(folder)
    assert again.steps["expert"].status is Status.CACHED
    reached = set(again.steps["expert"].ingredients.code)
    assert {"my_family/safe.py", "agentrl/environments/family.py", "agentrl/environments/faults.py"} <= reached
    assert not {"agentrl/environments/rooms/environment.py", "agentrl/environments/office/environment.py"} & reached
    source = folder / "my_family" / "safe.py"
    source.write_text(source.read_text().replace("2**level", "2**level - 1"))
    assert planned(folder).steps["expert"].reasons[0] == "code my_family/safe.py changed"


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs/how-to/own-family.md").read_text()
    for name in ("my_family/safe.py", "pipeline.yaml", "test_safe.py"):
        assert (EXAMPLE / name).read_text() in page, f"{name} differs from the page"


def test_the_pipeline_of_rooms_is_in_the_library(tmp_path: Path) -> None:
    plan = make_plan(load("rooms"), Catalog(str(tmp_path)), str(tmp_path))
    assert {step.status for step in plan.steps.values()} == {Status.RUN}
    assert plan.steps["tasks"].ingredients.choices == {"environment rooms": "1"}
