"""The viewer as a process of its own, for notebooks."""

import html
import json
import subprocess
import weakref
from dataclasses import dataclass

from agentrl.flows.viewer.processes import begun


@dataclass(frozen=True)
class View:
    """A viewer that serves a store at ``url`` until ``close`` or the end of this process."""

    url: str
    height: int
    process: "subprocess.Popen[str]"

    @classmethod
    def of(cls, store: str, height: int, write: bool, port: int) -> "View":
        """Raises RuntimeError with what the viewer said if it does not start."""
        notebooks = ("http://localhost:*", "http://127.0.0.1:*")  # where Jupyter and its like serve their pages
        options = [
            *(["--write"] if write else []),
            *(word for ancestor in notebooks for word in ("--frame-ancestors", ancestor)),
        ]
        process = begun("view", "--store", store, "--port", str(port), "--json", *options)
        assert process.stdout
        assert process.stderr
        lines = ""
        for line in process.stdout:  # one JSON object over several lines
            lines += line
            if line == "}\n":
                break
        else:
            raise RuntimeError(f"the viewer did not start: {process.stderr.read().strip()}")
        view = cls(json.loads(lines)["url"], height, process)
        weakref.finalize(view, process.terminate)
        return view

    def close(self) -> None:
        """End the viewer."""
        self.process.terminate()
        self.process.wait(timeout=30)

    def _repr_html_(self) -> str:
        return f'<iframe src="{html.escape(self.url)}" width="100%" height="{self.height}" style="border:0"></iframe>'
