"""ECHO: cross-entropy on what tools answered, as a second stream of the loss."""
