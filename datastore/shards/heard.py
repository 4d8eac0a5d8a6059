"""Warnings that are for people: those that our code or the user's gives."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def heard(messages: list[str], shown: bool = True) -> Iterator[None]:
    """Add the warnings of the block that our code or the user's gives for people to ``messages``. If they are ``shown``
    what happens to warnings anyway happens to them too."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def keep(message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any) -> None:
            ours = category is UserWarning and "site-packages" not in Path(filename).parts
            if ours:
                messages.append(str(message))
            if shown or not ours:
                show(message, category, filename, *more, **named)

        warnings.showwarning = keep
        yield
