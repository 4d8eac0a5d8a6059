"""An embedder that a stage names: of ours by name, a folder by its content."""

from pathlib import Path

from agentrl.pipelines.file.external import outside
from agentrl.pipelines.plan.fingerprint import _externals, _hashed, _unhashed
from agentrl.pipelines.stages.curate import CurateConfig
from agentrl.pipelines.stages.select import SelectConfig


def test_a_folder_counts_by_its_content_and_ours_by_name(tmp_path: Path) -> None:
    for name in ("embedded", "minilm"):
        config = SelectConfig(version=1, embedder=name)
        assert list(outside(config)) == []
        assert _hashed(config, _unhashed("trajectories.select"))["embedder"] == name
    (tmp_path / "weights").write_text("1")
    named = CurateConfig(rules=[], embedder=str(tmp_path))
    before = _externals(named)
    assert list(before) == ["model embedder"]
    (tmp_path / "weights").write_text("other")
    assert _externals(named) != before
