"""Reflexion: notes of what went wrong, shown to the next attempt."""
