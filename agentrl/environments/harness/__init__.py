"""``harness``: coding agents as they are, Claude Code, Codex, OpenCode or any command, at tasks in a sandbox."""
