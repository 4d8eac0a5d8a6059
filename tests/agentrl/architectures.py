"""Small policies of two architectures, for tests."""

from agentrl.environments import load_environment
from agentrl.models.policy import Policy
from agentrl.models.tiny import tiny_policy, train_tokenizer
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

ENV = load_environment("lookup")


def lookup_tasks(size: int = 64) -> list[Task]:
    return ENV.tasks({"train": size}, 0)["train"]


def expert_runs(size: int = 64, noise: float = 0.2) -> list[Trajectory]:
    return [demonstrate(ENV, task, noise, 0, f"expert-{n}") for n, task in enumerate(lookup_tasks(size))]


def qwen() -> Policy:
    return tiny_policy([row.messages for row in expert_runs()], seed=0)


HIDES_TOOLS = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message.role }}<|end|>\n\n{{ message.content }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
LLAMA_TEMPLATE = HIDES_TOOLS.replace(
    "{{ bos_token }}",
    "{{ bos_token }}{% for tool in tools or [] %}<|start|>tool<|end|>\n\n<tool_call>{{ tool.function.name }}: "
    "{{ tool.function.parameters.properties | join(', ') }}<|eot|>{% endfor %}",
)


def llama() -> Policy:
    """A Llama with grouped queries, untied embeddings and a chat template of another shape: a beginning-of-text token
    and no line break after a turn."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer([run.prompt for run in expert_runs()], 400)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>", "eos_token": "<|eot|>"})
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|start|>", "<|end|>"]})
    tokenizer.chat_template = LLAMA_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Policy(LlamaForCausalLM(config).eval(), tokenizer, "llama")


POLICIES = {"qwen": qwen, "llama": llama}
