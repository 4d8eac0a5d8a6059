"""An environment of one's own, beside the pipeline file, works as docs/environments.md shows it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastore import TrajectoryBuffer
from datastore.catalog import Catalog
from pipelines.execute import job_of, perform
from pipelines.load import load
from pipelines.plan import Plan, Status, make_plan

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_environment"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = list(sys.path)
    yield Path(shutil.copytree(EXAMPLE, tmp_path / "example"))
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_shop"]:
        del sys.modules[name]


def planned(folder: Path) -> Plan:
    store = str(folder / "store")
    settings = ["stages.warm.with.steps=2", "stages.tasks.with.train=8", "stages.tasks.with.heldout=2"]
    return make_plan(load(str(folder / "pipeline.yaml"), settings=settings), Catalog(store), store)


def test_the_example_runs_and_is_in_the_plan_and_the_fingerprint(folder: Path) -> None:
    plan = planned(folder)
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))
    rows = TrajectoryBuffer(folder / "store").scan().select("stage", "env", "env_version").unique().collect()
    assert set(rows["stage"]) == {"expert", "eval"}
    assert set(rows["env"]) == {"my_shop.shop:CheapShop"}, "rows name what their environment is found by"
    assert {step.status for step in planned(folder).steps.values()} == {Status.CACHED}
    source = folder / "my_shop" / "shop.py"
    source.write_text(source.read_text().replace("len(self.asked) <= 2", "len(self.asked) <= 3"))
    again = planned(folder)
    assert again.steps["expert"].reasons[0] == "code my_shop/shop.py changed"
    assert again.steps["eval"].reasons[0] == "code my_shop/shop.py changed"
    assert again.steps["tasks"].ingredients.choices == {"environment my_shop.shop:CheapShop": "1"}


def test_its_own_tests_pass(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_what_the_docs_show_is_what_is_there() -> None:
    text = (ROOT / "docs" / "environments.md").read_text()
    for file in ("my_shop/shop.py", "pipeline.yaml", "test_shop.py"):
        assert (EXAMPLE / file).read_text().strip() in text, f"docs/environments.md shows another {file}"
