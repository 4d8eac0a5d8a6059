"""One optimiser step of TRL's trainers on an exported file."""

import json
from pathlib import Path
from typing import Any


def tokenizer_of_bytes() -> Any:
    """A tokenizer of single characters, with a chat template that renders calls."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(i): i for i in range(256)} | {"<pad>": 256, "<eos>": 257}
    bare = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    bare.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + (m['content'] or '') }}"
        "{% for c in m.get('tool_calls') or [] %}{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}"
        "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer


def train(name: str, path: Path, folder: Path) -> float:
    """Train one step and return how far the weights moved."""
    import torch
    from datasets import load_dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = tokenizer_of_bytes()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=258, **sizes)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    dataset = load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))
    if "tools" in dataset.column_names:
        dataset = dataset.map(lambda line: {"tools": json.loads(line["tools"]) or None})
    _trainer(name, model, dataset, tokenizer, folder).train()
    return max(float((a.detach() - b).abs().max()) for a, b in zip(model.parameters(), before, strict=True))


def _trainer(name: str, model: Any, dataset: Any, tokenizer: Any, folder: Path) -> Any:
    import trl

    common: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "bf16": False,
    }
    kind = {"trl-preference": "DPO", "trl-kto": "KTO"}.get(name, "SFT")
    config, trainer = _named(trl, f"{kind}Config"), _named(trl, f"{kind}Trainer")
    return trainer(model=model, args=config(**common), train_dataset=dataset, processing_class=tokenizer)


def _named(trl: Any, name: str) -> Any:
    """A class of TRL, which keeps some trainers in ``trl.experimental``."""
    if hasattr(trl, name):
        return getattr(trl, name)
    from importlib import import_module

    return getattr(
        import_module(f"trl.experimental.{name.removesuffix('Config').removesuffix('Trainer').lower()}"), name
    )
