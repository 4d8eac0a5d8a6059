"""Which files that code names are inputs of a stage, and which it only speaks of."""

from pathlib import Path

import pytest
from toy_project import Project

from agentrl.pipelines.plan import code
from agentrl.pipelines.plan.code import CodeGraph, Start

PIPELINE = """
    name: p
    stages:
      a: {uses: "toy:numbers", with: {n: 5, names: {x: 1, y: 2}}}
      b: {uses: "toy:add", inputs: {tables: a}}
"""
TOP = "import logging\nimport os\nimport warnings\nfrom pathlib import Path\n\n_log = logging.getLogger(__name__)\n"
SAID = {
    "raised": "raise ValueError('words.txt')",
    "raised as a path": "raise FileNotFoundError(Path(__file__).parent / 'words.txt')",
    "raised in parts": "raise ValueError(f'write {os.path.join(\"x\", \"words.txt\")}, see', 'words.txt')",
    "asserted": "assert values, 'words.txt'",
    "warned": "warnings.warn('words.txt', stacklevel=2)",
    "logged": "_log.info('%s is not there', 'words.txt')",
    "printed": "print('there is no', 'words.txt')",
}
READ = {
    "by a helper": "helper('words.txt')",
    "of a method named as a log's": "values.info('words.txt')",
    "tested": "assert Path(__file__).with_name('words.txt').read_text(), 'empty'",
    "compared": "values and [1 for item in Path(__file__).parent.iterdir() if item.name == 'words.txt']",
}


def fingerprint_of_b(project: Project, statement: str) -> tuple[dict[str, str], dict[str, str]]:
    """The code of stage b while its helper runs ``statement``, before and after an edit of ``words.txt``."""
    words = project.source("deeper").with_name("words.txt")
    words.write_text("one")
    project.source("deeper").write_text(TOP + project.source("deeper").read_text())
    project.edit("deeper", "result = 0.0", f"result = 0.0\n    if not values:\n        {statement}")
    before = project.plan(PIPELINE).steps["b"].ingredients.code
    words.write_text("one two")
    return before, project.plan(PIPELINE).steps["b"].ingredients.code


@pytest.mark.parametrize("way", SAID)
def test_a_file_that_is_only_said_is_no_input(project: Project, way: str) -> None:
    before, after = fingerprint_of_b(project, SAID[way])
    assert not [label for label in before if label.endswith("words.txt")]
    assert before == after


@pytest.mark.parametrize("way", READ)
def test_a_file_that_may_be_read_is_an_input(project: Project, way: str) -> None:
    before, after = fingerprint_of_b(project, READ[way])
    assert {label for label in before if before[label] != after[label]} == {f"{project.package}/words.txt"}


def test_the_checkout_is_no_data_of_our_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``install_hint`` asks for these files of the checkout; another version in them re-ran all that can reach it."""
    package = tmp_path / "agentrl"
    (package / "hints").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "hints" / "__init__.py").touch()
    (package / "words.json").write_text("{}")
    text = "def hint():\n    return ROOT / 'pyproject.toml', ROOT / 'constraints.txt', ROOT / 'words.json'\n"
    for module in (package / "near.py", package / "hints" / "far.py"):
        module.write_text("from pathlib import Path\n\nROOT = Path('.')\n\n\n" + text)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("version = 1")
    monkeypatch.setattr(code, "PACKAGE_ROOT", tmp_path)
    for module in ("agentrl.near", "agentrl.hints.far"):
        reached = CodeGraph().reach([Start(module, "hint")])
        assert {label for label in reached.code if not label.endswith(".py")} == {"agentrl/words.json"}


def test_what_says_how_to_install_reads_no_file() -> None:
    reached = CodeGraph().reach([Start("agentrl.schemas.installation", "install_hint")])
    assert all(label.endswith(".py") for label in reached.code)


def test_a_file_beside_a_module_of_a_project_counts(project: Project) -> None:
    """A project's own ``pyproject.toml``, which its code opens, is data like any other."""
    own = project.source("deeper").with_name("pyproject.toml")
    own.write_text("version = 1")
    project.edit("deeper", "result = 0.0", "result = float(len(open('pyproject.toml').read()))")
    assert f"{project.package}/pyproject.toml" in project.plan(PIPELINE).steps["b"].ingredients.code
