"""Waiting for asynchronous work from synchronous code."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


def blocking(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end, on an event loop of its own."""
    return aside(partial(asyncio.run, work))


def aside(call: Callable[[], Result]) -> Result:
    """What a call that runs an event loop returns. In a thread that has a running one already, as in a notebook,
    another thread makes it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


async def in_thread(call: Callable[[], Result]) -> Result:
    """What a call returns that may take long, while the event loop goes on. No thread starts any more when the
    interpreter ends; then the loop waits."""
    try:
        waiting = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError:
        return call()
    return await waiting


class Background:
    """An event loop in a thread of its own. What was begun on it goes on while nobody waits."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What a coroutine returns. If the wait is interrupted, as by Ctrl-C, the coroutine is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        try:
            self.wait(_nothing_left())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _nothing_left() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
