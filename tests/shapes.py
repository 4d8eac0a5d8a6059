"""Configs of models that are larger than any machine of the tests."""

import json
from pathlib import Path
from typing import Any

from agentrl.placement.memory import ModelShape, config_of, shape_of_config

QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a config and no weights: that is enough for a plan."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shape_of(path: Path) -> ModelShape:
    """The shape of the model of a folder."""
    return shape_of_config(config_of(path))
