"""Dialects of published agents that act by tags in running text: Search-R1 and ReTool. What a tool answers stands in
the assistant's own turn, so a call ends with its closing tag and not with an end-of-turn token."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.chat.hermes import Parsed
from agentrl.chat.template import Template
from agentrl.schemas.trajectory import Message, Role, ToolCall

_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ANSWER = ("<answer>", "</answer>")
_TAIL = 24


@dataclass(frozen=True)
class Tags:
    """How one agent calls its only ``tool``: ``argument`` is the text between the tags ``call``; the tool's answer
    stands between the tags ``result``."""

    tool: str
    argument: str
    call: tuple[str, str]
    result: tuple[str, str]


TAGS = {
    # Jin et al. 2025, "Search-R1: Training LLMs to Reason and Leverage Search Engines with Reinforcement Learning"
    "search_r1": Tags("search", "query", ("<search>", "</search>"), ("\n\n<information>", "</information>\n\n")),
    # Feng et al. 2025, "ReTool: Reinforcement Learning for Strategic Tool Use in LLMs"
    "retool": Tags(
        tool="code_interpreter",
        argument="code",
        call=("<code>\n```python\n", "\n```\n</code>"),
        result=("\n<interpreter>\n", "\n</interpreter>\n"),
    ),
}


class Tagged:
    """A chat template whose assistant acts by tags; the interface of :class:`agentrl.chat.template.Template`.

    A closing tag is several tokens, and which ones depends on what follows. So every token that may be the last of one
    is in ``stop_ids``, and :meth:`ended` says whether a turn that stopped at one is at its end.
    """

    writes_reasoning = writes_calls = True

    def __init__(self, template: Template, tags: Tags) -> None:
        self.inner, self.tags = template, tags
        template.tells_tools = template.tells_answers = False  # these agents are told of their tool in their prompts
        self.tokenizer = template.tokenizer
        self.prompt, self.ends, self.source = template.prompt, template.ends, template.source
        size = len(template.tokenizer)
        closing = [token for token in range(size) if ">" in str(template.tokenizer.decode([token]))]
        self.stop_ids = tuple(dict.fromkeys([*template.stop_ids, *closing]))
        self.end, self.id_form = template.end, template.id_form

    def render(self, messages: list[Message], generate: bool = False, tools: str = "[]") -> str:
        return self.inner.render(messages, generate, tools)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def ended(self, turn: Sequence[int]) -> bool:
        """Whether a turn that stopped is over: it ends with an end-of-turn token, or with the closing tag of a call."""
        if turn[-1] in self.inner.stop_ids:
            return True
        text = str(self.tokenizer.decode(list(turn[-_TAIL:]), skip_special_tokens=False))
        return text.rstrip().endswith(self.tags.call[1].strip())

    def turn(self, message: Message, answers: Sequence[Message] = (), before: Sequence[Message] = ()) -> str:
        """The text of a turn without its end. Raises ValueError if it calls another tool, or several."""
        parts = [f"<think>{message.reasoning}</think>"] if message.reasoning else []
        if not message.tool_calls:
            return "\n".join([*parts, message.content.join(_ANSWER)])
        [call, *more] = message.tool_calls
        arguments = call.parsed()
        if more or call.name != self.tags.tool or set(arguments) != {self.tags.argument}:
            raise ValueError(
                f"this dialect makes one call of {self.tags.tool}({self.tags.argument}) in a turn, and the turn calls "
                f"{', '.join(f'{call.name}({call.arguments})' for call in message.tool_calls)}"
            )
        parts += [message.content] if message.content else []
        return "\n".join([*parts, str(arguments[self.tags.argument]).join(self.tags.call)])

    def closing(self, message: Message) -> list[int]:
        """What ends a written turn: nothing after the closing tag of a call."""
        return [] if message.tool_calls else self.inner.closing(message)

    def after_turn(self, messages: list[Message]) -> str:
        """What stands between two turns: results of tools in running text, anything else as a turn of its own."""
        if any(message.role is not Role.TOOL for message in messages):
            return self.inner.after_turn(messages)
        divided = self.inner.control.divided
        return "".join(divided(message.content).join(self.tags.result) for message in messages)

    def read(self, turn: list[int], prompt: list[int], tools: str) -> Parsed:
        """See :class:`agentrl.chat.codec.Reader`."""
        ids = turn[:-1] if turn and turn[-1] in self.inner.stop_ids else turn
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        reasoning = "\n".join(part.strip() for part in _THINK.findall(text)) or None
        rest = _THINK.sub("", text)
        before, opened, called = rest.partition(self.tags.call[0].strip())
        if not opened:
            rest_of_turn, answered, answer = rest.partition(_ANSWER[0])
            content = answer.partition(_ANSWER[1])[0] if answered else rest_of_turn
            return Parsed(Message(role=Role.ASSISTANT, content=content.strip(), reasoning=reasoning))
        argument, closed, after = called.partition(self.tags.call[1].strip())
        if not closed or after.strip():
            message = Message(role=Role.ASSISTANT, content=text, reasoning=reasoning)
            return Parsed(message, f"{self.tags.call[0].strip()} without its end, or with text after it")
        arguments = json.dumps({self.tags.argument: argument.strip()})
        call = ToolCall(id="call_0", name=self.tags.tool, arguments=arguments)
        return Parsed(Message(role=Role.ASSISTANT, content=before.strip(), reasoning=reasoning, tool_calls=[call]))
