"""Compression of the context in the middle of an episode."""
