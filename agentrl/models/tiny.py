"""The embedded default policy: a Qwen3 of 0.2 million parameters, or as small as its size says, and a BPE tokenizer
trained on the task text.

Small enough to learn on a laptop in minutes, and an ordinary Hugging Face model folder once saved.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.chat.hermes import format_assistant
from agentrl.models.policy import Policy, to_device
from agentrl.schemas.trajectory import Message, Role

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config

TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL = [PAD, TURN_START, TURN_END, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

PIECES = r"\p{L}+\n?|\p{N}{1,%d}|[^\p{L}\p{N}]+(?:\p{L}+\": [^\p{L}\p{N}]*)*"
"""What is never merged with its neighbours: a word, so many digits, and a run of anything else. A word has no space
before it, so that it is the same token wherever it stands and can be copied. JSON keys belong to the run that they
stand in, so that the constant part of a tool call is few tokens."""

# The Hermes dialect, as `agentrl.chat.hermes` writes it. Tools are shown by name and arguments alone: a model this
# small learns their use from demonstrations, and every token costs time.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools' }}"
    "{% for tool in tools %}{% set one = tool.function or tool %}"
    "{{ '\\n' + one.name + '(' + (one.parameters or {}).get('properties', {}) | join(', ') + ')' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ '<|im_start|>tool\\n<tool_response>' + message.content + '</tool_response>' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% set part = namespace(before='') %}"
    "{% if message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% set part.before = '\\n' %}{% endif %}"
    "{% if message.content %}{{ part.before + message.content }}{% set part.before = '\\n' %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{% set one = call.function or call %}"
    "{{ part.before + '<tool_call>{\"name\": ' + one.name | tojson + ', \"arguments\": ' }}"
    "{{ one.arguments if one.arguments is string else one.arguments | tojson }}{{ '}</tool_call>' }}"
    "{% set part.before = '\\n' %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class TinySize(BaseModel):
    """How large the tiny policy is. Tasks with longer texts and more words than those of ``lookup`` need more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: int = Field(192, ge=32, description="tokens of a row, prompt and observations included")
    turn: int = Field(40, ge=1, description="tokens of one turn")
    vocabulary: int = Field(512, ge=300, description="tokens that the tokenizer may have; a word of its own needs room")
    digits: int = Field(
        1, ge=1, le=9, description="digits in one token; a number that is one token is copied as a word is"
    )
    layers: int = Field(2, ge=1, description="of the transformer")
    width: int = Field(128, ge=32, multiple_of=32, description="of the residual stream; a head has 32")

    @property
    def heads(self) -> int:
        """Attention heads of a layer, which share keys and values."""
        return self.width // 32


DEFAULT_SIZE = TinySize()


def train_tokenizer(texts: Iterable[str], vocab_size: int, digits: int = 1) -> "PreTrainedTokenizerFast":
    """Byte-level BPE with up to ``digits`` digits in a token, the chat and tool tags as special tokens, and a ChatML
    template.

    Every text can be encoded; ``texts`` decide which merges the vocabulary has.
    """
    import re

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES % digits), behavior="isolated"),
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
    special = re.compile("|".join(map(re.escape, SPECIAL)))  # the trainer would merge parts of them
    tokenizer.train_from_iterator((part for text in texts for part in special.split(text) if part), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        extra_special_tokens=[token for token in SPECIAL if token not in (PAD, TURN_END)],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_config(size: TinySize, vocabulary: int, **more: Any) -> "Qwen3Config":
    """The architecture of a model of this size."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=size.width,
        head_dim=32,
        intermediate_size=size.width // 2,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=1,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        **more,
    )


def init_model(tokenizer: "PreTrainedTokenizerBase", seed: int, size: TinySize = DEFAULT_SIZE) -> "PreTrainedModel":
    """A Qwen3 with tied embeddings whose heads share keys and values: by default 2 layers, width 128 and 4 heads. Its
    configs say the tokens of a row and of a turn.

    A tool's user mostly copies: names from the question and from answers into calls. A model this small learns that
    late, and on some seeds hardly at all, if all weights are random. So attention begins by copying: the output
    projection of each head is the transpose of its value projection (mimetic initialisation, Trockman and Kolter 2023),
    so that a token which is attended to becomes more likely. Queries and keys are normalised in Qwen3, which helps too.
    ``initializer_range`` is 0.06: with the usual 0.02 it does not learn to copy within a few hundred steps.
    """
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = tiny_config(size, len(tokenizer), initializer_range=0.06, bos_token_id=None, **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.o_proj.weight.copy_(attention.v_proj.weight.T.repeat(1, config.num_attention_heads))
    model.generation_config = GenerationConfig(do_sample=True, max_new_tokens=size.turn, **special)
    return model


def tiny_policy(conversations: Iterable[Sequence[Message]], seed: int, size: TinySize = DEFAULT_SIZE) -> Policy:
    """An untrained tiny policy whose tokenizer is trained on the text of ``conversations``, one after the other."""
    tokenizer = train_tokenizer(_texts(conversations), size.vocabulary, size.digits)
    return Policy(to_device(init_model(tokenizer, seed, size)), tokenizer, name="tiny")


def _texts(conversations: Iterable[Sequence[Message]]) -> Iterator[str]:
    for messages in conversations:
        for message in messages:
            text = format_assistant(message) if message.role is Role.ASSISTANT else message.content
            yield f"{TURN_START}{message.role}\n{text}{TURN_END}"
