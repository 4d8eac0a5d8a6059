"""Waiting for asynchronous work from synchronous code."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


def blocking(work: Coroutine[Any, Any, Result], on: asyncio.Runner | None = None) -> Result:
    """Run a coroutine to its end, on an event loop of its own or on that of ``on``."""
    return aside(partial(on.run if on else asyncio.run, work))


def aside(call: Callable[[], Result]) -> Result:
    """What a call that runs an event loop returns. In a thread that has a running one already, as in a notebook,
    another thread makes it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    found: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]
