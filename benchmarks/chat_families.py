"""Small tokenizers that carry the chat templates of real model families, those of the TRL wheel."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import add_response_schema

TEMPLATES = Path(trl.__file__).parent / "chat_templates"

CONTROL = re.compile(
    r"<\|[^|<>'\" ]{1,30}\|>|<｜[^｜<>]{1,40}｜>|</?(?:think|tool_call|tool_response|arg_key|arg_value|sop)>|\[gMASK\]"
    r"|<(?:start|end)_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|</?seed:[a-z_]+>|<SPECIAL_\d+>|\]~b\]|\[e~\["
    r"|</?(?:assistant|sep|s|end_of_sentence|beginning_of_sentence)>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|ARGS|CALL_ID|TOOL_CONTENT|THINK|SYSTEM_PROMPT)\]"
)
"""The control tokens that templates write."""

ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "gemma4": "<turn|>",
    "gemma": "<end_of_turn>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "llama3": "<|eot_id|>",
    "phi": "<|endoftext|>",
}
"""The token that ends a text, by the beginning of a template's name; if none fits, the first of these that the template
writes."""
KNOWN_ENDS = [
    "<|eot_id|>", "<｜end▁of▁sentence｜>", "<turn|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<seed:eos>",
    "<|assistant_end|>", "<end_of_sentence>", "[e~[", "</assistant>", "<SPECIAL_12>", "<|return|>", "<|end_of_text|>",
    "<|im_end|>", "<sep>", "<|end|>", "</s>", "<|user|>",
]  # fmt: skip
BEGINS = {"deepseek": "<｜begin▁of▁sentence｜>", "gemma": "<bos>"}

OTHERS = {  # tokens that the families' vocabularies have and their templates do not write
    "gemma4": ["<eos>", "<|image>", "<|image|>", "<image|>"],
    "glm": ["<|endoftext|>"],
    "llama3": ["<|end_of_text|>", "<|eom_id|>", "<|python_tag|>"],
    "": [
        "<|endoftext|>",
        "<think>",
        "</think>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ],
}


def _of(table: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for key, value in table.items() if key and name.startswith(key)), default)


@lru_cache
def tokenizer_of(name: str, response_template: bool = False, folder: Path = TEMPLATES) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the control tokens and the chat template of a family. Like real ones, it splits
    words from punctuation and joins line breaks with the punctuation before them."""
    template = (folder / f"{name}.jinja").read_text()
    written = next((end for end in KNOWN_ENDS if end in template), "<|im_end|>")
    end, begin = _of(ENDS, name, written), _of(BEGINS, name, "<|begin_of_text|>")
    control = {*CONTROL.findall(template), *OTHERS[""], *_of(OTHERS, name, []), end, begin}
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=sorted(control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([template], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, bos_token=begin, unk_token="<unk>", chat_template=template
    )
    return add_response_schema(made) if response_template else made
