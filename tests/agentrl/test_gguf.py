"""GGUF files as model folders: every weight, the tokenizer and the chat template; what cannot be read is refused."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import HIDES_TOOLS, write

from agentrl.models import gguf
from agentrl.models.policy import Policy
from agentrl.schemas.trajectory import Message, Role
from benchmarks import smollm


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentrl" / "models"


def test_a_folder_holds_what_the_file_holds(tmp_path: Path) -> None:
    model = write(tmp_path / "x.gguf")
    policy = Policy.load(gguf.model_folder(tmp_path / "x.gguf", "d1"))
    assert not hasattr(policy.model.config, "quantization_config")
    read = policy.model.state_dict()
    assert read.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(read[name], weight, rtol=0, atol=0)
    ids = torch.tensor([policy.tokenizer.encode("Ann has 12 pears.")])
    torch.testing.assert_close(policy.model(ids).logits, model(ids).logits)
    assert policy.tokenizer.chat_template == HIDES_TOOLS
    assert policy.tokenizer.eos_token == "<|im_end|>"
    policy.save(tmp_path / "again")  # transformers would refuse a model "quantized with gguf"
    assert policy.tokenizer_fingerprint == Policy.load(tmp_path / "again").tokenizer_fingerprint


def test_it_is_converted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.gguf")
    first = gguf.model_folder(tmp_path / "x.gguf", "d1")
    monkeypatch.setattr(gguf, "convert", pytest.fail)
    assert gguf.model_folder(tmp_path / "x.gguf", "d1") == first
    assert gguf.config_folder(tmp_path / "x.gguf", "d1") == first
    assert [path.name for path in cache.iterdir()] == [first.name]


@pytest.mark.parametrize("make", [gguf.model_folder, gguf.config_folder])
def test_a_file_is_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path, str], Path]
) -> None:
    package, parsed = pytest.importorskip("gguf"), []
    reader = package.GGUFReader

    def counting(path: str, *mode: str) -> Any:
        parsed.append(path)
        return reader(path, *mode)

    monkeypatch.setattr(package, "GGUFReader", counting)
    write(tmp_path / "x.gguf")
    make(tmp_path / "x.gguf", "d1")
    assert len(parsed) == 1
    assert package.GGUFReader is counting, "others get what they had"


def test_its_config_is_had_without_its_weights(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf")
    folder = gguf.config_folder(tmp_path / "x.gguf", "d1")
    assert (folder / "config.json").is_file()
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("kept", [2, 30, 3000, -9])
def test_a_file_that_is_cut_off_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path, kept: int) -> None:
    write(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model '.*x.gguf' cannot be read: it .*; fetch it again") as raised:
        gguf.model_folder(tmp_path / "x.gguf", "d1")
    assert "\n" not in str(raised.value)
    assert not list(cache.iterdir())


def test_what_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "odd.gguf", architecture="rwkv9")
    with pytest.raises(ValueError, match=r"model '.*odd.gguf' cannot be read: .*rwkv9.*take a GGUF of an architecture"):
        gguf.model_folder(tmp_path / "odd.gguf", "d1")
    write(tmp_path / "less.gguf", leave_out="layers.1.mlp.up_proj")
    with pytest.raises(ValueError, match=r"lacks 1 of the model's weights, such as model.layers.1.mlp.up_proj.weight"):
        gguf.model_folder(tmp_path / "less.gguf", "d2")
    write(tmp_path / "base.gguf", template=None)
    with pytest.raises(ValueError, match=r"has no chat template .*take a chat model"):
        gguf.config_folder(tmp_path / "base.gguf", "d3")
    (tmp_path / "not.gguf").write_text("no GGUF at all")
    with pytest.raises(ValueError, match="it does not begin with GGUF"):
        gguf.config_folder(tmp_path / "not.gguf", "d4")


def test_a_file_counts_as_gguf_by_its_name_or_its_beginning(tmp_path: Path) -> None:
    write(tmp_path / "x.bin")
    (tmp_path / "cut.gguf").write_bytes(b"")
    (tmp_path / "text").write_text("text")
    matches = [gguf.is_gguf(tmp_path / name) for name in ("x.bin", "cut.gguf", "text", "missing.gguf")]
    assert matches == [True, True, False, False]


def test_the_folder_of_smollm_is_made_of_the_very_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.gguf")
    digest = hashlib.sha256((tmp_path / "x.gguf").read_bytes()).hexdigest()
    with pytest.raises(
        SystemExit, match=rf"has the sha256 {digest}, not {smollm.SHA256}: it is another file, or broken"
    ):
        smollm.folder_of(tmp_path / "x.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    smollm.folder_of(tmp_path / "x.gguf", tmp_path / "folder", digest)
    assert Policy.load(tmp_path / "folder").codec.dialect == "hermes (tools in the system message)"
    with pytest.raises(SystemExit, match="is there already"):
        smollm.folder_of(tmp_path / "x.gguf", tmp_path / "folder", digest)


@pytest.mark.slow
def test_smollm_says_something_sensible() -> None:
    folder = Path(__file__).parents[2] / "build" / "smollm"
    if not folder.is_dir():
        pytest.skip("there is no build/smollm; make smollm")
    policy = Policy.load(folder)
    ids = policy.codec.opening([Message(role=Role.USER, content="What is the capital of France?")])
    with torch.no_grad():
        text = policy.model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    assert "Paris" in policy.tokenizer.decode(text)
    assert policy.model.num_parameters() == 134_515_008
