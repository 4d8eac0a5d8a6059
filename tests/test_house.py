"""The house keeps its order: small modules, one meaning per class name, algorithms by name, and no import too many."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import import_module
from pathlib import Path
from symtable import symtable

import pytest

from agentrl.algorithms import ALGORITHMS
from agentrl.environments import ENVIRONMENTS
from agentrl.pipelines.file.library import STAGES, builtin_stages

ROOT = Path(__file__).parents[1]
PACKAGES = ("schemas", "datastore", "agentrl", "pipelines", "flows")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_modules_stay_below_400_lines() -> None:
    folders = (*PACKAGES, "benchmarks", "examples", "tests")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules}
    assert {name: length for name, length in lengths.items() if length >= 400} == {}


def test_a_class_name_means_one_thing() -> None:
    homes = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 200
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


@pytest.mark.parametrize(("name", "path"), ALGORITHMS.items())
def test_the_name_of_an_algorithm_is_its_type(name: str, path: str) -> None:
    module, _, attribute = path.partition(":")
    assert getattr(import_module(module), attribute)().type == name


@pytest.mark.parametrize(("name", "path"), ENVIRONMENTS.items())
def test_the_name_of_an_environment_is_its_own(name: str, path: str) -> None:
    module, _, attribute = path.partition(":")
    assert getattr(import_module(module), attribute).name == name


def test_each_stage_is_named_in_the_library_once() -> None:
    assert {name: stage.name for name, stage in builtin_stages().items()} == {name: name for name in STAGES}
    homes = [path for folder in ("stages", "methods") for path in (ROOT / "pipelines" / folder).rglob("*.py")]
    written = [name for path in homes for name in re.findall(r'^@stage\("([^"]+)"', path.read_text(), re.MULTILINE)]
    assert sorted(written) == sorted(STAGES)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        (
            "agentrl.training.launch",
            ("prefect", "agentrl.datastore", "agentrl.pipelines", "agentrl.flows", "polars", "deltalake"),
        ),
        (
            "agentrl.online.loop",
            ("prefect", "agentrl.datastore", "agentrl.pipelines", "agentrl.flows", "polars", "deltalake"),
        ),
        ("agentrl.algorithms", ("torch", "transformers", "prefect", "agentrl.datastore")),
        ("agentrl.pipelines.file.library", ("torch", "transformers", "prefect")),
        ("agentrl.pipelines.stages.trajectories", ("starlette", "uvicorn", "prefect")),
    ],
)
def test_an_import_brings_nothing_that_it_does_not_need(module: str, absent: tuple[str, ...]) -> None:
    """The packages are made impossible to import, as on a node where they are not installed."""
    block = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import {module}"
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_longest_test_modules_are_there() -> None:
    names = (ROOT / "tests/longest_first.txt").read_text().split()
    assert [name for name in names if not (ROOT / "tests" / name).exists()] == []


def test_test_modules_have_names_of_their_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == [], "pytest imports them by these"


# Words that do not say what a value is: a reader wants `row`, `matches`, `path`, `message`.
VAGUE = ("one", "found", "place", "said")
BINDS = re.compile(rf"\b({'|'.join(VAGUE)})\b\s*(in\b|[=:,)\]]|$)", re.MULTILINE)
"""What may bind them; files without it need not be parsed."""


def _bindings(tree: ast.AST) -> list[tuple[str, int]]:
    """Names that code binds, with their lines: in assignments, loops, comprehensions, parameters and patterns."""
    bound: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append((node.id, node.lineno))
        elif isinstance(node, ast.arg):
            bound.append((node.arg, node.lineno))
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.append((node.name, node.lineno))
    return bound


def _fields(tree: ast.AST) -> set[tuple[str, int]]:
    """Fields of classes, which stored formats and own code may name."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    declared = [node for kind in classes for node in kind.body if isinstance(node, ast.AnnAssign)]
    return {(node.target.id, node.lineno) for node in declared if isinstance(node.target, ast.Name)}


def test_locals_say_what_they_are() -> None:
    code = "def f(place, *one):\n    for said in one:\n        [found for found in said]"
    assert sorted(name for name, _ in _bindings(ast.parse(code))) == sorted(VAGUE)
    others = [path for folder in ("benchmarks", "examples", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    vague = []
    for path in [*MODULES, *others]:
        text = path.read_text()
        if not BINDS.search(text):
            continue
        tree = ast.parse(text)
        for name, line in set(_bindings(tree)) - _fields(tree):
            if name in VAGUE:
                vague.append(f"{path.relative_to(ROOT)}:{line} binds `{name}`")
    assert vague == []


def test_benchmarks_import_from_each_other_what_is_there() -> None:
    """They are run by hand, so that a name that has moved would be missed."""
    texts = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    names = {stem: symtable(text, stem, "exec").get_identifiers() for stem, text in texts.items()}
    wanted = [
        (stem, node.module, alias.name)
        for stem, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module in names
        for alias in node.names
    ]
    assert wanted
    assert [want for want in wanted if want[2] not in names[want[1]]] == []


def test_locals_of_the_pages_say_what_they_are() -> None:
    """In assignments and as parameters of arrow functions, which are nearly all functions there."""
    name = rf"(?:{'|'.join(VAGUE)})"
    parameter = rf"\({name}\b[^()]*\) =>|[(,] ?{name} =>"
    binds = re.compile(rf"\b(?:const|let) (?:[\[{{][^=]*\b)?{name}\b(?!:)[^=;]*=[^>=]|{parameter}")
    assert binds.search("const [one, other] = rows")
    assert binds.search("map((one, i) => i)")
    scripts = sorted((ROOT / "flows/viewer/static").glob("*.js"))
    lines = [(path.name, line) for path in scripts for line in path.read_text().splitlines()]
    assert [(file, line) for file, line in lines if binds.search(line)] == []
