"""Fixtures and settings for all tests."""

import os

from hypothesis import HealthCheck, settings
from toy_project import project

__all__ = ["project"]

# CI judges a change, so it draws the same examples each time; everywhere else new ones are looked for.
_patient = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no fault
settings.register_profile("here", _patient)
settings.register_profile("ci", _patient, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
