"""Policies that judge their own rollouts: tasks of judging, and scores from the verdicts on them."""
