"""ETO: a success is preferred to a failure at the same task."""
