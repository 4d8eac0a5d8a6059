"""Claude Code and Codex themselves, unmodified, in front of the recorder, which says what a script says. ``AGENTS`` is
the folder into which `make test-harness` installs them."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from recording import ScriptedTokens, Served, check, policy_for_tests, served

from agentrl.models.policy import Policy
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

AGENTS = Path(os.environ.get("AGENTS", "build/agents")).absolute()
CLAUDE = AGENTS / "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
CODEX = next((AGENTS / "node_modules/@openai").glob("codex-linux-x64/vendor/*/bin/codex"), AGENTS / "codex")
WAIT_S = 180
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(not CLAUDE.exists() or not CODEX.exists(), reason="`make test-harness` installs the agents"),
]
SHELL = {"claude": ("Bash", "command", "timeout"), "codex": ("exec_command", "cmd", "yield_time_ms")}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


def calls(*pairs: tuple[str, dict[str, Any] | str], content: str = "", reasoning: str | None = None) -> Message:
    made = [
        ToolCall(id=f"c{number}", name=name, arguments=given if isinstance(given, str) else json.dumps(given))
        for number, (name, given) in enumerate(pairs)
    ]
    return Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=made)


def script(agent: str, kind: str) -> Callable[[str], Message | str]:
    """What the policy says after a text."""
    tool, command, number = SHELL[agent]
    first = {
        "ls": calls((tool, {command: "ls -1"}), content="I will look."),
        "parallel": calls(*((tool, {command: text}) for text in ("ls -1", "cat a.txt", "false"))),
        "think": calls((tool, {command: "ls -1"}), content="\n\nLooking.\n", reasoning="I should list the files.\n"),
        "unknown": calls(("NoSuchTool", {"x": 1})),
        "number": calls((tool, f'{{"{command}": "ls -1", "{number}": 20000.0}}')),
        "agents": calls(
            *(
                ("Agent", {"description": f"{n}", "prompt": f"count, part {n}", "subagent_type": "general-purpose"})
                for n in (1, 2)
            )
        ),
    }

    def says(text: str) -> Message | str:
        turn = text.count("<|im_start|>assistant")
        if "Generate a concise" in text:
            return '{"title": "Files"}'
        if kind == "long" and turn <= 15:
            return calls((tool, {command: f"echo {turn}"}))
        if kind in first and turn == 1:
            return first["ls" if "count, part" in text else kind]  # a sub-agent looks itself
        return "There are two files."

    return says


def run(
    server: Served, agent: str, folder: Path, config: str = "", **more: str
) -> tuple[subprocess.CompletedProcess[str], str, str]:
    """The agent at a task in a folder, and the id and the key of its episode. ``config`` is more of Codex's."""
    opened = httpx.post(f"{server.url}/episodes", json={"task_id": "files"}).json()
    work, home = folder / "work", folder / "home"
    work.mkdir(parents=True)
    (home / ".codex").mkdir(parents=True)
    (work / "a.txt").write_text("alpha")
    (work / "b.txt").write_text("beta")
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "IS_SANDBOX": "1", "KEY": opened["api_key"], **more}
    if agent == "claude":
        env |= {"ANTHROPIC_BASE_URL": opened["anthropic_base_url"], "ANTHROPIC_API_KEY": opened["api_key"]}
        command = [CLAUDE, "-p", "list the files", "--model", "tiny", "--output-format", "stream-json", "--verbose"]
        command += ["--dangerously-skip-permissions"]
    else:
        provider = f'name = "x"\nbase_url = "{opened["base_url"]}"\nenv_key = "KEY"\nwire_api = "responses"\n'
        head = (
            'model = "tiny"\nmodel_provider = "x"\ncheck_for_update_on_startup = false\n[analytics]\nenabled = false\n'
        )
        (home / ".codex/config.toml").write_text(f"{config}{head}[model_providers.x]\n{provider}")
        command = [CODEX, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        command += ["-C", str(work), "list the files"]
    ended = subprocess.run(
        command, cwd=work, env=env, capture_output=True, text=True, timeout=WAIT_S, stdin=subprocess.DEVNULL
    )
    return ended, opened["id"], opened["api_key"]


def rows_of(server: Served, name: str, key: str) -> list[Trajectory]:
    url = f"{server.url}/episodes/{name}/reward"
    httpx.post(url, json={"reward": 1}, headers={"x-api-key": key}).raise_for_status()
    return [row for row in server.flush() if row.episode_id == name]


def sampled_tokens(server: Served) -> int:
    engine = server.engine
    assert isinstance(engine, ScriptedTokens)
    return sum(len(turn.turn.ids) for turns in server.recorder.episodes.opened.values() for turn in turns.tree.turns)


@pytest.mark.parametrize(
    ("agent", "kind", "turns"),
    [
        ("claude", "ls", 2),
        ("claude", "parallel", 2),
        ("claude", "think", 2),
        ("claude", "unknown", 2),
        ("claude", "number", 2),
        ("claude", "long", 16),
        ("codex", "ls", 2),
        ("codex", "parallel", 2),
        ("codex", "think", 2),
        ("codex", "unknown", 2),
        ("codex", "number", 2),
    ],
)
def test_a_run_is_one_row(policy: Policy, tmp_path: Path, agent: str, kind: str, turns: int) -> None:
    with served(tmp_path / "store", policy, script(agent, kind), room=400_000, turn_tokens=2000) as server:
        ended, name, key = run(server, agent, tmp_path, **QUIET)
        sampled = sampled_tokens(server)
        rows = rows_of(server, name, key)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "There are two files." in ended.stdout
    [row] = rows
    check(policy, row)
    assert kind != "think" or "I should list the files." in ended.stdout, "the program shows what was thought"
    assert (row.agent, row.n_steps, row.reward) == ("main", turns, 1.0)
    assert row.n_action_tokens == sampled, "each sampled token is in the row"
    assert not [tag for tag in row.tags if tag.startswith(("written_turns", "kind:", "undelivered"))]


def test_sub_agents_and_a_title(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path / "store", policy, script("claude", "agents"), room=400_000, turn_tokens=2000) as server:
        ended, name, key = run(server, "claude", tmp_path)  # with the traffic that is not essential
        sampled = sampled_tokens(server)
        rows = rows_of(server, name, key)
    assert ended.returncode == 0, ended.stderr[-2000:]
    main, *others, title = rows
    assert [row.agent for row in rows] == ["main", "agent-2", "agent-3", "side"]
    assert (main.trajectory_id, main.reward, title.reward) == (name, 1.0, None)
    assert [(row.parent_id, row.reward) for row in others] == [(name, 1.0)] * 2
    assert all("kind:subagent" in row.tags for row in others)
    assert "not-trained" in title.tags
    assert sum(row.n_action_tokens for row in rows) == sampled


def test_codex_calls_functions_of_a_namespace(policy: Policy, tmp_path: Path) -> None:
    def says(text: str) -> Message | str:
        turn = text.count("<|im_start|>assistant")
        if "count, part" in text.rpartition("list the files")[2].partition("<|im_start|>assistant")[0]:
            return "Part one has two files."
        if turn == 1:
            return calls(("multi_agent_v1__spawn_agent", {"message": "count, part 1"}))
        return "There are two files."

    with served(tmp_path / "store", policy, says, room=400_000, turn_tokens=2000) as server:
        ended, name, key = run(server, "codex", tmp_path)
        rows = rows_of(server, name, key)
    assert ended.returncode == 0, ended.stderr[-2000:]
    main = next(row for row in rows if row.agent == "main")
    [made] = [call.name for message in main.messages for call in message.tool_calls]
    [told] = [message.content for message in main.messages if message.role is Role.TOOL]
    assert made == "multi_agent_v1__spawn_agent"
    assert "agent_id" in told
    assert "unsupported" not in told


def test_claude_code_goes_on_after_a_compaction(policy: Policy, tmp_path: Path) -> None:
    turns = script("claude", "long")

    def says(text: str) -> Message | str:
        if "TEXT ONLY" in text.rpartition("<|im_start|>user")[2]:
            return "<summary>Fifteen numbers were told.</summary>"
        return "Went on." if "Fifteen numbers were told." in text else turns(text)

    with served(tmp_path / "store", policy, says, room=900_000, turn_tokens=2000) as server:
        ended, name, key = run(server, "claude", tmp_path, **QUIET)
        assert ended.returncode == 0, ended.stderr[-2000:]
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "IS_SANDBOX": "1", **QUIET}
        env |= {"ANTHROPIC_BASE_URL": f"{server.url}/episodes/{name}", "ANTHROPIC_API_KEY": key}
        for prompt in ("/compact", "go on"):
            command = [CLAUDE, "-p", prompt, "--continue", "--model", "tiny", "--dangerously-skip-permissions"]
            given = {"cwd": tmp_path / "work", "env": env, "stdin": subprocess.DEVNULL, "timeout": WAIT_S}
            subprocess.run(command, capture_output=True, check=True, **given)  # type: ignore[call-overload]
        sampled = sampled_tokens(server)
        work, summary, after = rows_of(server, name, key)
    assert [(row.segment, row.n_steps, row.reward) for row in (work, summary, after)] == [
        (0, 16, 1.0),
        (1, 16, 1.0),
        (2, 1, 1.0),
    ]
    assert (summary.parent_id, "kind:compaction" in summary.tags) == (work.trajectory_id, True)
    assert summary.messages[-1].content == "<summary>Fifteen numbers were told.</summary>"
    assert sum(row.n_action_tokens for row in (work, summary, after)) == sampled


def test_codex_goes_on_after_a_compaction(policy: Policy, tmp_path: Path) -> None:
    asked: list[str] = []

    def says(text: str) -> Message | str:
        asked.append(text)
        if len(asked) == 1:
            return calls(("exec_command", {"cmd": "ls -1"}))
        return "Two files were seen." if len(asked) == 2 else "There are two files."

    with served(tmp_path / "store", policy, says, room=900_000, turn_tokens=2000) as server:
        ended, name, key = run(server, "codex", tmp_path, config="model_auto_compact_token_limit = 50\n")
        sampled = sampled_tokens(server)
        rows = rows_of(server, name, key)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Two files were seen." in asked[2], "it goes on with the summary"
    assert [(row.segment, row.n_steps, row.reward) for row in rows] == [(0, 1, 1.0), (1, 1, 1.0), (2, 1, 1.0)]
    assert ["kind:compaction" in row.tags for row in rows] == [False, True, False]
    assert [rows[0].agent, rows[2].agent] == ["main", "main"]
    assert sum(row.n_action_tokens for row in rows) == sampled


def test_a_prompt_that_is_too_long_ends_the_run_at_once(policy: Policy, tmp_path: Path) -> None:
    with served(tmp_path / "store", policy, script("claude", "ls"), room=2000) as server:
        ended, _, _ = run(server, "claude", tmp_path, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (ended.returncode, result["is_error"], result["terminal_reason"]) == (1, True, "prompt_too_long")
