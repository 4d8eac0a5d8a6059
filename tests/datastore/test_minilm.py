"""MiniLM, which the extra ``minilm`` brings: found by itself, checked, equal to sentence-transformers, and worth more
than shared words."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_rows import build
from typer.testing import CliRunner

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.search import embedding, minilm
from agentrl.datastore.search.fusion import LATENT, NEURAL, fused, nearness
from agentrl.datastore.search.index import SearchIndex
from agentrl.datastore.search.lexical import Lexical
from agentrl.flows.cli import app

needs_package = pytest.mark.skipif(not minilm.is_installed(), reason="the extra minilm is not installed")

PROMPTS = [
    "Book a flight from Berlin to Lisbon next Friday under 200 euros.",
    "Cancel my gym membership and ask for a refund of this month.",
    "Track the parcel 4411 that I ordered last week.",
    "Track the parcel 4412 that I ordered last week.",
    "Explain why the sky is blue to a child.",
]


@pytest.fixture
def buffer(tmp_path: Path) -> TrajectoryBuffer:
    made = TrajectoryBuffer(tmp_path / "store")
    rows = [build(number, prompt=prompt, task_id=str(number)) for number, prompt in enumerate(PROMPTS)]
    made.append(rows, stage="s", fingerprint="f")
    return made


def first(buffer: TrajectoryBuffer, text: str, **options: object) -> int:
    return int(buffer.search(text, 1, **options)["task_id"].item())


@needs_package
def test_it_is_the_default_and_finds_meanings_names_and_numbers(buffer: TrajectoryBuffer) -> None:
    assert first(buffer, "plane ticket to Portugal") == 0
    assert first(buffer, "I want to quit the fitness club and get my money back") == 1
    assert first(buffer, "4411") == 2
    assert first(buffer, "parcel 4412") == 3
    state = SearchIndex(buffer).state()
    assert state is not None
    assert state.embedder == "minilm-53aa51172d142c89"
    assert SearchIndex(buffer, "embedded").state() is None
    own = SearchIndex.of_store(buffer)
    assert own is not None
    assert own.name == "minilm"


@needs_package
def test_its_index_shows_on_a_machine_without_it(buffer: TrajectoryBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SearchIndex.of_store(buffer) is None
    SearchIndex(buffer).refresh()
    monkeypatch.setattr(embedding, "is_installed", lambda: False)
    assert embedding.default_embedder() == "embedded"
    shown = SearchIndex.of_store(buffer)
    assert shown is not None
    assert shown.name == "minilm"
    SearchIndex(buffer).refresh()
    assert SearchIndex.of_store(buffer).name == "embedded"  # type: ignore[union-attr]


@needs_package
def test_what_it_does_not_look_at_is_counted(buffer: TrajectoryBuffer) -> None:
    assert SearchIndex(buffer).refresh().cut == 0
    long = build(9, prompt="word " * 400, task_id="9")
    buffer.append([long], stage="s", fingerprint="g")
    done = CliRunner().invoke(app, ["buffer", "index", "--store", str(buffer.store)])
    assert "1 prompts are longer than what the embedder looks at" in done.stdout
    assert SearchIndex(buffer).refresh().cut == 1


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, weights: bytes) -> None:
    """A package of the same name whose weights are others."""
    home = folder / minilm.PACKAGE
    (home / "model").mkdir(parents=True)
    (home / "__init__.py").touch()
    (home / "model" / "model.safetensors").write_bytes(weights)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


def test_weights_that_differ_are_refused(
    buffer: TrajectoryBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, b"other weights")
    minilm.minilm.cache_clear()
    with pytest.raises(StoreError, match=r"model.safetensors has the SHA-256 \w{16}…, and 53aa51172d142c89… is pinned"):
        buffer.search("plane")
    done = CliRunner().invoke(app, ["buffer", "index", "--store", str(buffer.store)])
    assert isinstance(done.exception, StoreError), "of which the command prints its one line"
    assert "\n" not in str(done.exception)
    assert SearchIndex(buffer).state() is None
    assert first(buffer, "the parcel 4411", embedder="embedded") == 2


def test_without_it_the_buffers_own_words_are_used_and_it_is_said(
    buffer: TrajectoryBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "is_installed", lambda: False)
    done = CliRunner().invoke(app, ["buffer", "index", "--store", str(buffer.store)])
    assert "embedded-" in done.stdout
    assert "one that knows their meaning: pip install" in done.stdout
    assert "[minilm]" in done.stdout
    monkeypatch.setattr(minilm, "find_spec", lambda name: None)
    minilm.minilm.cache_clear()
    with pytest.raises(StoreError, match="the embedder 'minilm' is not installed: pip install"):
        buffer.search("x", embedder="minilm")


@needs_package
@pytest.mark.slow
def test_vectors_are_those_of_sentence_transformers(capfd: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.find_spec(minilm.PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    texts = [*PROMPTS, "", "naïve Café 東京", "word " * 400, "a [SEP] b [PAD] [PAD] c", "x" * 3000]
    other = embedding.SentenceEmbedder(str(Path(spec.origin).parent / "model"))
    item = minilm.MiniLM()
    assert np.abs(item.encode(texts) - other.encode(texts)).max() < 1e-5
    assert item.cut(texts) == other.cut(texts) == 1
    assert item.encode([]).shape == (0, 384)
    assert "Loading weights" not in capfd.readouterr().err


@needs_package
def test_a_search_imports_no_library_of_models(buffer: TrajectoryBuffer) -> None:
    code = (
        "import sys; from agentrl.datastore import TrajectoryBuffer\n"
        f"TrajectoryBuffer({str(buffer.store)!r}).search('x')\n"
        "print(sorted(set(sys.modules) & {'transformers', 'sentence_transformers', 'sklearn'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_shares_of_words_weigh_rare_words_more() -> None:
    texts = ["the car of Ann", "the dog of Bob", "the house", "the the the"]
    shares = Lexical(texts).shares
    assert shares("The car of Ann?").tolist() == [1.0, *shares("the car of ann")[1:]]
    assert shares("the Ann") == pytest.approx([1.0, *[shares("the Ann")[1]] * 3])
    assert shares("the Ann")[1] < 0.1
    assert shares("Ann unknown")[0] < 0.5, "what no text holds is the rarest of all"
    assert not shares("nothing here").any()
    assert not shares("").any()


def test_a_neural_embedder_is_trusted_more_than_few_shared_words() -> None:
    near, share = np.array([0.5, 0.1, 0.2]), np.array([0.1, 0.45, 1.0])
    assert np.argsort(-fused(near, share, NEURAL)).tolist() == [2, 0, 1]
    assert np.argsort(-fused(near, share, LATENT)).tolist() == [2, 1, 0]
    assert fused(np.ones(1), np.ones(1), NEURAL).item() == fused(np.ones(1), np.ones(1), LATENT).item() == 1
    cosines = np.array([1.0, 0.75, 0.7])
    assert nearness(cosines, 0.7) == pytest.approx(nearness((cosines - 0.7) / 0.3, 0.0))
