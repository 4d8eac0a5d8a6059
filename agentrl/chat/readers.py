"""Reading sampled turns: by the tokenizer's own response template, or in the Hermes form."""

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agentrl.chat.hermes import Parsed, parse_assistant
from agentrl.chat.template import THOUGHT, Template
from agentrl.schemas.trajectory import Message, Role, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TAIL = 16  # tokens that hold what a generation prompt ends with
_SHORT_TAIL = 4  # which most prompts have in common


def bare(ids: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    """A turn without its end-of-turn token."""
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


def broken(text: str, error: str, reasoning: str | None = None) -> Parsed:
    """A turn whose calls cannot be read: its text is the content."""
    return Parsed(Message(role=Role.ASSISTANT, content=text, reasoning=reasoning), error)


def as_text(arguments: Any) -> str:
    """Arguments as JSON text. Raises ValueError if they are none."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return json.dumps(arguments, allow_nan=False)


def begun(template: Template, prompt: list[int], mark: str = THOUGHT) -> bool:
    """Whether the generation prompt begins a thought. Some do not after a tool's answer."""
    if not prompt:
        return template.prompt.rstrip().endswith(mark)
    text = _text(template.tokenizer, tuple(prompt[-_SHORT_TAIL:])).rstrip()
    if len(text) < len(mark):
        text = str(template.tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)).rstrip()
    return text.endswith(mark)


@lru_cache(maxsize=256)
def _text(tokenizer: "PreTrainedTokenizerBase", ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


class HermesReader:
    """Reads ``<think>`` and ``<tool_call>`` tags."""

    def __init__(self, template: Template) -> None:
        self.template = template

    def read(self, turn: list[int], prompt: list[int], tools: str) -> Parsed:
        text = str(self.template.tokenizer.decode(bare(turn, self.template.stop_ids), skip_special_tokens=False))
        return parse_assistant((THOUGHT if begun(self.template, prompt) else "") + text)


class ResponseTemplateReader:
    """Reads by the ``response_template`` that the tokenizer carries (transformers 5.13 and later)."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.tokenizer: PreTrainedTokenizerBase = template.tokenizer

    def read(self, turn: list[int], prompt: list[int], tools: str) -> Parsed:
        text = str(self.tokenizer.decode(turn, skip_special_tokens=False))
        if turn and turn[-1] not in self.template.stop_ids:
            text += self.template.end
        before = str(self.tokenizer.decode(prompt, skip_special_tokens=False)) if prompt else self.template.prompt
        try:
            parsed = self.tokenizer.parse_response(text, prefix=before, tools=json.loads(tools) or None)
            calls = [
                ToolCall(
                    id=f"call_{number}", name=call["function"]["name"], arguments=as_text(call["function"]["arguments"])
                )
                for number, call in enumerate(parsed.get("tool_calls") or [])
            ]
        except (ValueError, KeyError, TypeError) as error:
            return broken(text, f"the response template cannot read it: {error}")
        reasoning = next(
            (parsed[key] for key in ("reasoning_content", "reasoning", "thinking") if parsed.get(key)), None
        )
        message = Message(
            role=Role.ASSISTANT,
            content=(parsed.get("content") or "").strip(),
            reasoning=reasoning.strip() if reasoning else None,
            tool_calls=calls,
        )
        return Parsed(message)
