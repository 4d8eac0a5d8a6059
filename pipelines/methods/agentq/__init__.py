"""Agent Q's pairs: of two steps from one state, the one that is worth more is preferred."""
