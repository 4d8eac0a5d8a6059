"""Statistics of what was measured: intervals, and paired differences."""
