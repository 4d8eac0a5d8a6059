"""The embedded default policy: a Qwen2 of about half a million parameters and a BPE tokenizer trained on the task text.

Small enough to learn on a laptop in minutes, and an ordinary Hugging Face model folder once saved.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentrl.chat.hermes import format_assistant
from agentrl.models.policy import Policy, to_device
from schemas.trajectory import Role, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL = [PAD, TURN_START, TURN_END, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# Tools are not rendered: a model this small learns them from demonstrations, and every token costs time.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ '<|im_start|>tool\\n<tool_response>' + message.content + '</tool_response>' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Byte-level BPE with single digits, the chat and tool tags as special tokens, and a ChatML template.

    Every text can be encoded; ``texts`` decide which merges the vocabulary has.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # Words, single digits and runs of anything else are never merged with each other.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}|[^\p{L}\p{N}]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        extra_special_tokens=[token for token in SPECIAL if token not in (PAD, TURN_END)],
        chat_template=CHAT_TEMPLATE,
    )


def init_model(vocab_size: int, seed: int, max_tokens: int = 256) -> "PreTrainedModel":
    """A Qwen2 of 2 layers, width 128 and 4 heads with tied embeddings.

    ``initializer_range`` is 0.06: with the usual 0.02 a model this small does not learn to copy within a few hundred
    steps.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def tiny_policy(trajectories: Iterable[Trajectory], seed: int, vocab_size: int = 448) -> Policy:
    """An untrained tiny policy whose tokenizer is trained on the text of ``trajectories``."""
    texts = []
    for trajectory in trajectories:
        for message in trajectory.messages:
            text = format_assistant(message) if message.role is Role.ASSISTANT else message.content
            texts.append(f"{TURN_START}{message.role}\n{text}{TURN_END}")
    tokenizer = train_tokenizer(texts, vocab_size)
    return Policy(to_device(init_model(len(tokenizer), seed)), tokenizer, name="tiny")
