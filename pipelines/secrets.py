"""What must not be echoed: values that a user gave on the command line for something that is named like a secret."""

import re
from collections.abc import Sequence

_NAME = re.compile(r"(^|[_-])(api_?key|key|token|secret|password|passwd|credentials?|auth|authorization)($|[_-])", re.I)
_REFERENCE = re.compile(r"\$\{\w+\}")

HIDDEN = "***"


def names_a_secret(key: Sequence[str | int]) -> bool:
    """Whether any part of a key path is named like a secret: ``api_key``, ``HF_TOKEN``, ``password``."""
    return any(_NAME.search(str(part)) for part in key)


def is_reference(value: object) -> bool:
    """Whether a value is ``${NAME}``, which names an environment variable and gives nothing away."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def shown_setting(setting: str) -> str:
    """A ``--set`` as it may be printed and recorded: the value of a secret is ``***``."""
    dotted, equals, value = setting.partition("=")
    hidden = equals and names_a_secret(dotted.split(".")) and not is_reference(value.strip("'\" "))
    return f"{dotted}={HIDDEN}" if hidden else setting
