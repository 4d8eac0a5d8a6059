"""``model: {path: x.gguf}`` in a pipeline file: its content counts, it is refused by the plan, and trained from."""

from pathlib import Path

import pytest
from tiny_gguf import HIDES_TOOLS, write

import agentrl
from agentrl.models.policy import Policy

PIPELINE = """
name: gguf
stages:
  tasks: {{uses: tasks.generate, with: {{env: {env}, train: 4, dev: 0, heldout: 0}}}}
  expert: {{uses: trajectories.synthesize, inputs: {{tasks: tasks.train}}}}
  start: {{uses: model.import, with: {{model: {{path: {path}}}}}}}
  sft:
    uses: train.sft
    inputs: {{trajectories: expert}}
    with: {{model: {{path: {path}}}, steps: 1, batch: 2}}
"""
WITHOUT_TOOLS = "{type: reasoning_gym, family: chain_sum}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pipeline(folder: Path, path: str = "x.gguf", env: str = WITHOUT_TOOLS) -> agentrl.Pipeline:
    (folder / "gguf.yaml").write_text(PIPELINE.format(path=path, env=env))
    return agentrl.load(folder / "gguf.yaml", store=folder / "store")


@pytest.mark.slow
@pytest.mark.ci
def test_it_is_trained_from_and_its_content_counts(folder: Path) -> None:
    pytest.importorskip("reasoning_gym")
    write(folder / "x.gguf")
    ran = pipeline(folder).run()
    assert dict(ran.stages.select("stage", "status").iter_rows())["sft"] == "ran"
    assert len(list((folder / "cache/agentrl/models").iterdir())) == 2  # the config for the plan, and then all
    start = ran.stage("start")
    assert start.summary["parameters"] == Policy.load(start.output("model").path).model.num_parameters()
    assert not pipeline(folder).plan().to_run
    write(folder / "x.gguf", template=HIDES_TOOLS + " ")
    plan = pipeline(folder).plan()
    assert [step.name for step in plan.to_run] == ["start", "sft"]
    assert "model.path" in " ".join(plan.steps["sft"].reasons)


def test_a_broken_one_is_refused_by_the_plan_in_one_line_and_nothing_is_written(folder: Path) -> None:
    write(folder / "x.gguf")
    (folder / "x.gguf").write_bytes((folder / "x.gguf").read_bytes()[:5000])
    with pytest.raises(agentrl.SpecError, match=r"stage sft: with.model.path: model 'x.gguf' cannot be read: it is"):
        pipeline(folder).plan()
    assert not (folder / "store").exists()
    (folder / "notes.txt").write_text("no model")
    with pytest.raises(agentrl.SpecError, match=r"notes.txt is a file, and no GGUF; give a model folder, a GGUF or"):
        pipeline(folder, "notes.txt").plan()
