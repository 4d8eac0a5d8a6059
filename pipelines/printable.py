"""Text of others, made safe to print: characters that control a terminal or reverse text are printed as escapes.

Shown as escapes: ESC and every other control character of C0 and C1 but line break and tab, bidirectional marks,
overrides and isolates, invisible operators and tags, line and paragraph separators, and lone surrogates.
"""

import html
import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    r"""The text with each unsafe character as ``\x1b``, ``\u202e`` or ``\U000e0041``; safe text stays as it is."""
    return _UNSAFE.sub(lambda match: _escape(ord(match[0])), text)


def one_line(text: str) -> str:
    """The same on one line: runs of white space are one space each."""
    return printable(" ".join(text.split()))


def markdown(text: str) -> str:
    """One line of Markdown that shows the text as it is: no HTML, no links, no code, no table cells of its own."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~>-])", r"\\\1", html.escape(one_line(text), quote=False))


def markdown_code(text: str) -> str:
    """One line of Markdown that shows the text as code, whatever back-ticks it holds."""
    line = one_line(text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if line[:1] == "`" or line[-1:] == "`" or not line else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
