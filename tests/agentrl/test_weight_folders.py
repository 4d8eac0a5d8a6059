"""Folders of weights for servers: files of bounded size with an index, whatever the weights come from."""

import json
from pathlib import Path

import pytest
import torch
from small_models import small_model

from agentrl.engines import weights
from agentrl.engines.base import EngineError
from agentrl.engines.weights import WeightFiles, tensors_of, write_folder
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [10_000, 256 << 20])
def test_a_model_and_its_folder_give_the_same_shards(
    size: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is tied to the embedding, and has a tensor of its own for servers."""
    monkeypatch.setattr(weights, "SHARD_BYTES", size)
    policy = Policy(small_model(seed=2).to(dtype), train_tokenizer(["some text"], 300), "small")
    policy.model.register_buffer("scalar", torch.tensor(3))
    policy.save(tmp_path / "saved")
    of_model = write_folder(policy.model, policy.tokenizer, tmp_path / "of the model")
    of_folder = write_folder(tmp_path / "saved", None, tmp_path / "of the folder", like=of_model)
    wanted = tensors_of(policy.model)
    assert "lm_head.weight" in wanted
    for folder in (of_model, of_folder):
        written = tensors_of(folder)
        assert written.keys() == wanted.keys()
        assert all(written[name].equal(value) for name, value in wanted.items())
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if size > 10_000:
            assert files == ["model.safetensors"]
            assert not index.exists()
            continue
        assert len(files) > 2
        assert max((folder / name).stat().st_size for name in files) < 20_000
        assert sorted(set(json.loads(index.read_text())["weight_map"].values())) == files


@pytest.mark.parametrize("from_folder", [False, True])
def test_matrices_have_the_dtype_of_the_servers_and_vectors_their_own(from_folder: bool, tmp_path: Path) -> None:
    """vLLM keeps some vectors in float32, such as the biases of routers."""
    policy = Policy(small_model(seed=2), train_tokenizer(["some text"], 300), "small")
    policy.model.register_buffer("scalar", torch.tensor(3))
    policy.save(tmp_path / "saved")
    source = tmp_path / "saved" if from_folder else policy.model
    folder = write_folder(source, policy.tokenizer, tmp_path / "served", dtype="bfloat16")
    written, trained = tensors_of(folder), tensors_of(policy.model)
    assert written.keys() == trained.keys()
    for name, tensor in trained.items():
        wanted = tensor.bfloat16() if tensor.ndim > 1 else tensor
        assert written[name].dtype == wanted.dtype
        assert written[name].equal(wanted)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_no_more_than_some_shards_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 4000)
    tensors = {f"layer.{number}": torch.full((300,), float(number)) for number in range(20)}
    shards = WeightFiles(tmp_path, tensors)
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        shards.add({name: tensor})
        assert len(shards._ready) < 3
        assert len(shards._written) < weights.WRITERS
        assert len(list(tmp_path.glob("*.safetensors"))) <= number // 3 + (number == 20)
    shards.end()
    assert len(list(tmp_path.glob("*.safetensors"))) == 7
    written = tensors_of(tmp_path)
    assert all(written[name].equal(tensor) for name, tensor in tensors.items())


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    shards = WeightFiles(tmp_path, {"one": torch.ones(2), "two": torch.ones(2)})
    shards.add({"one": torch.ones(2)})
    with pytest.raises(EngineError, match=r"not whole: 1 tensors, such as \['two'\]"):
        shards.end()
