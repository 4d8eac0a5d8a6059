"""Statistics of measured proportions."""
