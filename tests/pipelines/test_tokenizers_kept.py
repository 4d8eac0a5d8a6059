"""The ids of any row become text without its model, also in stores that were made before tokenizers were kept."""

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.cli import app
from agentrl.models.policy import load_tokenizer, tokenizer_fingerprint
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.pipelines.tokenizers import token_bytes
from agentrl.schemas.manifest import Ingredients, Kind, Manifest, OutputRecord


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def trained(harness: Harness, tasks: Tasks) -> Model:
    """A model that was trained for one step; its tokenizer was made on the way."""
    rows = harness.run(synthesize, {}, tasks=tasks)["trajectories"]
    return harness.run(sft, {"model": {"init": "tiny"}, "steps": 1, "batch": 2}, trajectories=[rows])["model"]


class Written(NamedTuple):
    tokenizer: str
    ids: list[int]
    text: str


@pytest.fixture(scope="module")
def written(trained: Model, tasks: Tasks) -> Written:
    """Tokens of that model's tokenizer, under the fingerprint that rows would name."""
    tokenizer = load_tokenizer(trained.path)
    text = "<|im_start|>user\n" + tasks.read()[0].prompt + " naïve 🦊<|im_end|>"
    return Written(tokenizer_fingerprint(tokenizer), tokenizer.encode(text), text)


def published(store: str, model: Path) -> str:
    """A model as an artifact of a store; how rows name it."""
    catalog, fingerprint = Catalog(store), "ab" * 16
    folder = catalog.staging("warm", fingerprint)
    shutil.copytree(model, folder / "model")
    about = Ingredients(scheme=1, stage="warm", uses="x", uses_version="1", config={}, seed=0, inputs={}, code={})
    output = OutputRecord(kind=Kind.MODEL, path="model", digest="d")
    made = {"run_id": "r", "created_at": datetime.now(UTC), "duration_s": 0.0}
    catalog.publish(Manifest(fingerprint=fingerprint, ingredients=about, outputs={"model": output}, **made), folder)
    return f"warm/{fingerprint[:8]}"


def test_a_stage_that_makes_a_tokenizer_keeps_it(harness: Harness, written: Written) -> None:
    result, offsets = token_bytes(Catalog(harness.buffer.store), written.tokenizer).text(written.ids)
    assert result.decode() == written.text
    assert len(offsets) == len(written.ids) + 1


@pytest.mark.slow
@pytest.mark.ci
def test_a_stage_that_samples_keeps_the_tokenizer_of_its_rows(warm: Model, tasks: Tasks, tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    limits = {"max_turn_tokens": 24, "max_tokens": 120}
    made = harness.run(sample, {"samples": 1, "sampling": limits}, model=warm, tasks=tasks)
    tokenizer = load_tokenizer(warm.path)
    for row in made["trajectories"].read():
        result, _ = token_bytes(Catalog(harness.buffer.store), row.tokenizer).text(row.input_ids)
        assert result.decode() == tokenizer.decode(row.input_ids, skip_special_tokens=False)


def test_rows_of_older_stores_are_read_by_their_models_tokenizer(
    trained: Model, written: Written, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    policy = published(store, trained.path)
    catalog = Catalog(store)
    for name in (policy, str(trained.path)):
        assert token_bytes(catalog, written.tokenizer, name).text(written.ids)[0].decode() == written.text
    for gone in ("warm/12345678", "tiny", "", "/no/such/folder"):
        with pytest.raises(LookupError, match=r"agentrl buffer tokenizer FOLDER"):
            token_bytes(catalog, written.tokenizer, gone)
    with pytest.raises(LookupError, match="have no tokens"):
        token_bytes(catalog, "", policy)
    done = CliRunner().invoke(app, ["buffer", "tokenizer", str(trained.path), "--store", store, "--json"])
    assert json.loads(done.output) == [{"tokenizer": written.tokenizer}], done.output
    assert token_bytes(catalog, written.tokenizer).text(written.ids)[0].decode() == written.text


def test_reading_imports_neither_torch_nor_transformers(harness: Harness, written: Written) -> None:
    program = (
        "import sys; from agentrl.datastore.artifacts.catalog import Catalog\n"
        "from agentrl.pipelines.tokenizers import token_bytes\n"
        f"assert token_bytes(Catalog({harness.buffer.store!r}), {written.tokenizer!r}).text([1, 2])[0]\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
