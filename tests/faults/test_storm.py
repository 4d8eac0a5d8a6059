"""Storms over a local store and one on S3; see CONTRIBUTING.md for how to read what they say.

``ROUNDS`` storms of each (default 1) rage for ``STORM_SECONDS`` (default 45); ``SEED`` is that of the first one. With
``ROUNDS`` set, ``benchmarks/results/faults.md`` is written.
"""

import os
import random
from pathlib import Path

import pytest
from report import write
from storm import Storm, storm

ROUNDS = int(os.environ.get("ROUNDS") or 1)
SECONDS = float(os.environ.get("STORM_SECONDS") or 45)
SEED = int(os.environ.get("SEED") or random.randrange(10**6))


@pytest.fixture(scope="module")
def storms() -> list[Storm]:
    """Those that are over."""
    return []


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(SEED, SEED + ROUNDS))
@pytest.mark.parametrize("path", ["local", "s3"])
def test_the_store_survives_a_storm(path: str, seed: int, tmp_path: Path, storms: list[Storm]) -> None:
    storms.append(storm(path, seed, SECONDS, tmp_path))
    print(storms[-1])
    if os.environ.get("ROUNDS"):
        write(storms)
    assert storms[-1].faults == []
