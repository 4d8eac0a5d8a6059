"""Hindsight: failed rows are given the task that they did solve."""
