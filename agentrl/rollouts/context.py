"""What a rollout is shown besides its task: it stands before the prompt, and the row's tags name where it is from."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.trajectory import Message, Role


@dataclass(frozen=True)
class Shown:
    """A ``text``, and the ``tags`` that a row gets which was shown it."""

    text: str
    tags: tuple[str, ...]


def with_context(opening: Sequence[Message], shown: Shown) -> list[Message]:
    """The opening with the text before its last user message, an empty line between them."""
    last = max((number for number, one in enumerate(opening) if one.role is Role.USER), default=len(opening) - 1)
    changed = opening[last].model_copy(update={"content": f"{shown.text}\n\n{opening[last].content}"})
    return [*opening[:last], changed, *opening[last + 1 :]]
