"""What notebooks show of trajectories, pairs and tables: HTML without scripts, with all styles inline.

Text of a store is escaped, and characters that turn text around or have no shape become signs. Nothing is longer than
:data:`LIMIT` bytes; what is left out is counted. Token ids become text if a store that is open in this process keeps
their tokenizer. Rows and pairs render nothing themselves: ``agentrl`` tells IPython that they are shown by this module.
"""

import html
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.datastore.artifacts.tokenizers import TextOf
    from agentrl.schemas.pair import Pair
    from agentrl.schemas.trajectory import Message, Trajectory

LIMIT = 200_000
_LAST = 1_000
"""Bytes that stay free for what is said at the end."""

_found: dict[str, "TextOf"] = {}

_SURPRISE = (0.1, 0.5, 1.0, 2.0, 4.0)
"""Steps of surprise in nats, as the viewer's lens has them; beyond the last one the colour stays."""
_PLAIN = "opacity:.65"
_TRAINED = "background:rgba(59,130,246,.22)"
_MONO = "font-family:ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate"
_SMALL = "font-size:11px;opacity:.75"

Run = tuple[str, str]
"""A style, and the text that has it."""


def escaped(text: object) -> str:
    """Text as HTML. Control characters, invisible ones and those that turn text around are signs."""
    return html.escape("".join(map(_sign, str(text))), quote=True)


def _sign(character: str) -> str:
    if character in "\n\t" or (character.isascii() and character.isprintable()):
        return character
    kind = unicodedata.category(character)
    if kind == "Cc" and ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    return f"⟦U+{ord(character):04X}⟧" if kind in ("Cc", "Cf", "Cs", "Zl", "Zp") else character


class Frame:
    """HTML that stops growing before it is too long."""

    def __init__(self) -> None:
        self._parts = ['<div style="font:13px/20px system-ui,sans-serif">']
        self._left = LIMIT - _LAST - len(self._parts[0])

    def add(self, part: str, keep: int = 0) -> bool:
        """Returns whether there was room for a part that is HTML already, beside ``keep`` bytes that stay free."""
        size = len(part.encode(errors="replace"))
        if size > self._left - keep:
            return False
        self._left -= size
        self._parts.append(part)
        return True

    def block(self, runs: Iterable[Run], style: str = _MONO, share: float = 1.0, end: str = "</div>") -> bool:
        """An element of texts with styles, which takes at most a ``share`` of the room. Returns whether there was room
        for all of them; the beginning is shown."""
        keep = int(self._left * (1 - share)) + len(end)
        if not self.add(f'<div style="{style}">', keep):
            return False
        pieces = ((how, text[start : start + 4000]) for how, text in runs for start in range(0, len(text), 4000))
        whole = all(self.add(_span(how, text), keep) for how, text in pieces)
        self.add(end)
        return whole

    def done(self, note: str = "") -> str:
        end = f'<p style="{_SMALL}">{escaped(note[:300])}</p>' if note else ""
        return "".join([*self._parts, end, "</div>"])


def _span(style: str, text: str) -> str:
    return f'<span style="{style}">{escaped(text)}</span>' if style else escaped(text)


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows as a table; at most 300 characters of a text."""
    cell = "text-align:left;padding:2px 12px 2px 0;vertical-align:top"
    head = "".join(f'<th style="{cell}">{escaped(name)}</th>' for name in columns)
    lines = ("".join(f'<td style="{cell}">{escaped(_cell(row[name]))}</td>' for name in columns) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 300 else text[:300] + "…"


def text_of(tokenizer: str) -> "TextOf | None":
    """A tokenizer by its fingerprint, from the stores that are open; None if none of them has it."""
    if tokenizer and tokenizer not in _found:
        from agentrl.datastore.buffer import open_buffers

        made = next((text for buffer in open_buffers() if (text := buffer.text_of(tokenizer))), None)
        if made is None:
            return None
        _found[tokenizer] = made
    return _found.get(tokenizer)


def runs(ids: Sequence[int], styles: Sequence[str], text: "TextOf | None") -> Iterator[Run]:
    """Tokens as texts with styles, those of one style together: their text, or their ids if nobody knows it."""
    data, bounds = text(ids) if text and len(ids) else (b"", [])
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and styles[end] == styles[start] and end - start < 512:
            continue
        if text:
            yield styles[start], data[int(bounds[start]) : int(bounds[end])].decode(errors="replace")
        else:
            yield styles[start], "".join(f"‹{number}›" for number in ids[start:end])
        start = end


def _style(sampled: bool, logprob: float) -> str:
    if not sampled:
        return _PLAIN
    if math.isnan(logprob):
        return _TRAINED
    step = sum(-logprob >= threshold for threshold in _SURPRISE)
    return f"{_TRAINED};box-shadow:inset 0 -3px rgba(217,119,6,{step / len(_SURPRISE):.1f})"


_LEGEND = (
    (_TRAINED, "sampled by the policy"),
    (_PLAIN, " other tokens "),
    (_style(True, -9.0), "surprising to it: log-prob of −4 or less"),
)


def trajectory(row: "Trajectory") -> str:
    """A trajectory: its outcome, and its messages with their tokens in place, coloured by mask and log-prob."""
    frame = Frame()
    outcome = {True: "✓ success", False: "✗ failed", None: "unscored"}[row.success]
    reward = "none" if row.reward is None else f"{row.reward:g}"
    frame.add(f"<b>{escaped(row.trajectory_id[:300])}</b>")
    made = f"{row.stage} {row.fingerprint[:8]}, policy {row.policy} version {row.policy_version}"
    facts = f"{outcome}, reward {reward}, {row.termination.value}; {row.env}, {row.split}, level {row.level}; {made}"
    frame.block([("", facts[:2000])], _SMALL)
    text = text_of(row.tokenizer) if row.input_ids else None
    known = row.logprobs if len(row.logprobs) == len(row.input_ids) else [math.nan] * len(row.input_ids)
    styles = [_style(*pair) for pair in zip(row.action_mask, known, strict=True)]
    if row.input_ids:
        frame.block(_LEGEND, _SMALL)
    shown = end = 0
    last = max((number for number, message in enumerate(row.messages) if message.token_end is not None), default=-1)
    for number, message in enumerate(row.messages):
        start = end  # what the template puts between two messages is shown with the second one
        end = len(row.input_ids) if number == last else max(end, min(message.token_end or 0, len(row.input_ids)))
        tokens = runs(row.input_ids[start:end], styles[start:end], text) if text and end > start else None
        if not (frame.add(_head(message, end - start)) and frame.block(tokens or _said(message))):
            return frame.done(_cut(row, shown))
        shown = number + 1
    if row.input_ids and text is None:
        frame.add(f'<div style="{_SMALL}">ids; their text is shown if a store that keeps their tokenizer is open</div>')
        if not frame.block(runs(row.input_ids, styles, None)):
            return frame.done(_cut(row, shown))
    return frame.done("" if row.input_ids else "no token ids: this row can be read, but not trained on as sampled")


def _head(message: "Message", tokens: int) -> str:
    name = f" {escaped(message.name[:200])}" if message.name else ""
    more = "" if message.reward is None else f", reward {message.reward:g}"
    return f'<div style="{_SMALL};margin-top:8px"><b>{message.role.value}</b>{name}, {tokens:,} tokens{more}</div>'


def _said(message: "Message") -> Iterator[Run]:
    if message.reasoning:
        yield "opacity:.75;font-style:italic", message.reasoning + "\n"
    yield "", message.content
    for call in message.tool_calls:
        yield "font-weight:600", f"\n→ {call.name}"
        yield "", f"({call.arguments})"


def _cut(row: "Trajectory", messages: int) -> str:
    whole = f"{messages} of {len(row.messages)} messages are whole, of {row.n_tokens:,} tokens"
    return f"cut at {LIMIT // 1000} kB: {whole}; agentrl view shows all"


def pair(shown_pair: "Pair") -> str:
    """A preference pair: each side from the first token in which they differ, then what both share. Tokens that the
    loss covers are blue."""
    frame, text = Frame(), text_of(shown_pair.tokenizer)
    frame.add(f"<b>{escaped(shown_pair.pair_id[:300])}</b>")
    frame.block([("", f"{shown_pair.kind.value}, {shown_pair.method}, task {shown_pair.task_id}"[:2000])], _SMALL)
    sides = {"chosen": (shown_pair.chosen_ids, shown_pair.chosen_mask, shown_pair.chosen_id, shown_pair.chosen_reward)}
    sides["rejected"] = (
        shown_pair.rejected_ids,
        shown_pair.rejected_mask,
        shown_pair.rejected_id,
        shown_pair.rejected_reward,
    )
    shared, whole = shown_pair.shared_prefix, True
    for name, (ids, mask, of, reward) in sides.items():
        covered = f"the loss covers {sum(mask):,} of {len(ids):,} tokens"
        frame.block(
            [
                ("font-weight:600", f"{'✓' if name == 'chosen' else '✗'} {name}: "),
                ("", f"{of[:300]}, reward {reward:g}; {covered}"),
            ],
            _SMALL,
        )
        styles = [_TRAINED if is_trained else _PLAIN for is_trained in mask]
        whole &= frame.block(runs(ids[shared:], styles[shared:], text), share=0.4)
    if shared:
        frame.block([("", f"both begin with the same {shared:,} tokens:")], _SMALL)
        whole &= frame.block(runs(shown_pair.chosen_ids[:shared], [_PLAIN] * shared, text), share=0.9)
    if text is None:
        frame.add(f'<div style="{_SMALL}">ids; their text is shown if a store that keeps their tokenizer is open</div>')
    return frame.done("" if whole else f"cut at {LIMIT // 1000} kB; agentrl view shows all")
