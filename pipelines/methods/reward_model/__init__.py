"""Reward models: trained on outcomes or on values of steps, measured, and used to score and to pick."""
