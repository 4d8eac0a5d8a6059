"""Session files of agent programs: what they write beside their work, and what they print."""
