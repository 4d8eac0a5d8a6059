"""Lineage over many rounds: a graph, walked once, however often its parts are shared."""

import json
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.show import print_lineage
from agentrl.pipelines.results.lineage import find_artifact, lineage, mermaid
from agentrl.schemas.manifest import Ingredients, InputRecord, Kind, Manifest, OutputRecord


def publish(
    catalog: Catalog, stage: str, inputs: list[str], pipeline: str = "", fingerprint: str = "0" * 32, day: int = 1
) -> None:
    folder = catalog.staging(stage, fingerprint)
    (folder / "table.txt").write_text(stage)
    records = [InputRecord(stage=name, output="table", fingerprint="0" * 32) for name in inputs]
    ingredients = Ingredients(
        scheme=1,
        pipeline=pipeline,
        stage=stage,
        uses="x",
        uses_version="1",
        config={},
        seed=0,
        inputs={"tables": records},
        code={},
    )
    output = OutputRecord(kind=Kind.TABLE, path="table.txt", rows=None, digest="d")
    manifest = Manifest(
        fingerprint=fingerprint,
        ingredients=ingredients,
        outputs={"table": output},
        run_id="r",
        created_at=datetime(2026, 1, day, tzinfo=UTC),
        duration_s=0.0,
        buffer_version=None,
    )
    catalog.publish(manifest, folder)


@pytest.mark.slow
@pytest.mark.ci
def test_200_rounds_that_share_their_inputs_are_shown_in_seconds(tmp_path: Path) -> None:
    """Every round reads both stages of the round before: paths double with each, artifacts do not."""
    rounds = 200
    catalog = Catalog(str(tmp_path / "store"))
    before: list[str] = []
    for number in range(rounds):
        for name in "ab":
            publish(catalog, f"{name}-{number}", before)
        before = [f"a-{number}", f"b-{number}"]
    began = time.monotonic()
    root = lineage(catalog, f"a-{rounds - 1}", "0" * 32)
    assert len(list(root.walk())) == 2 * rounds - 1
    result = json.loads(json.dumps(root.to_json()))
    assert len(result["artifacts"]) == 2 * rounds - 2
    assert [input_["stage"] for input_ in result["inputs"]] == ["a-198", "b-198"]
    assert mermaid(root).count("-->") == 4 * (rounds - 1) - 2
    console = Console(width=100, soft_wrap=True, record=True, file=(tmp_path / "out").open("w"))
    print_lineage(console, root)
    assert (tmp_path / "out").read_text().count("a-17/00000000") == 2
    assert time.monotonic() - began < 20


def test_a_stage_of_several_pipelines_is_found_by_pipeline(tmp_path: Path) -> None:
    catalog = Catalog(str(tmp_path))
    publish(catalog, "grpo", [], "small", "a" * 32, day=1)
    publish(catalog, "grpo", [], "large", "b" * 32, day=2)
    for number, (pipeline, fingerprint) in enumerate({"small": "a", "large": "b", "third": "a"}.items()):
        record = {"run_id": f"r{number}", "pipeline": pipeline, "state": "completed", "host": "h", "pid": 1}
        failed = {"status": "failed", "fingerprint": ""}
        stages = {"grpo": {"status": "ran", "fingerprint": fingerprint * 32}, "next": failed}
        catalog.write_run(record | {"stages": stages})
    with pytest.warns(
        UserWarning, match=r"grpo is grpo/bbbbbbbb of large; there are others of small: .* PIPELINE:grpo"
    ):
        assert find_artifact(catalog, "grpo").fingerprint == "b" * 32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_artifact(catalog, "small:grpo").fingerprint == "a" * 32
        assert find_artifact(catalog, "large:grpo").fingerprint == "b" * 32
        assert find_artifact(catalog, "third:grpo").fingerprint == "a" * 32, "made by another pipeline, and re-used"
        assert find_artifact(catalog, "grpo/aa").fingerprint == "a" * 32
    for text, message in (
        ("smal:grpo", "did you mean 'small'"),
        ("small:gpro", "has no artifact of stage 'gpro'; did you mean 'grpo'"),
        ("small:next", "has no artifact of stage 'next'"),
    ):
        with pytest.raises(LookupError, match=message):
            find_artifact(catalog, text)
