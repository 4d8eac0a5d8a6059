"""A GGUF small enough for tests, of a model with random weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.models.tiny import CHAT_TEMPLATE, train_tokenizer

HIDES_TOOLS = (  # as SmolLM2's
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXTS = ["Ann has 3 apples and 12 pears.", '{"name": "calculate", "arguments": {"expression": "12 + 30"}}'] * 4


def write(path: Path, template: str | None = HIDES_TOOLS, architecture: str = "llama", leave_out: str = "") -> Any:
    """Write a Llama of two layers, and return the model that it holds."""
    tokenizer = train_tokenizer(TEXTS, 320)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, rms_norm_eps=1e-5,
        )
    ).eval()  # fmt: skip
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokenizer))
    _add_tokenizer(writer, tokenizer, template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" or (leave_out and leave_out in name):
            continue
        array = weight.detach().numpy()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates pairs of neighbours
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: Any, tokenizer: Any, template: str | None) -> None:
    import json

    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    special = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in special else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if template is not None:
        writer.add_chat_template(template)


WITH_TOOLS = CHAT_TEMPLATE
