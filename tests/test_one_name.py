"""An installation puts one name on the module path, and works among folders of a project that are called like ours."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("schemas", "datastore", "pipelines", "flows")

STAGES = """
from datastore.orders import ORDERS
from pipelines.names import TITLE
from schemas.order import Order

import pyarrow as pa
from agentrl.pipelines.handles import Table
from agentrl.pipelines.stage import Context, StageConfig, stage


class Config(StageConfig):
    factor: int = 2


@stage("own.totals", version=1)
def totals(context: Context, config: Config) -> Table:
    return context.table(pa.table({TITLE: [config.factor * Order(n).total for n in ORDERS]}))
"""

FILES = {
    "schemas/__init__.py": "",
    "schemas/order.py": "class Order:\n    def __init__(self, n):\n        self.total = 10 * n\n",
    "datastore/__init__.py": "",
    "datastore/orders.py": "ORDERS = [1, 2, 3]\n",
    "pipelines/__init__.py": "",
    "pipelines/names.py": "TITLE = 'total'\n",
    "pipelines/own.py": STAGES,
    "flows/__init__.py": "",
    "flows/daily.py": """
        import json
        import subprocess
        import sys

        from prefect import flow, task

        from schemas.order import Order

        @task
        def total() -> int:
            from agentrl.datastore import Catalog

            return Order(len(list(Catalog("store").all()))).total

        @flow
        def daily() -> int:
            command = [sys.executable, "-m", "agentrl.flows.cli", "run", "own.yaml", "--no-prefect"]
            subprocess.run(command, check=True, capture_output=True)
            return total()

        if __name__ == "__main__":
            print("total", daily())
    """,
    "tests/__init__.py": "",
    "tests/test_own.py": """
        from pipelines.own import Config, totals
        from schemas.order import Order

        from agentrl.pipelines.harness import Harness

        def test_totals(tmp_path):
            assert Order(2).total == 20
            table = Harness(tmp_path).run(totals, Config(factor=3)).outputs["table"]
            assert table.table()["total"].to_pylist() == [30, 60, 90]
    """,
    "script.py": """
        from schemas.order import Order

        import agentrl.schemas.task
        from agentrl.datastore import Catalog
        from agentrl.pipelines.file.load import load
        from agentrl.pipelines.plan.plan import make_plan

        plan = make_plan(load("own.yaml"), Catalog("store"), "store")
        print(Order(1).total, *plan.steps, agentrl.schemas.task.Task.__module__)
    """,
    "own.yaml": 'name: own\nstages:\n  totals: {uses: "pipelines.own:totals"}\n',
}

NOTEBOOK = """
import nbclient, nbformat
cell = nbformat.v4.new_code_cell(open("script.py").read())
notebook = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[cell]), kernel_name="python3").execute()
print(notebook.cells[0].outputs[0].text, end="")
"""


def build(folder: Path) -> Path:
    """A wheel of this checkout."""
    source = folder / "source"
    shutil.copytree(ROOT / "agentrl", source / "agentrl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, outside the checkout. What the wheel depends on is that of the running one."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build(folder)
    assert {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name} == {
        "agentrl"
    }
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    path = folder / "venv/bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(content))
    return tmp_path


def called(python: Path, project: Path, *arguments: str) -> str:
    outside = ("PYTHONPATH", "VIRTUAL_ENV")
    plain = {key: value for key, value in os.environ.items() if key not in outside and not key.startswith("PREFECT_")}
    env = {**plain, "PREFECT_HOME": str(project / "prefect"), "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "200"}
    done = subprocess.run(
        [python, *arguments], cwd=project, env=env, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.ci
def test_the_whole_quickstart_runs_from_the_wheel(python: Path, project: Path) -> None:
    ran = called(python, project, "-m", "agentrl.flows.cli", "run", "quickstart", "--json", "--no-prefect")
    stages = json.loads(ran)["stages"]
    assert {stage["status"] for stage in stages.values()} == {"ran"}
    [page] = (project / "store/artifacts/report").rglob("report.html")
    assert "<svg" in page.read_text(), "curves"
    measured = called(python, project, "-m", "agentrl.flows.cli", "show", "eval_grpo", "--json")
    assert json.loads(measured)["metrics"]["success"] > 0.9
    assert "everything is up to date" in called(python, project, "-m", "agentrl.flows.cli", "run", "quickstart")


@pytest.mark.slow
@pytest.mark.ci
def test_an_installation_has_one_name(python: Path, project: Path) -> None:
    (project / "empty").mkdir()
    find = "import importlib.util as u; print([n for n in %r if u.find_spec(n)], u.find_spec('agentrl').origin)"
    result = called(python, project / "empty", "-c", find % (PARTS,))
    assert result.startswith("[] "), result
    assert str(python.parents[1]) in result
    checked = called(python, project / "empty", "-m", "agentrl.flows.cli", "validate", "methods/dagger")
    assert "methods/dagger/pipeline.yaml: pipeline dagger is valid" in checked


@pytest.mark.slow
@pytest.mark.ci
def test_scripts_tests_notebooks_workers_and_flows_work_among_folders_called_like_ours(
    python: Path, project: Path
) -> None:
    assert called(python, project, "script.py") == "10 totals agentrl.schemas.task\n"
    ran = json.loads(called(python, project, "-m", "agentrl.flows.cli", "run", "own.yaml", "--no-prefect", "--json"))
    assert ran["stages"]["totals"]["status"] == "ran"
    assert "own: 1 cached" in called(python, project, "-m", "agentrl.flows.cli", "plan", "own.yaml")
    assert "1 passed" in called(python, project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert called(python, project, "-m", "flows.daily").endswith("total 10\n")
    assert called(python, project, "-c", NOTEBOOK) == "10 totals agentrl.schemas.task\n"
