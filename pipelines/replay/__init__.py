"""Training steps that are computed again from what was recorded, as they were or with other settings."""
