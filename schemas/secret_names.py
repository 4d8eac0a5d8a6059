"""Which names say that a value is a secret."""

import re
from collections.abc import Sequence

_NAME = re.compile(r"(^|[_-])(api_?key|key|token|secret|password|passwd|credentials?|auth|authorization)($|[_-])", re.I)


def names_a_secret(key: Sequence[str | int]) -> bool:
    """Whether any part of a key path is named like a secret: ``api_key``, ``HF_TOKEN``, ``password``."""
    return any(_NAME.search(str(part)) for part in key)
