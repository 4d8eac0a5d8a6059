"""Annotations of people and judges: a table beside the buffer, and what counts of it."""
