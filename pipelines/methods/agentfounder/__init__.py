"""Agentic continual pre-training: stored rows as texts of planning, reasoning and deciding."""
