"""Lines that ranks print for the process which started them."""

import sys

DONE = "AGENTRL_STEP "
FAILED = "AGENTRL_ERROR "
NOTE = "AGENTRL_NOTE "
DIALECT = "AGENTRL_DIALECT "
NO_MEMORY = "AGENTRL_NO_MEMORY "
WROTE = "AGENTRL_WROTE "
"""How lines begin that the process which started the ranks understands."""


def tell(kind: str, text: str) -> None:
    """Say something in a line of its own, in one piece, whatever other ranks write at the same time."""
    sys.stdout.write(f"\n{kind}{text}\n")
    sys.stdout.flush()
