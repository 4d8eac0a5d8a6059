"""One pure function for each advantage estimator."""
