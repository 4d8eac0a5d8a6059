"""Online reinforcement learning: sample, give credit, update."""
