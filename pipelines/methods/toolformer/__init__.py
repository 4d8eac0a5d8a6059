"""Toolformer's filter: which calls of stored rows help to say what follows."""
