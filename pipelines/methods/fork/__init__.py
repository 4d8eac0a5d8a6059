"""Continuations: stored rows go on from one of their turns."""
