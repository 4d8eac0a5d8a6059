"""The plan: what a run would do and why, from fingerprints; and what it would start where."""
