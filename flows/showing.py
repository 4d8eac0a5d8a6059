"""Which display fits where the output goes, and long work that is no run of stages."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from rich.console import Console

from agentrl.flows.cell import Cell
from agentrl.flows.display import Display, Lines, Live, Quiet, seconds


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose cells show what is displayed in them."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def display_for(console: Console, quiet: bool) -> Display:
    """A cell of a notebook has one output that is updated, a terminal bars, and everything else lines."""
    if quiet:
        return Quiet()
    if in_notebook():
        return Cell()
    if console.is_terminal:
        return Live(console)

    def write(text: str) -> None:
        console.print(f"{datetime.now():%H:%M:%S}  {text}", highlight=False, markup=False, soft_wrap=True)

    return Lines(write)


@contextmanager
def shown(what: str, display: Display) -> Iterator[Callable[..., None]]:
    """Show work that is no run of stages: what is yielded is called as a stage's ``progress`` is."""
    began = time.monotonic()
    display.open()
    display.stage_started(what)
    try:
        yield lambda done, total=None, **metrics: display.progress(what, done, total, metrics)
    except BaseException as error:
        display.stage_ended(what, f"stopped: {str(error).partition(chr(10))[0] or type(error).__name__}", False)
        raise
    else:
        display.stage_ended(what, f"done in {seconds(time.monotonic() - began)}", True)
    finally:
        display.stop()
