"""What changes a fingerprint, and what does not."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_project import Project

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.external import external_digest, pinned, with_paths
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.plan.fingerprint import (
    UnhashableError,
    _installed_version,
    canonical,
    fingerprint,
    outside_fields,
)
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.stage import External, StageConfig

PIPELINE = """
    name: p
    stages:
      a: {uses: "toy:numbers", with: {n: 5, names: {x: 1, y: 2}}}
      b: {uses: "toy:add", inputs: {tables: a}}
      c: {uses: "toy:outside", inputs: {table: a}}
"""


def prints(project: Project, text: str = PIPELINE, **options: object) -> dict[str, str]:
    """Fingerprints of the stages, each without the content of its inputs, which nothing has made yet."""
    return {step.name: fingerprint(step.ingredients) for step in project.plan(text, **options).steps.values()}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_comments_docstrings_and_formatting_change_nothing(project: Project) -> None:
    before = prints(project)
    project.edit("deeper", "# start here", "# begin")
    project.edit("maths", '"""Add up."""', '"""Add up all values, and return the sum."""')
    project.edit("stages", '"""Stages that count', '"""Toys that count')
    project.edit("deeper", "    return a + b", "    return (\n        a\n        + b\n    )")
    assert changed(before, prints(project)) == set()


def test_helper_three_imports_away_changes_exactly_those_who_reach_it(project: Project) -> None:
    before = prints(project)
    project.edit("deeper", "return a + b", "return a + b + 0")
    assert changed(before, prints(project)) == {"b"}


def test_helper_that_nobody_calls_changes_nothing(project: Project) -> None:
    before = prints(project)
    project.edit("maths", "return values[0]", "return values[-1]")
    assert changed(before, prints(project)) == set()


def test_an_act_at_import_changes_all_who_import(project: Project) -> None:
    before = prints(project)
    project.source("deeper").write_text(project.source("deeper").read_text() + "\nCACHE = {}\nCACHE['x'] = 1\n")
    assert changed(before, prints(project)) == {"a", "b", "c"}


def test_function_level_imports_are_followed(project: Project) -> None:
    project.edit("maths", "from PACKAGE import deeper\n".replace("PACKAGE", project.package), "")
    project.edit("maths", "    return deeper.plus", f"    from {project.package}.deeper import plus\n\n    return plus")
    before = prints(project)
    project.edit("deeper", "result = 0.0", "result = 0.5")
    assert changed(before, prints(project)) == {"b"}


def test_data_files_that_the_code_names_are_tracked(project: Project) -> None:
    (project.source("deeper").parent / "words.txt").write_text("one")
    project.edit("deeper", "result = 0.0", "result = float(len(open('words.txt').read()))")
    before = prints(project)
    (project.source("deeper").parent / "words.txt").write_text("one two")
    assert changed(before, prints(project)) == {"b"}


@pytest.mark.parametrize(
    "named",
    [
        "open(HERE / 'facts' / 'deep' / 'one.json')",
        "open(HERE / 'facts/deep/one.json')",
        "open(HERE.joinpath('facts', 'deep', 'one.json'))",
        "open(os.path.join(HERE, 'facts', 'deep/one.json'))",
        "open(f'{HERE}/facts/deep/one.json')",
        "next((HERE / 'facts').rglob('*.json')).open()",
        "(Path(__file__).parent.parent / 'facts' / 'deep' / 'one.json').open()",
        "open(HERE / 'facts' / kind / 'one.json')",
    ],
)
def test_data_files_are_tracked_however_their_path_is_built(project: Project, named: str) -> None:
    folder = project.source("deeper").parent
    data = (folder.parent if "parent.parent" in named else folder) / "facts" / "deep" / "one.json"
    data.parent.mkdir(parents=True)
    data.write_text("one")
    top = "import os\nfrom pathlib import Path\n\nHERE = Path(__file__).parent\nkind = 'deep'\n"
    project.source("deeper").write_text(top + project.source("deeper").read_text())
    project.edit("deeper", "result = 0.0", f"result = float(len({named}.read()))")
    before = prints(project)
    data.write_text("one two")
    assert changed(before, prints(project)) == {"b"}


def test_a_folder_of_code_and_a_store_are_no_data(project: Project) -> None:
    folder = project.folder / "made"
    (folder / "trajectories" / "_delta_log").mkdir(parents=True)
    project.edit("deeper", "result = 0.0", "from pathlib import Path\n\n    result = len(str(Path('made') / 'x'))")
    before = prints(project)
    (folder / "new.json").write_text("1")
    assert changed(before, prints(project)) == set()


def test_a_module_that_is_imported_by_its_written_name_is_tracked(project: Project) -> None:
    project.source("late").write_text("def limit() -> float:\n    return 1.0\n")
    imported = f"import_module('{project.package}.late').limit()"
    project.edit("deeper", "result = 0.0", f"from importlib import import_module\n\n    result = {imported}")
    before = prints(project)
    project.edit("late", "1.0", "2.0")
    assert changed(before, prints(project)) == {"b"}


@pytest.mark.parametrize(
    "used",
    [
        "def tool(order: Order) -> None: ...",
        "def tool(orders: 'list[Order] | None' = None) -> None: ...",
        "def tool() -> shapes.Order: ...",
        "def tool(x) -> None:\n    assert isinstance(x, Order)",
    ],
)
def test_types_that_the_users_code_names_are_followed(project: Project, used: str) -> None:
    project.source("shapes").write_text("class Order:\n    item: str\n\n\nclass Other:\n    pass\n")
    maths = project.source("maths")
    imports = f"from {project.package} import shapes\nfrom {project.package}.shapes import Order\n"
    maths.write_text(f"{imports}{maths.read_text()}\n\n{used}\n")
    project.edit(
        "maths", "def total(values: list[float]) -> float:\n", "def total(values: list[float]) -> float:\n    tool\n"
    )
    before = prints(project)
    project.edit("shapes", "    pass", "    x: int")
    assert changed(before, prints(project)) == set()
    project.edit("shapes", "item: str", "item: int")
    assert changed(before, prints(project)) == {"b"}


def test_a_swapped_import_of_the_same_name_is_seen(project: Project) -> None:
    project.source("other").write_text("def plus(values: list[float]) -> float:\n    return 1.0\n")
    before = prints(project)
    project.edit("maths", "import deeper", "import other as deeper")
    assert changed(before, prints(project)) == {"b"}


def test_modules_of_another_folder_are_tracked(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "far_helpers.py").write_text("LIMIT = 1\n\n\ndef plus(values: list[float]) -> float:\n    return LIMIT\n")
    project.edit("maths", f"from {project.package} import deeper", "import far_helpers as deeper")
    path = folder / "pipeline.yaml"
    path.write_text(project.write(PIPELINE).read_text())
    from agentrl.pipelines.file.load import load
    from agentrl.pipelines.plan.plan import make_plan

    before = {
        s.name: fingerprint(s.ingredients) for s in make_plan(load(str(path)), project.catalog, "store").steps.values()
    }
    (folder / "far_helpers.py").write_text("LIMIT = 2\n\n\ndef plus(values: list[float]) -> float:\n    return LIMIT\n")
    after = {
        s.name: fingerprint(s.ingredients) for s in make_plan(load(str(path)), project.catalog, "store").steps.values()
    }
    assert changed(before, after) == {"b"}


def test_execution_and_fields_without_effect_change_nothing(project: Project) -> None:
    before = prints(project)
    text = PIPELINE.replace("n: 5", "n: 5, log_every: 7")
    text += "    execution: {retries: 3, timeout_s: 60, gpus: 1, pool: big, concurrency: [gpu], env: {A: b}}\n"
    assert changed(before, prints(project, text)) == set()


def test_order_of_keys_changes_nothing_and_values_do(project: Project) -> None:
    before = prints(project)
    swapped = PIPELINE.replace("n: 5, names: {x: 1, y: 2}", "names: {y: 2, x: 1}, n: 5")
    assert changed(before, prints(project, swapped)) == set()
    assert changed(before, prints(project, PIPELINE.replace("y: 2", "y: 3"))) == {"a"}


def test_seed_name_and_wiring_enter(project: Project) -> None:
    before = prints(project)
    assert changed(before, prints(project, settings=["seed=1"])) == {"a", "b", "c"}
    assert changed(before, prints(project, settings=["stages.b.seed=1"])) == {"b"}
    renamed = prints(project, PIPELINE.replace("  b:", "  b2:"))
    assert renamed["b2"] != before["b"]


def test_tokenizer_template_changes_what_tokenises_and_weights_what_loads(project: Project) -> None:
    folder = project.folder / "base"
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (folder / name).write_text(name)
    text = PIPELINE.replace("inputs: {table: a}}", "inputs: {table: a}, with: {tokenizer: base}}") + (
        '      d: {uses: "toy:outside", inputs: {table: a}, with: {base: base}}\n'
    )
    before = prints(project, text)
    (folder / "model.safetensors").write_text("other weights")
    after_weights = prints(project, text)
    assert changed(before, after_weights) == {"d"}
    (folder / "chat_template.jinja").write_text("other template")
    assert changed(after_weights, prints(project, text)) == {"c", "d"}
    moved = project.folder / "moved"
    folder.rename(moved)
    now = prints(project, text.replace(": base}", ": moved}"))
    assert changed(prints(project, text.replace(": base}", ": moved}")), now) == set()


def test_the_path_of_a_model_does_not_matter(project: Project) -> None:
    for name in ("one", "two"):
        (project.folder / name).mkdir()
        (project.folder / name / "model.safetensors").write_text("same")
    text = PIPELINE.replace("inputs: {table: a}}", "inputs: {table: a}, with: {base: one}}")
    assert prints(project, text) == prints(project, text.replace("base: one", "base: two"))


def test_missing_model_names_field_and_place(project: Project) -> None:
    for name, hint, where in (
        ("./nowhere", "there is no model at .*nowhere; give a path", "pipeline.yaml:6: stages.c.with.base"),
        ("org/name", "hf download org/name", "stage c: with.base"),
    ):
        with pytest.raises(SpecError, match=hint) as error:
            prints(project, PIPELINE.replace("inputs: {table: a}}", f"inputs: {{table: a}}, with: {{base: {name}}}}}"))
        assert where in str(error.value)


def test_hugging_face_names_count_by_their_revision(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(project.folder / "hub"))
    reference = project.folder / "hub" / "models--org--name" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    text = PIPELINE.replace("inputs: {table: a}}", "inputs: {table: a}, with: {base: org/name}}")
    reference.write_text("abc")
    before = prints(project, text)
    reference.write_text("def")
    assert changed(before, prints(project, text)) == {"c"}


def test_secrets_never_enter(project: Project) -> None:
    with_key = PIPELINE.replace("inputs: {table: a}}", 'inputs: {table: a}, with: {key: "${API_KEY}"}}')
    assert changed(prints(project), prints(project, with_key)) == set()
    plan = project.plan(with_key)
    assert "API_KEY" not in plan.steps["c"].ingredients.model_dump_json()


def test_unhashable_config_names_its_field() -> None:
    with pytest.raises(UnhashableError, match=r"config.deep.1.f: a function cannot be hashed"):
        canonical({"deep": [1, {"f": canonical}]})
    with pytest.raises(UnhashableError, match=r"config.x: has the key 3"):
        canonical({"x": {3: 1}})


def test_versions_of_packages_enter_where_they_are_used(project: Project) -> None:
    project.edit("deeper", "def plus", "import numpy\n\n\ndef plus")
    project.edit("deeper", "result = 0.0", "result = float(numpy.zeros(1)[0])")
    plan = project.plan(PIPELINE)
    assert "numpy" in plan.steps["b"].ingredients.packages
    assert "numpy" not in plan.steps["a"].ingredients.packages


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3) | st.lists(st.integers()), max_size=4))
def test_canonical_form_ignores_order_and_keeps_values(config: dict[str, object]) -> None:
    backwards = dict(reversed(config.items()))
    assert canonical(config) == canonical(backwards) == config
    assert list(canonical(config)) == sorted(config)


def test_canonical_forms_of_other_types() -> None:
    assert canonical({"t": datetime(2026, 1, 1, tzinfo=UTC), "p": Path("a/b"), "s": {2, 1}, "f": float("nan")}) == {
        "f": "nan", "p": "a/b", "s": [1, 2], "t": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "entering"),
    [
        ("{}", set()),
        ("{optimizer: {lora: {rank: 4}}}", {"peft"}),
        ("{optimizer: {lora: {quantize: nf4}}}", {"peft", "bitsandbytes"}),
        ("{deepspeed: {zero: 1}}", {"deepspeed"}),
    ],
)
def test_an_optional_package_enters_only_where_the_config_uses_it(
    tmp_path: Path, setting: str, entering: set[str]
) -> None:
    (tmp_path / "p.yaml").write_text(f"""
name: p
stages:
  tasks: {{uses: tasks.generate, with: {{env: lookup, train: 4, dev: 1, heldout: 1}}}}
  expert: {{uses: trajectories.synthesize, inputs: {{tasks: tasks.train}}}}
  warm: {{uses: train.sft, inputs: {{trajectories: expert}}, with: {{model: {{init: tiny}}, steps: 1, batch: 4}}}}
  next: {{uses: train.sft, inputs: {{trajectories: expert, model: warm}}, with: {setting}}}
  grpo: {{uses: train.grpo, inputs: {{tasks: tasks.train, model: warm}}, with: {setting}}}
""")
    store = str(tmp_path / "store")
    steps = make_plan(load(str(tmp_path / "p.yaml")), Catalog(store), store).steps
    for name in ("next", "grpo"):
        assert {"peft", "bitsandbytes", "deepspeed"} & set(steps[name].ingredients.packages) == entering, name


class Judge(StageConfig):
    model: Annotated[str, External("model")] | None = None


class Judges(StageConfig):
    base: Annotated[str, External("model")] | None = None
    judges: tuple[Judge, ...] = ()
    more: dict[str, Annotated[str, External("file")]] | None = None


def test_what_lies_outside_is_found_in_lists_models_and_mappings(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "weights").write_text("1")
    (tmp_path / "f").write_text("1")
    name = str(tmp_path / "m")
    config = Judges(judges=(Judge(), Judge(model=name)), more={"x": str(tmp_path / "f")})
    assert outside_fields(config) == {"judges.1.model": name, "more.x": str(tmp_path / "f")}


def test_a_name_on_the_hub_is_loaded_at_the_revision_that_was_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    hashed = {"model base": "org/name@abc", "model judges.0.model": "org/name@abc"}
    config = Judges(base="org/name", judges=(Judge(model="org/name"),))
    with pytest.raises(LookupError, match=r"of with.base is not in the .* cache at revision abc.*hf download org/name"):
        pinned(config, hashed)
    (folder / "snapshots" / "abc").mkdir(parents=True)
    now = pinned(config, hashed)
    assert now.base == now.judges[0].model == str(folder / "snapshots" / "abc")
    (folder / "refs" / "main").write_text("def")  # newer on the hub, and not what was hashed
    assert pinned(config, hashed) == now


def test_a_folder_that_changed_since_it_was_hashed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "weights").write_text("1")
    config = Judges(base=str(tmp_path / "m"))
    hashed = {"model base": external_digest(str(tmp_path / "m"), "model")}
    assert pinned(config, hashed) == config
    (tmp_path / "m" / "weights").write_text("2")
    with pytest.raises(LookupError, match=r"model '.*/m' of with.base changed: its content was \w{12} and is \w{12};"):
        pinned(config, hashed)


def test_a_hashed_config_and_the_paths_that_it_leaves_out_are_the_whole_config() -> None:
    whole = Judges(base="b", judges=(Judge(), Judge(model="m")), more={"x": "f"})
    left = {"base": None, "judges": [{"model": None}, {}], "more": {}}
    paths = {"python": "3", **{f"path of {field}": path for field, path in outside_fields(whole).items()}}
    assert Judges.model_validate(with_paths(left, paths)) == whole
    assert with_paths({"paths": []}, {"path of paths.0": "a", "path of paths.1": "b"}) == {"paths": ["a", "b"]}


@pytest.mark.parametrize(
    ("first", "other", "same"), [("2.13.0+cpu", "2.13.0+cu130", True), ("2.13.0", "2.14.0", False)]
)
def test_a_local_part_of_a_version_does_not_count(
    monkeypatch: pytest.MonkeyPatch, first: str, other: str, same: bool
) -> None:
    versions = []
    for version in (first, other):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        versions.append(_installed_version("torch"))
    assert (versions[0] == versions[1]) is same


def test_polars_counts_where_it_computes(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("""
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 4, dev: 1, heldout: 1}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  curate: {uses: trajectories.curate, inputs: {trajectories: expert}, with: {rules: [{rule: keep}]}}
""")
    store = str(tmp_path / "store")
    steps = make_plan(load(str(tmp_path / "p.yaml")), Catalog(store), store).steps
    assert [name for name, step in steps.items() if "polars" in step.ingredients.packages] == ["curate"]
