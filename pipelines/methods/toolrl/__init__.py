"""ToolRL: rewards for calls that match reference calls, and tasks that name such calls."""
