"""A tool of an MCP server that does not answer."""

import json
import sys
import textwrap
from pathlib import Path

import pytest
from scripted_engine import play

from agentrl.environments import load_environment
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Termination

SERVER = textwrap.dedent('''
    """Notes, and a tool that never answers."""
    import asyncio, json
    from mcp.server import MCPServer

    server, notes = MCPServer("notes"), {}

    @server.tool()
    def write(name: str, text: str) -> str:
        """Write a note."""
        notes[name] = text
        return "written"

    @server.tool()
    async def hang() -> str:
        """Never answers."""
        await asyncio.sleep(1000)

    @server.tool()
    def state() -> str:
        """All notes, as JSON."""
        return json.dumps(notes)

    server.run()
''')


@pytest.mark.slow
@pytest.mark.ci
def test_a_tool_that_hangs_is_given_up_and_the_next_call_is_answered(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    settings = {"command": sys.executable, "args": [str(tmp_path / "server.py")], "start_s": 120, "state_tool": "state"}
    task = Task(task_id="t", env="mcp", split="train", prompt="note it", ground_truth=json.dumps({"a": "hello"}))
    turns = [{"hang": {}}, {"write": {"name": "a", "text": "hello"}}, {"hang": {}}, "done"]
    [row] = play(load_environment(f"mcp{json.dumps(settings)}"), task, *turns, tool_s=3.0)
    first, second, third = (message.content for message in row.messages if message.role is Role.TOOL)
    assert (first, second) == (third, "written")
    assert (row.success, row.n_tool_errors, row.termination) == (True, 2, Termination.ANSWERED)
