"""Pipeline files that are nonsense, far too large, or mean harm: each is refused with problems, in seconds."""

import contextlib
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline_load import problems
from toy_project import Project

from agentrl.environments import load_environment
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError

BOMB = "name: p\nx0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
AXIS = str(list(range(100)))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (BOMB, ("at most 100,000", "values once its aliases are written out")),
        ("name: p\nstages: " + "[" * 100_000, ("nested 51 levels deep", "at most 50")),
        ("name: p\nstages: &s {a: *s}", ("*s stands inside what it repeats",)),
        ("name: p\n" + "#" * 4_000_001, ("4,000,009 characters", "at most 4,000,000")),
        (
            "name: p\nstages: {a: {uses: x, matrix: {" + ", ".join(f"k{n}: {AXIS}" for n in range(5)) + "}}}",
            ("stages.a.matrix", "100 x 100 x 100 x 100 x 100 is 10,000,000,000 stages", "at most 5,000"),
        ),
        (
            "name: p\nstages: {g: {repeat: 600, stages: {a: {uses: x, matrix: {k: " + AXIS + "}}}}}",
            ("600 x 100 is 60,000 stages",),
        ),
        (
            "name: p\nstages: {g: {repeat: 900, stages: {" + ", ".join(f"a{n}: {{uses: x}}" for n in range(9)) + "}}}",
            ("900 rounds of 9 stages are 8,100",),
        ),
        ("name: p\nstages: {? [a, b] : {uses: x}}", ("a key is text",)),
        ("name: p\nstages: {<<: 3, a: {uses: x}}", ("<< takes a mapping",)),
        ("name: p\nstages: {a: {uses: !!python/object:os.system x}}", ("put it in quotes",)),
        ("name: p\nseed: " + "9" * 5000, ("put it in quotes",)),
        ("name: p\nstages: {" + "a" * 300 + ": {uses: x}}", ("at most 80 characters",)),
        (
            "name: p\nstages: {a: {uses: x, execution: {env: {OPENAI_API_KEY: abc}}}}",
            ("export a secret before the run",),
        ),
    ],
)
def test_limits_name_the_number_and_what_is_allowed(project: Project, text: str, parts: tuple[str, ...]) -> None:
    began = time.process_time()
    errors = problems(project, text)
    assert any(all(part in line for part in parts) for line in errors), errors
    assert time.process_time() - began < 5


def test_600_rounds_are_loaded_and_planned_in_seconds(project: Project) -> None:
    began = time.process_time()
    plan = project.plan("""
        name: rounds
        stages:
          start: {uses: "toy:numbers"}
          loop:
            repeat: 600
            carry: {last: {first: start, then: b.sums}}
            stages:
              a: {uses: "toy:add", inputs: {tables: carry.last}}
              b: {uses: "toy:add", inputs: {tables: [carry.last, a.sums]}}
    """)
    assert len(plan.to_run) == 1201
    assert time.process_time() - began < 20


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_with_problems(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass") if text.isprintable() else path.write_text("")
    with pytest.raises(SpecError) as error:
        load(str(path))
    assert error.value.problems


_PIECES = """
name: p|stages:| {a: |{uses: x|}|]|[|&a |*a|<<: |? |!!int |!x |'|"|\\|- |: |repeat: 3|matrix: {k: [1, 2]}|null
1_0|0x_|.nan|carry: {p: {first: a, then: b}}|2001-99-99|>-|%YAML 1.1|---|...|\ufeff|\x85|é|\U0001f600|inputs: {t: a.
with: {n: |extends: x|execution: {env: {|profiles: {q: |seed: |\t| |extends: quickstart
"""
_yaml_text = st.lists(
    st.sampled_from(["\n", *(piece for line in _PIECES.split("\n") for piece in line.split("|"))])
    | st.text(max_size=3),
    max_size=25,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=_yaml_text, profile=st.none() | st.just("q"))
def test_any_yaml_is_read_or_refused_with_problems(
    tmp_path_factory: pytest.TempPathFactory, text: str, profile: str | None
) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(SpecError):
        load(str(path), profile=profile)


@settings(max_examples=150, deadline=None)
@given(
    path=st.lists(
        st.sampled_from(
            [
                "stages",
                "tasks",
                "with",
                "env",
                "inputs",
                "matrix",
                "execution",
                "seed",
                "profiles",
                "0",
                "",
                "name",
                "warm",
            ]
        )
        | st.text(max_size=3),
        max_size=6,
    ).map(".".join),
    value=_yaml_text,
)
def test_any_set_is_read_or_refused_with_problems(path: str, value: str) -> None:
    for setting in (f"{path}={value}", path, value):
        with contextlib.suppress(SpecError):
            load("quickstart", settings=[setting])


def test_any_name_of_a_file_is_found_or_refused(tmp_path: Path) -> None:
    for name in ("", ".", "/", "a" * 5000, "\0", "../" * 2000, "[", "**/*", "%20", "\ud800"):
        with pytest.raises(SpecError):
            load(name)


@pytest.mark.parametrize(
    "name",
    ["os:system", "subprocess:Popen", "subprocess:run", "trap:main", "trap:Trap", "trap.sub:main", "builtins:exec",
     "pathlib:Path", "this:s", "shutil:rmtree", "os.path:join", "antigravity:x", ":", "a:", ":b", "a b:c", "..:x",
     "yaml:YAMLObject", "sys:exit", "collections:OrderedDict", "importlib:import_module"],
)  # fmt: skip
def test_what_is_not_declared_is_neither_imported_nor_called(project: Project, name: str) -> None:
    """A name in a pipeline file may come from anybody; ``trap`` writes a file as soon as it is imported."""
    trap = "import pathlib\npathlib.Path('sprung').touch()\n\ndef main(context, config):\n    pass\n\n"
    (project.folder / "trap.py").write_text(trap + "class Trap:\n    def __init__(self):\n        main(0, 0)\n")
    before = set(sys.modules)
    text = f"""
        name: p
        stages:
          a: {{uses: tasks.generate, with: {{env: {name!r}}}}}
          b: {{uses: {name!r}}}
    """
    errors = problems(project, text)
    assert any(" stages.a.with.env: " in line for line in errors), errors
    assert any(" stages.b.uses: " in line for line in errors), errors
    assert not (project.folder / "sprung").exists()
    assert not {"this", "antigravity", "trap"} & (set(sys.modules) - before)
    with pytest.raises(ValueError):
        load_environment(name)
