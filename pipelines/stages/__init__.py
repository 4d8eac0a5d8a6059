"""Stages that are no method. Heavy libraries are imported inside the functions, so that a plan starts without them."""
