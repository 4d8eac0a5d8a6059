"""The token sequences of an episode, each with the agent that it is of and what it is for.

An agent program asks for more than its turns: titles, summaries of what it forgets, sub-agents. Requests only say so in
part, so that the rest is told from what they hold.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from agentrl.engines.base import Session
from agentrl.recorder.tree import SampledTurn, received
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Role

Kind = Literal["turn", "side", "compaction", "subagent"]

COMPACTION_PROMPTS = ("CRITICAL: Respond with TEXT ONLY",)
"""What is in texts that programs append to a conversation to have it summarised (Claude Code)."""

_SUMMARY = re.compile(r"<summary>(.*?)(?:</summary>|$)", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """One token sequence of an episode: the turns up to one that nothing follows. The first ``shared`` turns belong to
    the earlier line ``parent`` too, which trains on them; without shared turns, ``parent`` is the line that called this
    sub-agent. ``trained`` is False for what is no part of the work: side calls, and summaries that were not used."""

    turns: list[SampledTurn]
    shared: int
    parent: int | None
    agent: str
    kind: Kind = "turn"
    trained: bool = True

    @property
    def own(self) -> list[SampledTurn]:
        """The turns that belong to no earlier line."""
        return self.turns[self.shared :]

    def session(self) -> tuple[Session, int]:
        """All tokens, with the conversation and its tools, and how many of them belong to the earlier line. It has the
        seconds of turns that belong to no earlier one; those of tools, which the client calls, nobody knows."""
        session, fork_at = Session(), 0
        for number, turn in enumerate(self.turns):
            start = len(session.ids)
            session.observe(turn.heard_ids)
            end = len(session.ids)
            for index, message in enumerate(turn.heard):
                span = {"token_start": end if index else start, "token_end": end}
                session.messages.append(message.model_copy(update=span))
            if number < self.shared:
                session.observe(turn.turn.ids)
                fork_at = len(session.ids)
            elif turn.constrained:
                session.observe(turn.turn.ids)
            else:
                session.act(turn.turn)
            if number >= self.shared and turn.seconds is not None:
                session.seconds[len(session.messages)] = turn.seconds
            span = {"token_start": end, "token_end": len(session.ids)}
            session.messages.append(turn.message.model_copy(update=span))
        session.tools = self.turns[0].tools
        return session, fork_at


def lines(turns: Sequence[SampledTurn]) -> Iterator[Line]:
    """The lines of a tree: conversations in the order of their first requests, side calls after the others; lines of
    one in the order of their last turns, and summaries that were not used after those. Turns that no client has
    received and that nothing follows are left out. The first conversation that is no side call is of the agent
    ``main``, and so are others with the same system message and tools, unless the client says which agent asked."""
    kept = received(turns)
    roots = sorted((turn for turn in turns if turn in kept and turn.parent is None), key=lambda root: root.number)
    used = {turn for turn in kept if not turn.children and _is_used(turn, roots)}
    summaries = {turn for turn in kept if _summarises(turn, turn in used)}
    unused = {turn for turn in summaries if not turn.children} - used
    ends = [turn for turn in turns if turn in kept and not any(child in kept - unused for child in turn.children)]
    sides = {root for root in roots if root not in summaries and _is_side(root, roots)}
    paths = [turn.path for turn in ends]
    paths.sort(key=lambda path: (path[0] in sides, path[0].number, path[-1] in unused))
    prompts = {turn: (path[0], list(_prompts(turn))) for path in paths for turn in path}
    callers = {root: _caller_of(root, prompts) for root in roots}
    owner: dict[SampledTurn, int] = {}
    names: dict[object, str] = {}
    for number, path in enumerate(paths):
        shared = sum(1 for _ in takewhile(lambda turn: turn in owner, path))
        for turn in path[shared:]:
            owner[turn] = number
        root, alone = path[0], len(path) == shared + 1
        kind: Kind = "turn"
        if alone and path[-1] in summaries:
            kind = "compaction"
        elif root in sides:
            kind = "side"
        elif callers[root] or root.agent:
            kind = "subagent"
        before = path[shared - 1] if shared else callers[root] if kind == "subagent" else None
        parent = owner.get(before) if before else None
        trained = kind != "side" and path[-1] not in unused
        yield Line(path, shared, parent, _agent(root, kind, names), kind, trained)


def _caller_of(
    root: SampledTurn, prompts: Mapping[SampledTurn, tuple[SampledTurn, Sequence[str]]]
) -> SampledTurn | None:
    """The earlier turn of another conversation that calls the sub-agent of this one: its prompt is said in it.
    ``prompts`` gives for each turn its first turn, and what it calls agents with."""
    asked = "\n".join(message.content for message in root.heard if message.role is Role.USER)
    for turn, (first, texts) in prompts.items():
        if first is not root and turn.number < root.number and any(text in asked for text in texts):
            return turn
    return None


def _is_side(root: SampledTurn, roots: Sequence[SampledTurn]) -> bool:
    """Whether a conversation that is no summary is one turn that the client says is no part of the work, or one without
    tools, which other conversations have."""
    toolless = root.tools == "[]" and any(other.tools != "[]" for other in roots)
    return not root.children and (root.kind == "side" or toolless)


def _agent(root: SampledTurn, kind: Kind, names: dict[object, str]) -> str:
    """The name of the agent of a conversation; ``names`` has those of earlier ones."""
    if kind == "side":
        return "side"
    system = "\n".join(message.content for message in root.heard if message.role is Role.SYSTEM)
    return names.setdefault(root.agent or (system, root.tools), f"agent-{len(names) + 1}" if names else "main")


def _summarises(turn: SampledTurn, used: bool) -> bool:
    """Whether a turn is a summary that its client asked for: the client says so, it asked as such clients do, or it
    began another conversation with the answer to a branch, or to a question without tools, which is then ``used``."""
    if turn.kind == "compaction":
        return True
    questions = [message.content for message in turn.heard if message.role is Role.USER]
    if questions and any(prompt in questions[-1] for prompt in COMPACTION_PROMPTS):
        return True
    branch = turn.parent is not None and len(turn.parent.children) > 1
    toolless = turn.parent is None and turn.tools == "[]"
    return (branch or toolless) and not turn.message.tool_calls and used


def _is_used(turn: SampledTurn, roots: Sequence[SampledTurn]) -> bool:
    """Whether a later conversation begins with what a turn says, or with the summary in it."""
    text = turn.message.content.strip()
    summary = _SUMMARY.search(text)
    parts = [part for part in (text, summary.group(1).strip() if summary else "") if part]
    later = [root for root in roots if root.number > turn.number]
    heard = [message.content for root in later for message in root.heard if message.role is not Role.ASSISTANT]
    return any(part in message for message in heard for part in parts)


def _prompts(turn: SampledTurn) -> Iterator[str]:
    """The texts that a turn gives its calls under the name ``prompt``."""
    for call in turn.message.tool_calls:
        with contextlib.suppress(ValueError):
            arguments = loads(call.arguments)
            prompt = arguments.get("prompt") if isinstance(arguments, dict) else None
            if isinstance(prompt, str) and prompt.strip():
                yield prompt.strip()
