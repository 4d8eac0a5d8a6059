"""The ``agentrl`` command: one tree. Commands import what they need when they are called, so that ``--help`` answers at
once, and every error ends in one line and an exit code."""

import errno
import functools
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from agentrl.flows.commands import (
    artifacts,
    buffer,
    buffer_annotate,
    buffer_choose,
    buffer_exchange,
    buffer_read,
    check_cluster,
    compare,
    cut,
    dialect,
    doctor,
    generate,
    init,
    pipelines,
    recordings,
    replay,
    serve,
    view,
)
from agentrl.flows.commands._common import BAD_INPUT, CANCELLED, FAILED
from agentrl.flows.own_code import say_once
from agentrl.flows.terminal import protect, say
from agentrl.pipelines.secrets import redacted
from agentrl.schemas.declared import before_import
from agentrl.schemas.installation import leave_checkout

app = typer.Typer(
    name="agentrl",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="The offline data engine for agentic RL: plan, run and re-run pipelines over cached trajectories.",
)


def _version(asked: bool) -> None:
    if asked:
        from agentrl import __version__

        say(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    pass


_buffer = typer.Typer(
    no_args_is_help=True, help="Query, curate, search, exchange and look after the trajectory buffer."
)

for _module in (pipelines, check_cluster, init, artifacts, compare, dialect, doctor, generate, replay, serve):
    app.add_typer(_module.app)
for _module in (buffer_read, buffer_choose, buffer_annotate, buffer_exchange, buffer):
    _buffer.add_typer(_module.app)
app.add_typer(_buffer, name="buffer")
app.add_typer(cut.app, name="cut")
app.add_typer(view.app, name="view")
app.add_typer(recordings.app, name="recordings")

_STORES = ("deltalake", "obstore", "botocore", "pyarrow", "polars", "_internal", "pyo3_runtime")
"""Packages whose errors describe a fault of a store or a disk, not a bug of ours."""

_FULL, _FORBIDDEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO), (errno.EROFS, errno.EACCES, errno.EPERM)
"""A disk that fails in the midst of the work, and one that was never to be written."""


@functools.cache
def _tree() -> Any:
    """All commands. To build them takes longer than most of them, so a process does so once."""
    return typer.main.get_command(app)


def call(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; see :mod:`agentrl.flows.commands._common` for what the codes mean."""
    before_import[:] = [say_once]
    try:
        given = None if arguments is None else list(arguments)
        return int(_tree()(args=given, prog_name="agentrl", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        return CANCELLED
    except BrokenPipeError:  # the program that reads our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except BaseException as error:
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # of Rust, in native libraries
            raise
        code, message = _explained(error)
        if message:
            say(f"error: {message}", stderr=True)
        return code


def _explained(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and what to say."""
    from agentrl.datastore.errors import StoreError, UnfinishedError, one_line
    from agentrl.pipelines.file.problems import SpecError

    if hasattr(error, "format_message"):  # an option or argument that the command does not take
        context, message = getattr(error, "ctx", None), error.format_message()
        hint = f"; see `{context.command_path} --help`" if context and message else ""
        return BAD_INPUT, message.rstrip(".") + hint  # no message: the help was shown instead
    if isinstance(error, StoreError | SpecError):
        full = isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL
        return FAILED if full or isinstance(error, UnfinishedError) else BAD_INPUT, str(error)
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        reason = f"{error.strerror or one_line(error)}{where}"
        if error.errno == errno.EMFILE or f"(os error {errno.EMFILE})" in reason:
            reason += f"; this process may open {_most_files()} files at once: raise `ulimit -n`"
        return BAD_INPUT if error.errno in _FORBIDDEN else FAILED, reason
    if type(error).__module__.partition(".")[0] in _STORES:
        return FAILED, _first_line(error)
    return FAILED, f"{_first_line(error)}; this is a bug of agentrl's, {_kept(error)}"


def _first_line(error: BaseException) -> str:
    lines = redacted(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _most_files() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _kept(error: BaseException) -> str:
    """Keep the traceback in a file outside the store, which may be what is broken, and say where it is."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="agentrl-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", errors="backslashreplace") as file:
            file.write(redacted("".join(traceback.format_exception(error))))
    except OSError as why:
        return f"and its traceback could not be kept: {why.strerror or why}"
    return f"report it with the traceback in {path}"


def _warn(message: Any, *_: Any, **__: Any) -> None:
    say(f"warning: {message}", stderr=True)


def main() -> None:
    """Entry point of the ``agentrl`` script."""
    leave_checkout()
    protect()
    warnings.showwarning = _warn
    sys.exit(call())


if __name__ == "__main__":
    main()
