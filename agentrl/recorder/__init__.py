"""Recording agents: an OpenAI-compatible endpoint in front of an engine, whose conversations become trajectories."""
