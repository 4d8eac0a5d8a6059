"""The run: planned stages in worker processes, and its record."""
