"""Reading pipeline files: what is accepted, and what is said about what is not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_project import Project

from agentrl.pipelines.file.document import merge
from agentrl.pipelines.file.load import Edge, load
from agentrl.pipelines.file.problems import SpecError
from agentrl.schemas.pipeline import PipelineSpec

CHAIN = """
    name: chain
    seed: 7
    stages:
      a: {uses: "toy:numbers", with: {n: 5}}
      b: {uses: "toy:add", inputs: {tables: a}}
      c: {uses: "toy:add", inputs: {tables: [a, b.sums], extra: b.counts}, seed: 9}
"""


def problems(project: Project, text: str, **options: object) -> list[str]:
    with pytest.raises(SpecError) as error:
        project.load(text, **options)
    return [str(problem).removeprefix(str(project.folder) + "/") for problem in error.value.problems]


def test_edges_seeds_and_order(project: Project) -> None:
    pipeline = project.load(CHAIN)
    assert list(pipeline.nodes) == ["a", "b", "c"]
    assert pipeline.nodes["c"].inputs == {
        "tables": (Edge("a", "table"), Edge("b", "sums")),
        "extra": (Edge("b", "counts"),),
    }
    assert [node.seed for node in pipeline.nodes.values()] == [7, 7, 9]
    assert pipeline.downstream(["b"]) == {"b", "c"}
    assert pipeline.ancestors(["b"]) == {"a", "b"}


def test_stages_written_in_any_order_run_upstream_first(project: Project) -> None:
    pipeline = project.load("""
        name: p
        stages:
          z: {uses: "toy:add", inputs: {tables: y}}
          y: {uses: "toy:numbers"}
    """)
    assert list(pipeline.nodes) == ["y", "z"]


def test_all_problems_at_once_with_line_path_and_suggestion(project: Project) -> None:
    text = """\
    name: p
    stages:
      a: {uses: "toy:number"}
      b: {uses: "toy:add", inputs: {tabels: a2}}
      c:
        uses: toy:numbers
        with: {nn: 3, factor: fast}
      a2: {uses: "toy:numbers"}
      d: {uses: "toy:add", inputs: {tables: a22}}
      e: {uses: nothing.there}
    """
    errors = problems(project, text)
    expected = [
        ("pipeline.yaml:3: stages.a.uses", "did you mean", "numbers"),
        ("pipeline.yaml:4: stages.b.inputs.tabels", "did you mean 'tables'"),
        ("pipeline.yaml:4: stages.b.inputs", "needs input 'tables'"),
        ("pipeline.yaml:7: stages.c.with.nn", "unknown key", "did you mean 'n'"),
        ("pipeline.yaml:7: stages.c.with.factor", "number", "'fast'"),
        ("pipeline.yaml:9: stages.d.inputs.tables", "did you mean 'a2'"),
        ("pipeline.yaml:10: stages.e.uses", "no stage 'nothing.there' in the library"),
    ]
    for parts in expected:
        assert any(all(part in line for part in parts) for line in errors), (parts, errors)
    assert len(errors) == len(expected)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name: p\nstages: {a: {uses: x, wiht: {}}}", (":2: stages.a.wiht", "did you mean 'with'")),
        ("name: p\nstagse: {}", ("stagse", "did you mean 'stages'")),
        ("name: p\nstages: {}", ("stages", "at least 1")),
        ("name: p\nstages:\n  a: [", ("is not YAML",)),
        ("- a\n- b", ("is a mapping",)),
        ("", ("is a mapping",)),
        ("name: p\nname: q\nstages: {a: {uses: x}}", (":2: name", "written twice")),
        ("name: p\nstages: {a: {uses: x, execution: {gpus: -1}}}", ("stages.a.execution.gpus", "greater than")),
        ("name: p\nstages: {a: {uses: x, execution: {retry: 1}}}", ("did you mean 'retries'",)),
        ("name: p\nstages: {a b: {uses: x}}", ("a b", "match pattern")),
        ("name: p\nextends: other.yaml\nstages: {}", ("no pipeline file", "other.yaml")),
        ("name: p\nextends: pipeline.yaml\nstages: {}", (":2: extends", "extends itself")),
    ],
)
def test_files_that_cannot_be_read(project: Project, text: str, parts: tuple[str, ...]) -> None:
    errors = problems(project, text)
    assert any(all(part in line for part in parts) for line in errors), errors


def test_edge_kinds_are_checked_at_load(project: Project) -> None:
    errors = problems(
        project,
        """
        name: p
        stages:
          a: {uses: "toy:numbers"}
          b: {uses: "toy:add", inputs: {tables: a}}
          c: {uses: "toy:loose", inputs: {model: a}}
          d: {uses: "toy:loose", inputs: {model: a.table}}
          e: {uses: "toy:trouble", inputs: {table: b}}
          f: {uses: "toy:trouble", inputs: {table: b.sum}}
    """,
    )
    assert any("stages.c.inputs.model: 'a' has no output of kind model; it has: a.table" in line for line in errors)
    assert any("stages.d.inputs.model: a.table is table, but the input takes model" in line for line in errors)
    assert any("2 outputs of kind table; name one of: b.sums (table), b.counts (table)" in line for line in errors)
    assert any("'b' has no output 'sum'; did you mean 'sums'?" in line for line in errors)


def test_circle_is_named(project: Project) -> None:
    [error] = problems(
        project,
        """
        name: p
        stages:
          a: {uses: "toy:add", inputs: {tables: b.sums}}
          b: {uses: "toy:add", inputs: {tables: a.sums}}
    """,
    )
    assert "a -> b -> a" in error or "b -> a -> b" in error


def test_set_reaches_nested_keys_and_reports_where_it_does_not(project: Project) -> None:
    pipeline = project.load(CHAIN, settings=["stages.a.with.factor=2e-1", "stages.a.with.names.x=3", "seed=1"])
    assert pipeline.nodes["a"].config.model_dump() == {"n": 5, "factor": 0.2, "names": {"x": 3}, "log_every": 1}
    assert pipeline.nodes["a"].seed == 1
    errors = problems(project, CHAIN, settings=["stages.aa.with.n=1", "nonsense", "stages.a.with.m=1"])
    assert "--set stages.aa.with.n: there is no stage 'aa'; did you mean 'a'?" in errors
    assert any("is written as a.b.c=value" in line for line in errors)
    [errors] = problems(project, CHAIN, settings=["stages.a.with.m=1"])
    assert errors.startswith("--set stages.a.with.m: stages.a.with.m: unknown key 'm'")


def test_profiles_overlay_config_and_execution(project: Project) -> None:
    text = (
        CHAIN
        + """
    execution: {retries: 1}
    profiles:
      cluster:
        execution: {pool: gpu}
        stages:
          a: {with: {n: 50}, execution: {gpus: 8}}
    """
    )
    plain, cluster = project.load(text), project.load(text, profile="cluster")
    assert plain.nodes["a"].execution.pool is None
    assert cluster.nodes["a"].config.n == 50  # type: ignore[attr-defined]
    assert cluster.nodes["a"].execution.gpus == 8
    assert [node.execution.pool for node in cluster.nodes.values()] == ["gpu"] * 3
    assert cluster.nodes["b"].execution.retries == 1
    [error] = problems(project, text, profile="clutser")
    assert "did you mean 'cluster'" in error
    [error] = problems(project, text.replace("a: {with: {n: 50}", "aa: {with: {n: 50}"), profile="cluster")
    assert "profiles.cluster.stages.aa: there is no stage 'aa' to overlay; did you mean 'a'?" in error


def test_extends_merges_and_null_removes(project: Project) -> None:
    project.write(CHAIN, "base.yaml")
    pipeline = project.load("""
        extends: base.yaml
        name: child
        stages:
          a: {with: {factor: 3.0}}
          c: null
    """)
    assert pipeline.name == "child"
    assert list(pipeline.nodes) == ["a", "b"]
    assert pipeline.nodes["a"].config.model_dump()["n"] == 5
    assert pipeline.nodes["a"].config.model_dump()["factor"] == 3.0
    errors = problems(project, "extends: base.yaml\nname: child\nstages: {a: {with: {factor: x}}}")
    assert errors[0].startswith("pipeline.yaml:3: stages.a.with.factor: Input should be a valid number")
    assert errors[0].endswith("not 'x'")


def test_problem_of_an_inherited_line_names_the_base_file(project: Project) -> None:
    project.write(CHAIN.replace("n: 5", "n: five"), "base.yaml")
    [error] = problems(project, "extends: base.yaml\nname: child")
    assert error.startswith("base.yaml:5: stages.a.with.n")


def test_matrix_takes_seeds(project: Project) -> None:
    pipeline = project.load('name: p\nstages: {a: {uses: "toy:numbers", seed: 9, matrix: {seed: [0, 3], n: [2]}}}')
    assert {name: (node.seed, node.config.n) for name, node in pipeline.nodes.items()} == {
        "a-0-2": (0, 2),
        "a-3-2": (3, 2),
    }
    with pytest.raises(
        SpecError, match=r"seed takes whole numbers, not \['x'\]; a config field of that name is with.seed"
    ):
        project.load('name: p\nstages: {a: {uses: "toy:numbers", matrix: {seed: [x]}}}')


def test_matrix_makes_one_stage_per_combination(project: Project) -> None:
    pipeline = project.load("""
        name: p
        stages:
          a: {uses: "toy:numbers", with: {n: 2}, matrix: {factor: [0.5, 2], names.x: [1, 2]}}
          each: {uses: "toy:trouble", inputs: {table: a-0.5-1}, matrix: {inputs.table: [a]}}
          all: {uses: "toy:add", inputs: {tables: a}}
          some: {uses: "toy:add", inputs: {tables: a-0.5-*}}
    """)
    assert [name for name in pipeline.nodes if name.startswith("a-")] == ["a-0.5-1", "a-0.5-2", "a-2-1", "a-2-2"]
    assert pipeline.nodes["a-2-1"].config.model_dump()["names"] == {"x": 1}
    assert pipeline.nodes["all"].upstream == ["a-0.5-1", "a-0.5-2", "a-2-1", "a-2-2"]
    assert pipeline.nodes["some"].upstream == ["a-0.5-1", "a-0.5-2"]
    assert pipeline.nodes["each-a-2-2"].upstream == ["a-2-2"]
    [error] = problems(
        project,
        """
        name: p
        stages:
          a: {uses: "toy:numbers", matrix: {n: [1, 2]}}
          b: {uses: "toy:trouble", inputs: {table: a}}
    """,
    )
    assert "takes one table, but is given a-1.table, a-2.table" in error


def test_repeat_carries_outputs_from_round_to_round(project: Project) -> None:
    pipeline = project.load("""
        name: p
        stages:
          start: {uses: "toy:numbers"}
          rounds:
            repeat: 3
            carry: {table: {first: start, then: last}}
            stages:
              middle: {uses: "toy:add", inputs: {tables: carry.table}}
              last: {uses: "toy:trouble", inputs: {table: middle.sums}}
          end: {uses: "toy:add", inputs: {tables: [last, start, middle.sums]}}
          every: {uses: "toy:add", inputs: {tables: "last-*"}}
    """)
    nodes = pipeline.nodes
    assert nodes["middle-1"].upstream == ["start"]
    assert nodes["middle-2"].upstream == ["last-1"]
    assert nodes["last-3"].inputs["table"] == (Edge("middle-3", "sums"),)
    assert nodes["end"].upstream == ["last-3", "start", "middle-3"]
    assert nodes["every"].upstream == ["last-1", "last-2", "last-3"]
    errors = problems(
        project,
        """
        name: p
        stages:
          g: {repeat: 2, stages: {x: {uses: "toy:add", inputs: {tables: carry.tabel}}}}
    """,
    )
    assert all("carry.tabel is not carried" in line for line in errors)


def test_secrets_are_named_and_environment_variables_are_for_nothing_else(project: Project) -> None:
    text = """
        name: p
        stages:
          a: {uses: "toy:numbers"}
          b: {uses: "toy:outside", inputs: {table: a}, with: {key: "%s"}}
          c: {uses: "toy:loose", with: {anything: {deep: ["%s"]}}}
    """
    assert project.load(text % ("${API_KEY}", "x")).nodes["b"].config.key == "${API_KEY}"  # type: ignore[attr-defined]
    errors = problems(project, text % ("sk-123", "${HOME}"))
    assert any("stages.b.with.key: write a secret as ${NAME_OF_AN_ENVIRONMENT_VARIABLE}" in line for line in errors)
    assert any("stages.c.with.anything.deep.0: environment variables are for secrets only" in line for line in errors)


def test_unknown_pipeline_suggests_files_and_library(project: Project) -> None:
    project.write(CHAIN, "nightly.yaml")
    for name, near in (("nightli.yaml", "nightly.yaml"), ("quickstrat", "quickstart")):
        with pytest.raises(SpecError, match=near):
            load(name)


def test_json_schema_accepts_what_the_loader_accepts() -> None:
    schema = json.loads(json.dumps(PipelineSpec.model_json_schema(by_alias=True)))
    assert schema["additionalProperties"] is False
    assert {"with", "inputs", "execution", "matrix"} <= set(schema["$defs"]["StageSpec"]["properties"])


_scalars = st.none() | st.integers() | st.text(max_size=3)
_values = st.recursive(_scalars, lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3))


@given(st.dictionaries(st.text(max_size=2), _values, max_size=3))
def test_merging_with_nothing_changes_nothing(value: dict[str, object]) -> None:
    assert merge(value, {}) == value
    assert merge({}, value) == value


@pytest.mark.parametrize(
    "profile", ["[1]", "3", "{stages: [a]}", "{stages: {a: 3}}", "{stages: {z: 3}}", "{stages: {z: [1]}}"]
)
def test_a_profile_that_is_no_overlay_is_a_problem(project: Project, profile: str) -> None:
    text = CHAIN + f"    profiles: {{big: {profile}}}\n"
    assert problems(project, text, profile="big")


def test_merge_keys_take_in_mappings_and_own_keys_win(project: Project) -> None:
    pipeline = project.load("""
        name: p
        stages:
          a: {uses: "toy:numbers", with: &base {n: 5, factor: 2.0}}
          b: {uses: "toy:numbers", with: {<<: *base, n: 7}}
          c: {uses: "toy:numbers", with: {<<: [{n: 1}, *base], log_every: 4}}
    """)
    configs = [pipeline.nodes[name].config.model_dump(exclude={"names"}) for name in "abc"]
    assert [(config["n"], config["factor"], config["log_every"]) for config in configs] == [
        (5, 2.0, 1),
        (7, 2.0, 1),
        (1, 2.0, 4),
    ]
    wrong = problems(
        project,
        """\
        name: p
        stages:
          a: {uses: "toy:numbers", with: &base {nn: 5}}
          b: {uses: "toy:numbers", with: {<<: *base}}
        """,
    )
    assert [line.partition(": ")[0] for line in wrong] == ["pipeline.yaml:3", "pipeline.yaml:3"]


@pytest.mark.parametrize(
    "setting",
    [
        "stages.o.with.key=hunter2",
        "stages.o.with.kye=hunter2",
        "stages.n.with.n=[hunter2",
        "stages.n.with.api_key=hunter2",
        "stages.o.execution.env.HF_TOKEN=hunter2",
        "stages.o.with.key={a: hunter2}",
        "stages.o.with.key=!x hunter2",
    ],
)
def test_a_secret_given_by_set_is_never_repeated(project: Project, setting: str) -> None:
    text = """
        name: p
        stages:
          n: {uses: "toy:numbers"}
          o: {uses: "toy:outside", inputs: {table: n}}
    """
    assert "hunter2" not in "\n".join(problems(project, text, settings=[setting]))


def test_the_command_to_go_on_with_hides_what_is_named_like_a_secret(project: Project) -> None:
    text = "name: p\nstages: {a: {uses: 'toy:loose'}}"
    plan = project.plan(text, settings=["stages.a.with.anything.api_key=hunter2", "stages.a.with.anything.n=3"])
    assert "hunter2" not in plan.command()
    assert "anything.n=3" in plan.command()


def test_what_is_declared_is_found_wherever_it_comes_from(project: Project) -> None:
    package = project.folder / project.package
    (package / "worlds.py").write_text(
        "from agentrl.environments.lookup import LookupEnvironment\n\n\n"
        "class Mine(LookupEnvironment):\n    name = 'mine'\n\n\nOther = Mine\n"
    )
    (package / "again.py").write_text("try:\n    from .worlds import Mine as Renamed\nexcept ImportError:\n    raise\n")
    for name in ("worlds:Mine", "worlds:Other", "again:Renamed"):
        text = f"name: p\nstages: {{a: {{uses: tasks.generate, with: {{env: '{project.package}.{name}'}}}}}}"
        assert project.load(text).nodes["a"]
    (package / "more.py").write_text("from .stages import numbers\n")
    assert project.load(f"name: p\nstages: {{a: {{uses: '{project.package}.more:numbers'}}}}").nodes["a"]
    [line] = problems(project, f"name: p\nstages: {{a: {{uses: '{project.package}.stages:nombers'}}}}")
    assert "did you mean 'numbers'?" in line


@pytest.mark.parametrize("uses", ["online", "sample"])
def test_a_reward_that_nothing_verifies_needs_an_evaluation_after_it(project: Project, uses: str) -> None:
    rewards = "rewards: [{type: confidence, alone: true}]"
    stages = {
        "online": f"l: {{uses: train.online, inputs: {{model: m, tasks: t.train}}, with: {{{rewards}}}}}",
        "sample": f"""s: {{uses: trajectories.sample, inputs: {{model: m, tasks: t.train}}, with: {{{rewards}}}}}
      l: {{uses: train.sft, inputs: {{model: m, trajectories: s}}, with: {{steps: 1}}}}""",
    }
    alone = f"""
    name: p
    stages:
      t: {{uses: tasks.generate, with: {{env: lookup, train: 4, dev: 2, heldout: 2}}}}
      e: {{uses: trajectories.synthesize, inputs: {{tasks: t.train}}}}
      m: {{uses: train.sft, inputs: {{trajectories: e}}, with: {{model: {{init: tiny}}, steps: 1}}}}
      before: {{uses: evaluate.policy, inputs: {{model: m, tasks: t.heldout}}}}
      {stages[uses]}
    """
    [problem] = problems(project, alone)
    assert "confidence with alone: true rises whether the policy gets better or only surer" in problem
    project.load(alone + "  after: {uses: evaluate.policy, inputs: {model: l, tasks: t.heldout}}\n")
