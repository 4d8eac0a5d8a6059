"""The Python interface: what the command does, for scripts and notebooks. ``import agentrl`` gives these names."""
