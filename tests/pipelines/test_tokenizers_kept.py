"""The ids of any row become text without its model, also in stores that were made before tokenizers were kept."""

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from datastore.catalog import Catalog
from flows.cli import app
from pipelines.handles import Model, Tasks
from pipelines.harness import Harness, Result
from pipelines.stages.trajectories import sample
from pipelines.tokenizers import token_bytes
from schemas.manifest import Ingredients, Kind, Manifest, OutputRecord


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def sampled(harness: Harness, warm: Model, tasks: Tasks) -> Result:
    limits = {"max_turn_tokens": 24, "max_tokens": 120}
    return harness.run(sample, {"samples": 1, "sampling": limits}, model=warm, tasks=tasks)


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


def test_stages_keep_the_tokenizer_that_made_their_rows(harness: Harness, warm: Model, sampled: Result) -> None:
    rows = sampled["trajectories"].read()
    table = token_bytes(Catalog(harness.buffer.store), rows[0].tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(warm.path)
    for row in rows:
        found, offsets = table.text(row.input_ids)
        assert found.decode() == tokenizer.decode(row.input_ids, skip_special_tokens=False)
        for message in row.messages:
            if message.token_start is not None and message.role == "user":
                assert message.content in found.decode()
        assert len(offsets) == row.n_tokens + 1


def test_rows_of_older_stores_are_read_by_their_models_tokenizer(
    harness: Harness, warm: Model, sampled: Result, tmp_path: Path
) -> None:
    row = sampled["trajectories"].read()[0]
    store = str(tmp_path / "store")
    policy = published(store, warm.path)
    catalog = Catalog(store)
    expected = token_bytes(Catalog(harness.buffer.store), row.tokenizer).text(row.input_ids)[0]
    assert token_bytes(catalog, row.tokenizer, policy).text(row.input_ids)[0] == expected
    assert token_bytes(catalog, row.tokenizer, str(warm.path)).text(row.input_ids)[0] == expected
    for gone in ("warm/12345678", "tiny", "", "/no/such/folder"):
        with pytest.raises(LookupError, match=r"agentrl buffer tokenizer FOLDER"):
            token_bytes(catalog, row.tokenizer, gone)
    with pytest.raises(LookupError, match="have no tokens"):
        token_bytes(catalog, "", policy)
    done = CliRunner().invoke(app, ["buffer", "tokenizer", str(warm.path), "--store", store, "--json"])
    assert json.loads(done.output) == [{"tokenizer": row.tokenizer}], done.output
    assert token_bytes(catalog, row.tokenizer).text(row.input_ids)[0] == expected


def test_reading_imports_neither_torch_nor_transformers(harness: Harness, sampled: Result) -> None:
    row = sampled["trajectories"].read()[0]
    program = (
        "import sys; from datastore.catalog import Catalog; from pipelines.tokenizers import token_bytes\n"
        f"assert token_bytes(Catalog({harness.buffer.store!r}), {row.tokenizer!r}).text([1, 2])[0]\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
