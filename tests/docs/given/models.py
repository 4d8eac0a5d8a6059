"""Folders with the config and the tokenizer of a model and no weights, which is enough for a plan."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from shapes import LLAMA_70B, QWEN_7B, model_folder

from agentrl.models.tiny import train_tokenizer

for name, config in (("LLAMA-70B", LLAMA_70B), ("QWEN-7B", QWEN_7B)):
    train_tokenizer(["city of the boss of Ann?"], 512).save_pretrained(model_folder(Path(name), config))
