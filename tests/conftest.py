"""Fixtures and settings for all tests."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from real_slurm import slurm, slurm_of_session
from toy_project import project

__all__ = ["project", "slurm", "slurm_of_session"]

# A second thread of torch for small models takes longer than none, and many times as long beside other programs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# CI judges a change, so it draws the same examples each time; everywhere else new ones are looked for.
_patient = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)  # a busy machine is no fault
settings.register_profile("here", _patient)
settings.register_profile("ci", _patient, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collection makes is kept to the end: looking for garbage in it takes a third of the time of collection, and
    later some of each test's."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests, the files that take longest come first, so that all processes end at
    about the same time."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        here = Path(__file__).parent
        numbers = {name: number for number, name in enumerate((here / "longest_first.txt").read_text().split())}
        items.sort(key=lambda item: numbers.get(str(item.path.relative_to(here)), len(numbers)))
