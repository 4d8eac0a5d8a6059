"""AgentTuning: agents' rows and general ones, mixed by a share."""
