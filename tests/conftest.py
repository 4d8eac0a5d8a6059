"""Fixtures for all tests."""

from toy_project import project

__all__ = ["project"]
