"""Checks of answers, from which rewards are made."""
