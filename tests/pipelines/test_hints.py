"""What an error suggests: names by slips of the keyboard, keys by their path, and a tab by its name."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.schemas.hints import did_you_mean, nearest, slips

FILE = """\
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 4}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  warm: {uses: train.sft, inputs: {trajectories: expert}, with: {model: {init: tiny}}}
  grpo: {uses: train.grpo, inputs: {model: warm, tasks: tasks.train}}
"""


@pytest.mark.parametrize(
    ("a", "b", "number"),
    [
        ("gpro", "grpo", 1),
        ("gspo", "gpro", 2),
        ("ca", "abc", 3),
        ("", "ab", 2),
        ("kitten", "sitting", 3),
        ("x", "x", 0),
    ],
)
def test_slips_count_a_swap_of_neighbours_as_one(a: str, b: str, number: int) -> None:
    assert slips(a, b) == number


@given(st.text("abc", max_size=7), st.text("abc", max_size=7))
def test_slips_are_a_distance_between_its_bounds(a: str, b: str) -> None:
    assert slips(a, b) == slips(b, a)
    assert abs(len(a) - len(b)) <= slips(a, b) <= max(len(a), len(b))
    assert (slips(a, b) == 0) == (a == b)


def test_the_fewest_slips_are_meant() -> None:
    assert did_you_mean("gpro", ["gspo", "ppo", "grpo", "dapo"]) == "; did you mean 'grpo'?"
    assert nearest("evla", ["value", "eval", "level"], 2)[0] == "eval"
    assert nearest("nothing", ["grpo", "gspo"]) == []
    assert nearest("x" * 5000, ["x" * 5000 + "y"]) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stages.warm.steps=3", "unknown key 'steps'; did you mean 'stages.warm.with.steps'?"),
        ("stages.warm.stesp=3", "unknown key 'stesp'; did you mean 'stages.warm.with.steps'?"),
        ("stages.warm.sede=3", "unknown key 'sede'; did you mean 'seed'?"),
        ("stages.grpo.with.clip_high=1", "did you mean 'stages.grpo.with.algorithm.clip_high'?"),
        ("stages.grpo.with.algorithm.lr=1", "did you mean 'stages.grpo.with.optimizer.lr'?"),
        ("stages.warm.with.gpus=1", "did you mean 'stages.warm.execution.gpus'?"),
        ("stages.warm.gpus=1", "did you mean 'stages.warm.execution.gpus'?"),
        ("warm.with.steps=3", "--set warm.with.steps: warm: unknown key 'warm'; did you mean 'stages.warm'?"),
        ("stages.grpo.with.algorithm.type=gpro", "Input should be 'grpo', not 'gpro'; did you mean 'grpo'?"),
        ("stages.gpro.with.samples=3", "there is no stage 'gpro'; did you mean 'grpo'?"),
        ("stages.warm.with.nonsense=3", "unknown key 'nonsense'; allowed: "),
    ],
)
def test_a_key_in_the_wrong_place_is_told_its_path(setting: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(FILE)
    with pytest.raises(SpecError) as caught:
        load(str(tmp_path / "p.yaml"), settings=[setting])
    assert message in str(caught.value)


def test_the_keys_of_another_engine_are_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(FILE)
    for kind, meant in (("transformers", ""), ("vllm", "did you mean 'stages.grpo.with.engine.tensor_parallel'?")):
        settings = [f"stages.grpo.with.engine={{type: {kind}}}", "stages.grpo.with.tensor_parallel=1"]
        with pytest.raises(SpecError) as caught:
            load(str(tmp_path / "p.yaml"), settings=settings)
        assert meant in str(caught.value)
        assert bool(meant) == ("did you mean" in str(caught.value)), kind


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: p\nstages:\n\ta: {uses: x}\n", 3),
        ("name: p\nstages:\n  a:\n    uses: x\n\twith: {n: 1}\n", 5),
        ("name: p\nstages:\n  a:\n    uses: x\n  \t  with: {n: 1}\n", 5),
        ("\tname: p\n", 1),
        ("name: p\ndescription: |\n  x\n\ty\n", 4),
    ],
)
def test_a_tab_is_called_a_tab(text: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        load(str(tmp_path / "p.yaml"))
    assert str(caught.value) == (
        f"{tmp_path}/p.yaml:{line}: is not YAML: a tab indents this line; YAML takes only spaces: replace the tab with "
        "them"
    )
