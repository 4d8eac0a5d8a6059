"""Prove the dialect of a model: what was tried, what its chat template wrote, what came back."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.flows.commands._common import FAILED, fail, open_catalog
from agentrl.flows.commands.artifacts import looked_up
from agentrl.flows.options import Json, Store, command
from agentrl.flows.terminal import console, say_json

if TYPE_CHECKING:
    from agentrl.chat.dialects import Trial

app = typer.Typer()


@command(app)
def dialect(
    model: Annotated[str, typer.Argument(help="A model folder, GGUF, artifact with a model, or name on the hub")],
    form: Annotated[
        str | None, typer.Option("--dialect", help="Try this one: hermes, search_r1 or retool, as model.dialect does")
    ] = None,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Prove the dialect of a model: write small conversations with its chat template, and read them back. Exit code 1
    if it is refused, or cannot write something."""
    from agentrl.pipelines.file.external import as_folder
    from agentrl.pipelines.generate import model_path
    from agentrl.pipelines.plan.proved import proved

    with looked_up():
        path = model_path(open_catalog(store), model)
    try:
        with looked_up():
            folder = str(as_folder(path, weights=False))
        trial = proved(folder, form)
    except OSError as error:
        raise fail(f"error: {model}: no tokenizer can be loaded: {str(error).splitlines()[0]}") from None
    except ValueError as error:
        if as_json:
            say_json({"model": model, "dialect": None, "refused": str(error)})
            raise typer.Exit(FAILED) from None
        raise fail(f"error: {model}: {error}", FAILED) from None
    if as_json:
        say_json({"model": model, **_facts(trial), "probes": trial.table()})
    else:
        _print(model, trial)
    raise typer.Exit(FAILED if trial.codec.cannot else 0)


def _facts(trial: "Trial") -> dict[str, Any]:
    codec = trial.codec
    return {"dialect": codec.dialect, "source": codec.source, "remarks": codec.remarks, "cannot": codec.cannot}


def _print(model: str, trial: "Trial") -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.print(Text(f"{model}: {trial.codec.dialect}"))
    out.print(Text(f"source: {trial.codec.source}"))
    table = Table("tried", "the template wrote", "came back", "verdict")
    for row in trial.table():
        table.add_row(*(Text(str(row[key])) for key in ("tried", "wrote", "back")), Text(row["verdict"]))
    out.print(table)
    for remark in trial.codec.remarks:
        out.print(Text(f"remark: {remark}"))
