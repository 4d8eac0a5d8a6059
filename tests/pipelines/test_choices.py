"""What a config chooses is in the plan and the fingerprint; what it does not choose is not."""

import importlib
import importlib.util
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.library import builtin_stages
from agentrl.pipelines.file.load import ResolvedPipeline, load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.plan import source_file
from agentrl.pipelines.plan.code import CARRIERS, LOADERS, USED_IF_SET, CodeGraph
from agentrl.pipelines.plan.fingerprint import NO_EFFECT, Fingerprinter, fingerprint
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.plan.source import ModuleSource
from agentrl.pipelines.run.execute import job_of
from agentrl.pipelines.run.worker import Workers

ENVIRONMENT = '''
"""An environment of one's own: the first of some numbers."""

from agentrl.environments.lookup import LookupEnvironment, LookupEpisode
from my_rules import is_right


class Episode(LookupEpisode):
    def score(self, answer):
        return super().score(answer if is_right(answer) else None)


class Mine(LookupEnvironment):
    name = "MODULE:Mine"
    version = "1"

    def episode(self, task):
        return Episode(task)


class Other(LookupEnvironment):
    name = "MODULE:Other"
'''

PIPELINE = """
    name: p
    stages:
      tasks: {uses: tasks.generate, with: {env: "ENV", train: 4, dev: 1, heldout: 1}}
      expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
      warm: {uses: train.sft, inputs: {trajectories: expert}, with: {model: {init: tiny}, steps: 1, batch: 4}}
      sample: {uses: trajectories.sample, inputs: {model: warm, tasks: tasks.train}, with: {samples: 2}}
      pairs: {uses: pairs.agentq, inputs: {trajectories: sample}}
      dpo: {uses: train.dpo, inputs: {pairs: pairs, model: warm}, with: {steps: 1, batch: 4}}
      gspo:
        uses: train.online
        inputs: {model: warm, tasks: tasks.train}
        with: {algorithm: {type: gspo}, iterations: 1, tasks: 2, samples: 2}
      grpo: {uses: train.grpo, inputs: {model: warm, tasks: tasks.train}, with: {iterations: 1, tasks: 2, samples: 2}}
      eval: {uses: evaluate.policy, inputs: {model: grpo, tasks: tasks.heldout}}
"""

ACTS = {"expert", "sample", "gspo", "grpo", "eval"}
"""Stages that act in the environment."""


@pytest.fixture
def fresh_imports() -> Iterator[None]:
    before, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith(("my_", "their_")):
            del sys.modules[name]


@pytest.fixture(params=["beside the pipeline file", "outside"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_imports: None
) -> Path:
    """Where the environment lies; the pipeline file lies in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    if request.param == "beside the pipeline file":
        return tmp_path
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir(exist_ok=True)
    sys.path.append(str(elsewhere))
    return elsewhere


def write(folder: Path, tmp_path: Path, env: str = "my_env:Mine") -> Path:
    (folder / "my_env.py").write_text(ENVIRONMENT.replace("MODULE", "my_env"))
    (folder / "my_rules.py").write_text("def is_right(answer):\n    return bool(answer)\n")
    path = tmp_path / "p.yaml"
    path.write_text(textwrap.dedent(PIPELINE.replace("ENV", env)))
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def own(pipeline: ResolvedPipeline, graph: CodeGraph | None = None) -> dict[str, str]:
    """Fingerprints without those of the inputs: what a stage is by itself."""
    fingerprinter = Fingerprinter(graph or CodeGraph(pipeline.folders))
    return {
        name: fingerprint(fingerprinter.ingredients(node, {}, pipeline.flowing(name)))
        for name, node in pipeline.nodes.items()
    }


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def reload(path: Path, *modules: str) -> ResolvedPipeline:
    for name in modules:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return load(str(path))


def test_an_edit_of_a_users_environment_concerns_exactly_what_acts_in_it(folder: Path, tmp_path: Path) -> None:
    path = write(folder, tmp_path)
    before = own(load(str(path)))
    edit(folder / "my_env.py", "if is_right(answer) else None", "if not is_right(answer) else None")
    assert changed(before, own(reload(path, "my_env"))) == ACTS | {"tasks"}


def test_a_helper_of_a_users_environment_counts_too(folder: Path, tmp_path: Path) -> None:
    path = write(folder, tmp_path)
    before = own(load(str(path)))
    edit(folder / "my_rules.py", "bool(answer)", "not answer")
    assert changed(before, own(reload(path, "my_env", "my_rules"))) == ACTS | {"tasks"}


def test_the_version_of_an_environment_is_an_ingredient_and_a_reason(folder: Path, tmp_path: Path) -> None:
    path, store = write(folder, tmp_path), str(tmp_path / "store")
    plan = make_plan(load(str(path)), Catalog(store), store)
    assert plan.steps["eval"].ingredients.choices == {"environment my_env:Mine": "1"}
    assert plan.steps["warm"].ingredients.choices == {}


def test_another_environment_of_the_same_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    path = write(folder, tmp_path)
    before = own(load(str(path)))
    edit(folder / "my_env.py", 'name = "my_env:Other"', 'name = "my_env:Other"\n    version = "7"')
    assert changed(before, own(reload(path, "my_env"))) == set()


def test_an_unknown_environment_is_named_with_the_list_and_the_rule(tmp_path: Path, fresh_imports: None) -> None:
    for env, expected in (
        ("lokup", r"no environment 'lokup'; did you mean 'lookup'\?; ours: .*lookup, .*module:Class"),
        ("my_env:Mined", r"module 'my_env': 'Mined' is not in its source: no environment.*did you mean 'Mine'"),
        ("my_envs:Mine", "module 'my_envs' of environment 'my_envs:Mine' cannot be imported: there is no such module"),
        ("my_broken:Mine", r"my_broken.*cannot be imported: ZeroDivisionError"),
        ("my_rules:is_right", "'is_right' is not declared as environment"),
    ):
        path = write(tmp_path, tmp_path, env)
        (tmp_path / "my_broken.py").write_text("class Mine:\n    def tasks(self): ...\n\n\n1 / 0\n")
        with pytest.raises(SpecError, match=expected) as error:
            load(str(path))
        assert "p.yaml:4: stages.tasks.with.env" in str(error.value)


class OurCopy(CodeGraph):
    """A graph over a copy of our packages, which a test may edit."""

    def __init__(self, root: Path, folders: tuple[Path, ...]) -> None:
        super().__init__(folders)
        self._roots = dict.fromkeys(self._roots, root)


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of our packages. What is remembered of a file of ours serves its copy too, until that is edited."""
    root, source = tmp_path / "copy", Path(__file__).parents[2]
    shutil.copytree(source / "agentrl", root / "agentrl", ignore=shutil.ignore_patterns("__pycache__"))
    read = source_file._remembered

    @cache
    def remembered(file: Path, package: str, code: bytes) -> ModuleSource:
        own = source / file.relative_to(root)
        return read(own if own.read_bytes() == code else file, package)

    monkeypatch.setattr(source_file, "_remembered", lambda file, package: remembered(file, package, file.read_bytes()))
    return root


def find(root: Path, text: str) -> Path:
    [path] = [
        path for path in (root / "agentrl").rglob("*.py") if re.search(rf"^{re.escape(text)}", path.read_text(), re.M)
    ]
    return path


EDITED = {
    "gspo_loss": {"gspo"},
    "ppo_clip_loss": {"grpo", "gspo"},  # gspo is a class of clipped losses
    "merge_lora": set(),
    "launch": set(),
    "track": set(),
    "exact_match": ACTS | {"tasks"},
    "dpo_loss": {"dpo"},
    "nll_loss": {"warm"},
}
"""Functions, and the stages that an edit of each concerns."""


@pytest.mark.slow
@pytest.mark.ci
def test_what_a_config_does_not_choose_is_not_followed(ours: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(textwrap.dedent(PIPELINE.replace("ENV", "lookup")))
    pipeline = load(str(path))
    before = own(pipeline, OurCopy(ours, pipeline.folders))
    concerned = {}
    for function in EDITED:
        source = find(ours, f"def {function}(")
        text = source.read_text()
        edit(source, f"def {function}(", f"@print\ndef {function}(")
        concerned[function] = changed(before, own(pipeline, OurCopy(ours, pipeline.folders)))
        source.write_text(text)
    assert concerned == EDITED


def test_registering_an_environment_changes_nothing(ours: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(textwrap.dedent(PIPELINE.replace("ENV", "lookup")))
    pipeline = load(str(path))
    before = own(pipeline, OurCopy(ours, pipeline.folders))
    with (ours / "agentrl" / "environments" / "__init__.py").open("a") as file:
        file.write('\nENVIRONMENTS["more"] = ENVIRONMENTS["lookup"]\n')
    assert changed(before, own(pipeline, OurCopy(ours, pipeline.folders))) == set()


@pytest.mark.parametrize(
    "setting",
    [
        "stages.warm.with.track=[tensorboard]",
        "stages.warm.with.optimizer.micro_tokens=64",
        "stages.grpo.with.checkpoint_every=2",
    ],
)
def test_fields_without_effect_change_nothing(tmp_path: Path, setting: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(textwrap.dedent(PIPELINE.replace("ENV", "lookup")))
    assert own(load(str(path))) == own(load(str(path), settings=[setting]))


def test_the_tables_name_what_exists() -> None:
    """A row that names nothing would hide that a boundary moved."""
    for name in {*CARRIERS, *USED_IF_SET, *(target.module for target in LOADERS)}:
        assert importlib.util.find_spec(name), name
    for pattern, paths in NO_EFFECT.items():
        for path in paths if pattern != "*" else ():
            certain = path.split(".*")[0].split(".")
            assert any(_has(stage.config, certain) for stage in builtin_stages().values()), path
    for path in USED_IF_SET.values():
        assert any(_has(stage.config, path.split(".")[:1]) for stage in builtin_stages().values()), path


def _has(kind: Any, path: list[str]) -> bool:
    """Whether a model, or one of those in a union, has a field."""
    matches = [getattr(item, "model_fields", {}).get(path[0]) for item in (kind, *get_args(kind))]
    return any(field and (len(path) == 1 or _has(field.annotation, path[1:])) for field in matches)


SHADOW = """
from agentrl.pipelines.handles import Table
from agentrl.pipelines.stage import Context, StageConfig, stage
import pyarrow as pa


class Config(StageConfig):
    n: int = 1


@stage("my.stage", version=1)
def run(context: Context, config: Config) -> Table:
    return context.table(pa.table({"x": [config.n]}))
"""


def test_modules_named_as_our_packages_do_not_shadow_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_imports: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_stage.py").write_text(SHADOW)
    for name in ("schemas", "flows", "pipelines", "agentrl", "datastore"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is not ours')\n")
    lookup = "{uses: tasks.generate, with: {env: lookup, train: 2, dev: 1, heldout: 1}}"
    (tmp_path / "p.yaml").write_text(f'name: p\nstages: {{a: {{uses: "my_stage:run"}}, b: {lookup}}}\n')
    plan = make_plan(load("p.yaml"), Catalog(tmp_path / "store"), str(tmp_path / "store"))
    workers = Workers(lambda *_: None)
    try:
        outcome, tasks = (workers.run(job_of(plan.steps[name], plan, "r"), tmp_path / "log") for name in "ab")
    finally:
        workers.close()
    assert outcome.manifest.outputs["table"].rows == 1
    assert tasks.manifest.outputs["train"].rows == 2
    (tmp_path / "p.yaml").write_text('name: p\nstages: {a: {uses: "agentrl:run"}}\n')
    with pytest.raises(SpecError, match=r"agentrl\.py has the name of agentrl itself.*rename it"):
        load("p.yaml")
