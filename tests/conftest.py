"""Fixtures and settings for all tests."""

import os

from hypothesis import settings
from toy_project import project

__all__ = ["project"]

# CI judges a change, so it draws the same examples each time; everywhere else new ones are looked for.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
