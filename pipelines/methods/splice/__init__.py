"""Splices: a failed row, a turn that takes the mistake back, and the rest of a success."""
