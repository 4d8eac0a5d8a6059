"""Seeds of random generators: a stream of its own for each purpose and place of a run."""

import hashlib


def stream(seed: int, purpose: str, *places: int) -> int:
    """Seed of a generator, below 2^63: a digest of a run's ``seed``, what the numbers are for, and where in the run.
    Runs with neighbouring seeds share no stream, as sums such as ``seed + place`` would."""
    digest = hashlib.sha256(repr((seed, purpose, places)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
