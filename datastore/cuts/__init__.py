"""Cuts: sets of rows to give to others, with a manifest that says how they came about and a digest for each row."""
