"""The pipeline file: from its text to stages with checked configs and typed edges, and everything that is wrong
with it."""
