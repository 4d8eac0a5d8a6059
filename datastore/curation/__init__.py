"""Choosing what to train on: rules that narrow rows to a selection of ids and weights, and a funnel that shows how."""
