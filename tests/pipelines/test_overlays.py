"""What is laid over a pipeline file, and what a stranger's file may read."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from toy_project import Project

from agentrl.pipelines.file.document import overlaid
from agentrl.pipelines.file.problems import SpecError

MODEL = {"init": "tiny", "size": "small"}


@pytest.mark.parametrize(
    ("base", "over", "result", "dropped"),
    [
        ({"init": "tiny"}, {"path": "m"}, {"path": "m"}, ""),
        ({"path": "m"}, {"init": "tiny"}, {"init": "tiny"}, ""),
        ({"path": "m", "dialect": "d"}, {"path": "n"}, {"path": "n", "dialect": "d"}, ""),
        (MODEL, {"path": "m"}, {"path": "m"}, "m: another path replaces all of it, also size"),
        (MODEL, {"init": None, "path": "m"}, {"init": None, "path": "m", "size": "small"}, ""),
        (
            {"type": "grpo", "clip": 0.2},
            {"type": "gspo"},
            {"type": "gspo"},
            "m: another type replaces all of it, also clip",
        ),
        ({"type": "grpo", "clip": 0.2}, {"type": "gspo", "clip": 0.1}, {"type": "gspo", "clip": 0.1}, ""),
        ({"type": "grpo", "clip": 0.2}, {"type": "grpo", "kl": 0.1}, {"type": "grpo", "clip": 0.2, "kl": 0.1}, ""),
        ({"clip": 0.2}, {"type": "gspo"}, {"clip": 0.2, "type": "gspo"}, ""),
        ({"a": {"type": "x", "k": 1}, "b": 1}, {"a": {"type": "y", "k": 2}}, {"a": {"type": "y", "k": 2}, "b": 1}, ""),
    ],
)
def test_a_mapping_that_becomes_another_thing_is_replaced(base: Any, over: Any, result: Any, dropped: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert overlaid({"m": base}, {"m": over}) == {"m": result}
    assert [str(text.message) for text in caught] == ([dropped] if dropped else [])


TRAINED = """
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 2, dev: 0, heldout: 0}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  warm: {uses: train.sft, inputs: {trajectories: expert}, with: {model: {init: tiny}}}
profiles:
  real: {stages: {warm: {with: {model: {path: ./no/model}}}}}
"""


@pytest.mark.parametrize("way", ["--set", "--set path", "profile", "extends"])
def test_a_path_stands_in_for_init(project: Project, way: str) -> None:
    options: dict[str, Any] = {}
    if way == "profile":
        options = {"profile": "real"}
    elif way == "extends":
        (project.folder / "base.yaml").write_text(TRAINED)
        text = "name: q\nextends: base.yaml\nstages: {warm: {with: {model: {path: ./no/model}}}}"
    else:
        options = {
            "settings": [f"stages.warm.with.model{'={path: ./no/model}' if way == '--set' else '.path=./no/model'}"]
        }
    with pytest.raises(SpecError) as error:  # it has arrived: the folder is looked for
        project.load(text if way == "extends" else TRAINED, **options)
    [problem] = error.value.problems
    assert "there is no model at" in problem.message
    assert "no/model" in problem.message


GROUPED = """
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 2, dev: 0, heldout: 0}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  warm: {uses: train.sft, inputs: {trajectories: expert}, with: {model: {init: tiny}}}
  sample:
    uses: trajectories.sample
    inputs: {tasks: tasks.train, model: warm}
    with: {engine: {type: transformers, rows: 3}}
profiles:
  other: {stages: {sample: {with: {engine: {type: vllm}}}}}
"""


@pytest.mark.parametrize("way", ["--set", "--set type", "profile", "extends"])
def test_another_type_keeps_no_key_of_the_one_before(project: Project, way: str) -> None:
    """``rows`` is of the engine in this process, and a vLLM server has no such key."""
    options: dict[str, Any] = {}
    text = GROUPED
    if way == "profile":
        options = {"profile": "other"}
    elif way == "extends":
        (project.folder / "base.yaml").write_text(GROUPED)
        text = "name: q\nextends: base.yaml\nstages: {sample: {with: {engine: {type: vllm}}}}"
    else:
        options = {"settings": [f"stages.sample.with.engine{'={type: vllm}' if way == '--set' else '.type=vllm'}"]}
    with pytest.warns(UserWarning, match=r"engine: another type replaces all of it, also rows"):
        sample: Any = project.load(text, **options).nodes["sample"].config
    assert sample.engine.type == "vllm"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same: Any = project.load(GROUPED, settings=["stages.sample.with.engine.type=transformers"])
    assert same.nodes["sample"].config.engine.rows == 3


SECRETS = {
    "shadow": "root:$6$secret-hash:19000:0:99999:7:::\nsecret-user:*:19000:0:99999:7:::\n",
    "hosts.yml": "secret-host:\n  oauth_token: ghp_secret\n",
    "alias": "name: *secret-alias\n",
    "twice": "secret: 1\nsecret: 2\n",
    "text": "secret words\nin lines",
    "broken": "secret: [\n",
    "binary": "\udcffsecret",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_file_from_elsewhere_that_is_extended_is_not_repeated(project: Project, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / name).write_text(SECRETS[name], errors="surrogateescape")
    (project.folder / "link").symlink_to(elsewhere / name)
    for path in (str(elsewhere / name), f"../{elsewhere.name}/{name}", "link"):
        with pytest.raises(SpecError) as error:
            project.load(f"name: p\nextends: {path}\nstages: {{}}")
        [problem] = error.value.problems
        assert "secret" not in str(problem).replace(str(elsewhere), "")
        assert "its text is not repeated, since it is outside" in problem.message
        assert name == "binary" or problem.place.line in (1, 2, 3)


def test_a_pipeline_elsewhere_is_extended(project: Project, tmp_path: Path) -> None:
    base = tmp_path.parent / f"{tmp_path.name}-base.yaml"
    base.write_text("name: base\nstages: {a: {uses: tasks.generate, with: {env: lookup}}}")
    assert list(project.load(f"name: p\nextends: {base}\nstages: {{a: {{with: {{train: 4}}}}}}").nodes) == ["a"]


OUTSIDE = """
name: p
stages:
  a: {uses: "toy:numbers"}
  o: {uses: "toy:outside", inputs: {table: a}, with: {base: PATH}}
"""


@pytest.mark.parametrize("path", ["/", "///", "/proc/.."])
def test_a_model_at_the_root_of_the_file_system_is_refused(project: Project, path: str) -> None:
    text = OUTSIDE.replace("PATH", path)
    with pytest.raises(SpecError, match=r"with\.base.*is the root of the file system; name the folder of the model"):
        project.plan(text)


def test_a_model_that_may_not_be_read_is_a_problem_of_its_field(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.folder / "model").mkdir()

    glob = Path.glob

    def refuse(path: Path, pattern: str) -> Any:
        if path.name == "model":
            raise PermissionError(13, "Permission denied", "model/private")
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", refuse)
    with pytest.raises(SpecError, match=r"base.*model cannot be read as model: Permission denied: model/private"):
        project.plan(OUTSIDE.replace("PATH", "./model"))
