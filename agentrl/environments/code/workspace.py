"""The files that an episode works on. They are text in memory; programs see copies of them in a sandbox."""

import difflib
import re
from collections.abc import Mapping

from agentrl.environments.base import cut
from agentrl.environments.tools import ToolError
from agentrl.sandbox.run import checked

LONGEST = 4_000
"""Characters of what a tool shows."""
MOST_HITS = 20


class Workspace(dict[str, str]):
    """Path -> text. What is refused raises :class:`ToolError`."""

    def read(self, path: str, first: int, last: int | None) -> str:
        """Lines ``first`` to ``last`` of a file, as they are."""
        lines = self._text(path).splitlines(keepends=True)
        if first > max(1, len(lines)):
            raise ToolError(f"{path} has {len(lines)} lines")
        return cut("".join(lines[first - 1 : last]), LONGEST)

    def search(self, pattern: str) -> str:
        """Lines that contain a text, as ``path:number: line``, and at most 20 of them; for an empty text all paths."""
        if not pattern:
            return cut("\n".join(sorted(self)), LONGEST)
        hits = [
            f"{path}:{number}: {line.strip()}"
            for path, text in sorted(self.items())
            for number, line in enumerate(text.splitlines(), 1)
            if pattern in line
        ]
        if not hits:
            raise ToolError(f"no line contains {pattern!r}")
        more = f"\n[{MOST_HITS} of {len(hits)} lines]" if len(hits) > MOST_HITS else ""
        return cut("\n".join(hits[:MOST_HITS]), LONGEST) + more

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that is in the file once; an empty one stands for the whole file, which may be a new one."""
        try:
            checked(path)
        except ValueError as error:
            raise ToolError(str(error)) from None
        if not old:
            self[path] = new
            return f"wrote {path}"
        count = self._text(path).count(old)
        if count != 1:
            raise ToolError(f"{path} contains the old text {count} times; give a text that is there once")
        self[path] = self[path].replace(old, new)
        return f"edited {path}"

    def encoded(self, folder: str = "") -> dict[str, bytes]:
        """The files as a sandbox takes them."""
        return {folder + path: text.encode("utf-8", "surrogateescape") for path, text in self.items()}

    def _text(self, path: str) -> str:
        if path not in self:
            near = difflib.get_close_matches(path, self, 3)
            raise ToolError(f"there is no file {path!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
        return self[path]


def patch(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The unified diff between two sets of files, without line numbers, in the order of the paths."""
    lines: list[str] = []
    for path in sorted({*before, *after}):
        old, new = before.get(path, ""), after.get(path, "")
        if old != new:
            lines += difflib.unified_diff(old.splitlines(), new.splitlines(), path, path, lineterm="")
    return "\n".join(re.sub(r"^@@.*@@", "@@", line) for line in lines)


def similarity(ours: str, oracle: str) -> float:
    """How much two patches are alike, from 0 to 1 (SWE-RL: ratio of matching characters). Without a patch it is 0."""
    return difflib.SequenceMatcher(None, ours, oracle, autojunk=False).ratio() if ours else 0.0
