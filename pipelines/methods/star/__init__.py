"""STaR: unsolved tasks are tried again with the answer as a hint, which is taken out before training."""
