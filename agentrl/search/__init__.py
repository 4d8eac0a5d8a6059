"""Search over the steps of episodes."""
