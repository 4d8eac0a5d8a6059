"""Look at a store in the browser."""

import getpass
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.flows.commands._common import FAILED, fail, on_secrets, open_buffer, open_catalog
from agentrl.flows.options import At, Host, Json, OnSecrets, Port, Replace, Store, command
from agentrl.flows.terminal import say, say_json
from agentrl.flows.viewer.wire import RefusedError
from agentrl.recorder.listening import bound

if TYPE_CHECKING:
    from agentrl.datastore.annotations.labels import LabelSchema
    from agentrl.flows.viewer.guard import Door

app = typer.Typer()


@app.callback(invoke_without_command=True)
def view(
    context: typer.Context,
    store: Store = "store",
    host: Host = "127.0.0.1",
    port: Port = 8322,
    unsafe_open: Annotated[
        bool, typer.Option("--unsafe-open", help="Let in everybody who reaches the address, without a token")
    ] = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Let the pages save rows and labels too; then the address always has a token"),
    ] = False,
    frame_ancestors: Annotated[
        list[str] | None,
        typer.Option(help="An origin, as http://localhost:8888, whose pages may show this one in a frame; repeatable"),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(help="A YAML file with the labels that people may give to rows, beside thumbs and stars"),
    ] = None,
    base_path: Annotated[
        str, typer.Option(help="The path of a proxy that hands it on with each request, as in /user/ann/proxy/8322")
    ] = "",
    also: Annotated[
        list[str] | None, typer.Option(help="A further store to show, below a path of its own; repeatable")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show stores in the browser: plan, runs, rows, tokens. Without --write nothing is changed. Ends at Ctrl-C."""
    if context.invoked_subcommand:
        _refuse_options(context)
        return
    from agentrl.schemas.installation import missing

    if lack := missing("uvicorn", "view") or missing("starlette", "view"):
        raise fail(f"error: {lack}")
    from agentrl.flows.viewer.below import base_of
    from agentrl.flows.viewer.guard import Door, is_loopback, is_origin

    if strange := [text for text in frame_ancestors or () if not is_origin(text)]:
        raise fail(
            f"error: --frame-ancestors {strange[0]!r}: an origin is http:// or https:// and a host, as in "
            "http://localhost:8888 or http://localhost:*"
        )

    if write and unsafe_open:
        raise fail("error: --write and --unsafe-open do not go together: who may change something needs the token")
    try:
        base = base_of(base_path)
    except ValueError as error:
        raise fail(f"error: --base-path {base_path!r}: {error}") from None
    stores = [store, *(also or ())]
    for folder in stores:
        if "://" in folder:
            open_catalog(folder)  # says what is wrong with the credentials
        elif not Path(folder).is_dir():
            raise fail(f"error: there is no store at {folder}; check --store, or run a pipeline first")
    schema = _schema_of(labels) if labels else None
    try:
        listening = bound(host, port)
    except OSError as error:
        raise fail(f"error: --host {host} --port {port}: {error.strerror}", FAILED) from None
    port = listening.getsockname()[1]
    asks = write or not (unsafe_open or is_loopback(host))
    door = Door(host, port, secrets.token_urlsafe(24) if asks else None, write, tuple(frame_ancestors or ()), base)
    _say_where(", ".join(stores), door, is_loopback(host), as_json)
    _serve(stores, door, listening, schema)


def _schema_of(labels: Path) -> "LabelSchema":
    from agentrl.datastore.annotations.labels import LabelSchema
    from agentrl.flows.commands._selections import rules_of

    return rules_of(labels, LabelSchema, "labels")


def _refuse_options(context: typer.Context) -> None:
    """Options of ``view`` itself before the name of one of its commands."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        raise fail(f"error: --{given[0].replace('_', '-')} stands before {context.invoked_subcommand}; put it behind")


def _say_where(store: str, door: "Door", here_alone: bool, as_json: bool) -> None:
    """The address, and how another machine reaches it."""
    host, port = door.host, door.port
    name = host if here_alone else socket.gethostname() if host in ("0.0.0.0", "::") else host
    address = f"http://{f'[{name}]' if ':' in name else name}:{port}{door.base}/" + (
        f"#token={door.token}" if door.token else ""
    )
    forward = f"ssh -N -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"
    if as_json:
        say_json({"event": "serving", "url": address, "forward": forward, "store": store})
    else:
        say(f"serving {store} at {address}")
        if here_alone:
            say(f"from another machine: {forward}")
        elif not door.token:
            say("warning: everybody who reaches this address can read the store", stderr=True)
    sys.stdout.flush()


class _WithoutPandas:
    """If pandas is installed, pyarrow imports it at the first list that it converts, to know pandas' own lists. The
    viewer has none, and the import takes half a second and 50 MiB."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the viewer needs no pandas", name=name)


@command(app)
def export(
    selection: Annotated[
        str,
        typer.Argument(help="Rows: their ids, a TAG, STAGE or STAGE/FINGERPRINT, or a filter such as 'not success'"),
    ],
    file: Annotated[Path, typer.Argument(help="The HTML file to write")],
    store: Store = "store",
    at: At = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="At most so many rows, the first by id")] = None,
    without: OnSecrets = None,
    force: Replace = False,
    as_json: Json = False,
) -> None:
    """Write rows into one file that any browser opens without a network, with filters and lenses."""
    if file.exists() and not force:
        raise fail(f"error: {file} is there already; --force replaces it")
    if not file.parent.is_dir():
        raise fail(f"error: there is no folder {file.parent}")
    if "://" not in store and not Path(store).is_dir():
        raise fail(f"error: there is no store at {store}; check --store")
    from agentrl.flows.viewer.offline.export import choose
    from agentrl.flows.viewer.offline.export import export as written
    from agentrl.flows.viewer.reader import StoreReader

    refuses = on_secrets(without, "refuse")
    reader = StoreReader(store)
    try:
        snapshot = reader.tables.at(at)
    except RefusedError as error:
        raise fail(f"error: --at: {error}") from None
    chosen = choose(reader, selection, snapshot)
    if refuses:
        from agentrl.datastore.formats.exports import held_secrets, refuse_secrets

        refuse_secrets(held_secrets(open_buffer(store), chosen.ids[:rows]))
    export_file = written(reader, chosen, snapshot, rows)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(export_file.text, encoding="utf-8")
    partial.replace(file)
    about, size = export_file.contents, file.stat().st_size
    if as_json:
        answer = about.model_dump(include={"version", "selection", "rows", "selected", "tokens"})
        say_json({"file": str(file), "bytes": size, **answer, "columns": [column.name for column in about.columns]})
        return
    left = f" of {about.selected:,}" if about.selected > about.rows else ""
    say(
        f"{file}: {about.rows:,}{left} rows with {len(about.columns)} columns and {about.tokens:,} tokens, "
        f"version {about.version} of the buffer, {size / 1e6:.1f} MB"
    )


def _serve(stores: list[str], door: "Door", listening: socket.socket, labels: "LabelSchema | None") -> None:
    """Until Ctrl-C or SIGTERM."""
    import uvicorn

    sys.meta_path.insert(0, _WithoutPandas)

    from agentrl.flows.viewer.app import application, opening
    from agentrl.flows.viewer.below import Below, named
    from agentrl.recorder.connections import Connection  # half-sent requests end after a time

    names = named(stores) if len(stores) > 1 else {"": stores[0]}
    readers: dict[str, Any] = {}
    for name, store in names.items():
        readers[name] = opening(store, labels, readers)
    viewers = {
        f"{door.base}/{name}".rstrip("/"): application(reader, door, lambda: server.should_exit, list(names), name)
        for name, reader in readers.items()
    }
    app_ = Below(viewers) if any(viewers) else viewers[""]
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off"}
    config = uvicorn.Config(app_, http=Connection, timeout_graceful_shutdown=2, **quiet)
    server = uvicorn.Server(config)
    server.run(sockets=[listening])
