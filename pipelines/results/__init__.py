"""Results: artifacts and what they were made from, comparisons, which rows a step learned from, and what can go."""
