"""How each agent program is started, and how it says how it ended. To add one, add a row to :data:`PROFILES`.

In arguments, variables and files ``{base_url}``, ``{anthropic_base_url}``, ``{api_key}``, ``{model}`` and
``{workspace}`` stand for what an episode gives. The task is the standard input.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Read = Callable[[str], str]
"""What a program printed -> how it failed, empty if it did not."""


@dataclass(frozen=True)
class AgentProfile:
    """One agent program. ``program`` is a pattern of its path in the folder of agents, and ``package`` the folder there
    whose version ought to be ``version``, the one that was tried. ``shell`` is the tool by which it runs a command, and
    the name of that argument."""

    arguments: tuple[str, ...] = ()
    program: str = ""
    package: str = ""
    version: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    shell: tuple[str, str] | None = None
    failure: Read = lambda printed: ""

    def command(self, agents: Path) -> list[str]:
        """The program and its arguments. Raises ValueError if the program is not there."""
        if not self.program:
            return list(self.arguments)
        program = next(iter(sorted(agents.glob(self.program))), None)
        if program is None:
            raise ValueError(
                f"agents: {agents} has no {self.program}; install the agent there: npm install --prefix {agents} "
                f"{self.package}@{self.version}, or `make agents`"
            )
        return [str(program), *self.arguments]

    def installed(self, agents: Path) -> str:
        """The version that is installed, or nothing if that is not known."""
        about = agents / "node_modules" / self.package / "package.json"
        return str(json.loads(about.read_text())["version"]) if self.package and about.is_file() else ""


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text with what an episode gives in its places."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def _events(printed: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines that a program printed."""
    events = []
    for line in printed.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        events += [event] if isinstance(event, dict) else []
    return events


def claude_code_failure(printed: str) -> str:
    """``subtype`` says success of failed requests too, so that ``is_error`` counts."""
    result = next((event for event in reversed(_events(printed)) if event.get("type") == "result"), None)
    if result is None:
        return "it gave no result"
    if result.get("is_error") is False:
        return ""
    why = [result.get("terminal_reason"), result.get("subtype"), result.get("result")]
    return ", ".join(str(part)[:300] for part in why if part) or "is_error"


def codex_failure(printed: str) -> str:
    for event in reversed(_events(printed)):
        if event.get("type") == "turn.failed":
            error = event.get("error")
            return f"turn.failed: {error.get('message') if isinstance(error, dict) else error}"[:300]
        if event.get("type") == "turn.completed":
            return ""
    return "it completed no turn"


def opencode_failure(printed: str) -> str:
    events = _events(printed)
    failed = next((event for event in reversed(events) if event.get("type") == "error"), None)
    if failed is not None:
        return f"error: {json.dumps(failed.get('error'))[:300]}"
    return "" if events else "it said nothing"


_CODEX_CONFIG = """model = "{model}"
model_provider = "policy"
check_for_update_on_startup = false
web_search = "disabled"
[analytics]
enabled = false
[features]
multi_agent = false
[model_providers.policy]
name = "policy"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 2
stream_max_retries = 2
"""

_OPENCODE_CONFIG = json.dumps(
    {
        "autoupdate": False,
        "share": "disabled",
        "model": "policy/{model}",
        "agent": {"title": {"disable": True}},
        "provider": {
            "policy": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
                "models": {"{model}": {"name": "policy"}},
            }
        },
    }
)

PROFILES = {
    "claude-code": AgentProfile(
        program="node_modules/@anthropic-ai/claude-code-linux-*/claude",
        package="@anthropic-ai/claude-code",
        version="2.1.197",
        arguments=("-p", "--model", "{model}", "--output-format", "json", "--dangerously-skip-permissions"),
        variables={
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_TELEMETRY": "1",
        },
        shell=("Bash", "command"),
        failure=claude_code_failure,
    ),
    "codex": AgentProfile(
        program="node_modules/@openai/codex-linux-*/vendor/*/bin/codex",
        package="@openai/codex",
        version="0.169.0",
        arguments=(
            *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *("-C", "{workspace}"),
        ),
        files={".codex/config.toml": _CODEX_CONFIG},
        shell=("exec_command", "cmd"),
        failure=codex_failure,
    ),
    "opencode": AgentProfile(
        program="node_modules/opencode-linux-*/bin/opencode",
        package="opencode-ai",
        version="1.18.33",
        arguments=("run", "--format", "json"),
        variables={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={".config/opencode/opencode.json": _OPENCODE_CONFIG},
        shell=("bash", "command"),
        failure=opencode_failure,
    ),
}
"""Name -> how that agent is started."""


def of_command(command: Sequence[str]) -> AgentProfile:
    """Any other program. It finds the endpoint in the variables of OpenAI's and Anthropic's clients."""
    return AgentProfile(arguments=tuple(command))
