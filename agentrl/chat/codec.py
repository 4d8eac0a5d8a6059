"""Between messages and tokens: rendering with a tokenizer's own chat template, and parsing what a policy sampled.

A conversation is encoded turn by turn and never as a whole, so that training sees exactly the tokens that were sampled.
The opening is encoded once, an assistant turn keeps its sampled tokens, and an observation is the template text between
two assistant turns.
"""

import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from agentrl.chat.hermes import Parsed, format_assistant, parse_assistant
from schemas.trajectory import Message, Role, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _template_message(message: Message) -> dict[str, Any]:
    """As chat templates of Hugging Face tokenizers expect it."""
    out: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.name:
        out["name"] = message.name
    if message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    return out


class ChatCodec:
    """Encodes and decodes conversations with one tokenizer.

    Raises ValueError if the tokenizer has no chat template or no end-of-turn token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat_template; save one with it, or use a chat model")
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token; set the token that ends an assistant turn")
        self.tokenizer = tokenizer
        self.stop_id: int = tokenizer.eos_token_id
        self._after_turn = self._text_after_turn()
        self._known: dict[str, list[int]] = {}

    def opening(self, messages: list[Message], tools: str = "[]") -> list[int]:
        """Token ids of the opening messages, up to the beginning of the assistant's turn."""
        return self._encode(self._render(messages, generate=True, tools=tools))

    def shows_tools(self) -> bool:
        """Whether the chat template writes the tools into the opening."""
        stem = [Message(role=Role.USER, content=".")]
        tool = {"type": "function", "function": {"name": "x", "description": "x", "parameters": {"type": "object"}}}
        return self._render(stem, tools=json.dumps([tool])) != self._render(stem)

    def assistant(self, message: Message) -> list[int]:
        """Token ids of an assistant turn that was written, not sampled; ends with the end-of-turn token."""
        return [*self._encode(format_assistant(message)), self.stop_id]

    def observations(self, messages: list[Message]) -> list[int]:
        """Token ids between the end-of-turn token of one assistant turn and the beginning of the next.

        Rollouts of one task often see the same observations, so encodings are remembered.
        """
        key = "\0".join(
            f"{message.role}\0{message.name}\0{message.tool_call_id}\0{message.content}" for message in messages
        )
        if key not in self._known:
            self._known[key] = self._encode_observations(messages)
        return list(self._known[key])

    def _encode_observations(self, messages: list[Message]) -> list[int]:
        stem = [Message(role=Role.USER, content="."), Message(role=Role.ASSISTANT, content=".")]
        before = self._render(stem, generate=False)
        after = self._render([*stem, *messages], generate=True)
        if not after.startswith(before):
            raise ValueError("the chat template rewrites earlier turns; use one that only appends")
        return self._encode(self._after_turn + after[len(before) :])

    def parse(self, ids: list[int]) -> Parsed:
        """Parse the token ids of one sampled turn, with or without its end-of-turn token."""
        turn = ids[:-1] if ids and ids[-1] == self.stop_id else ids
        return parse_assistant(str(self.tokenizer.decode(turn, skip_special_tokens=False)))

    def _text_after_turn(self) -> str:
        """What the template writes after an assistant's end-of-turn token, mostly a line break or nothing."""
        text = self._render([Message(role=Role.USER, content="."), Message(role=Role.ASSISTANT, content=".")])
        stop = self.tokenizer.eos_token
        return text[text.rfind(stop) + len(stop) :] if stop in text else ""

    def _render(self, messages: list[Message], generate: bool = False, tools: str = "[]") -> str:
        text = self.tokenizer.apply_chat_template(
            [_template_message(message) for message in messages],
            tools=json.loads(tools) or None,
            add_generation_prompt=generate,
            tokenize=False,
        )
        return str(text)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def align(messages: list[Message], mask: list[bool]) -> list[Message]:
    """Messages with their token spans, found from the action mask. Its runs are the opening, then alternately an
    assistant message and a block of observations. If several messages were encoded together, the first has the span of
    the run and the others an empty span at its end. Messages beyond the tokens get no span.
    """
    spanned: list[Message] = []
    runs = [(key, len(list(group))) for key, group in groupby(mask)]
    start = 0
    for _, group in groupby(messages, key=lambda message: message.role is Role.ASSISTANT):
        block = list(group)
        if not runs:
            spanned += block
            continue
        end = start + runs.pop(0)[1]
        spanned += [
            message.model_copy(update={"token_start": end if number else start, "token_end": end})
            for number, message in enumerate(block)
        ]
        start = end
    return spanned


def tokenize(trajectory: Trajectory, codec: ChatCodec, tokenizer: str) -> Trajectory:
    """A trajectory that was written, not sampled, with its tokens; one that has tokens is returned as it is.

    ``tokenizer`` is the tokenizer's fingerprint. Log-probabilities are NaN: a scripted or imported policy has none.
    Raises ValueError if no assistant message follows the opening, or two follow each other.
    """
    if trajectory.input_ids:
        return trajectory
    ids: list[int] = []
    mask: list[bool] = []
    for is_action, group in groupby(trajectory.messages, key=lambda message: message.role is Role.ASSISTANT):
        block = list(group)
        if is_action and (not ids or len(block) > 1):
            raise ValueError(f"{trajectory.trajectory_id}: an assistant message must follow a user or tool message")
        if is_action:
            new = codec.assistant(block[0])
        else:
            new = codec.observations(block) if ids else codec.opening(block, trajectory.tools)
        ids += new
        mask += [is_action] * len(new)
    return trajectory.model_copy(
        update={
            "messages": align(trajectory.messages, mask),
            "tokenizer": tokenizer,
            "input_ids": ids,
            "action_mask": mask,
            "logprobs": [float("nan")] * len(ids),
            "n_tokens": len(ids),
            "n_action_tokens": sum(mask),
        }
    )
