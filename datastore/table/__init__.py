"""The Delta table of trajectories: its log, its commits, its files, and the rows on their way into it."""
