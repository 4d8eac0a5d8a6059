"""Options and arguments of the command, each declared once; a command takes what it needs by name.

Commands that take the same set of options take them as one dataclass: :func:`command` spreads its fields.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def _a_place(text: str | None) -> str | None:
    if text is not None and not text.strip():
        raise typer.BadParameter("is empty; give a folder or s3://bucket/prefix (or unset AGENTRL_STORE)")
    return text


_STORE = typer.Option(
    "--store",
    envvar="AGENTRL_STORE",
    callback=_a_place,
    help="Folder or s3://bucket/prefix; default: store, beside the pipeline file if one is given",
)
Store = Annotated[str, _STORE]
StoreOfFile = Annotated[str | None, _STORE]
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="How many to print")]
Seed = Annotated[int, typer.Option(help="Seed of everything random")]
ModelName = Annotated[
    str, typer.Option("--model", help="TAG, STAGE, PIPELINE:STAGE or STAGE/FINGERPRINT, or a model folder")
]
TurnTokens = Annotated[int | None, typer.Option(min=1, help="Sampled tokens in one turn")]
Host = Annotated[str, typer.Option(help="Address to listen at; one that others reach needs more, see the docs")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done; change nothing")]
ShardsBy = Annotated[
    str | None,
    typer.Option("--shard-engine", help="What runs parts: processes, ray, slurm, or {type: prefect, pool: NAME, ...}"),
]

# pipelines
File = Annotated[str, typer.Argument(help="A pipeline file, or the name of one in the library, e.g. quickstart")]
Profile = Annotated[str | None, typer.Option(help="A profile of the pipeline, e.g. cluster")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="stages.dpo.with.beta=0.3; may be repeated")]
StepSettings = Annotated[list[str] | None, typer.Option("--set", help="algorithm.clip_high=0.3; may be repeated")]
Only = Annotated[list[str] | None, typer.Option(help="Only this stage, from cached inputs; may be repeated")]
From = Annotated[list[str] | None, typer.Option("--from", help="This stage and all after it")]
Until = Annotated[list[str] | None, typer.Option(help="This stage and all before it")]
Force = Annotated[bool, typer.Option("--force", help="Take the stages as not cached")]
OnSecrets = Annotated[
    str | None,
    typer.Option("--secrets", help="redact: write placeholders for secrets; refuse: fail if a row holds any (exports)"),
]
Replace = Annotated[bool, typer.Option("--force", help="Replace a file that exists")]
Artifact = Annotated[str, typer.Argument(help="TAG, STAGE (its newest), PIPELINE:STAGE or STAGE/FINGERPRINT")]
Run = Annotated[str, typer.Argument(help="A run: its id, the beginning of it, or last")]

# the buffer
At = Annotated[str | None, typer.Option("--at", help="A version number, or a time such as 2026-01-31T12:00")]
Where = Annotated[str | None, typer.Option(help="SQL over the scalar columns, as in: success and env = 'lookup'")]
Split = Annotated[str | None, typer.Option(help="Only rows of this split: train, dev or heldout; all takes them all")]
SplitOfAll = Annotated[str | None, typer.Option("--split", help="Split of all rows: train, dev or heldout")]
Selection = Annotated[
    str | None, typer.Option(help="A selection: TAG, the STAGE that made it, PIPELINE:STAGE, or STAGE/FINGERPRINT")
]
Embedder = Annotated[
    str | None,
    typer.Option(
        help="minilm, embedded (the buffer's own words), or a sentence-transformers model or path; default: minilm if "
        "the extra of that name is installed, else embedded",
    ),
]
Name = Annotated[str, typer.Option(help="Name of the selection in the catalog")]
Best = Annotated[int, typer.Option("--k", "-k", min=1, help="How many, best first")]
Format = Annotated[str, typer.Option("--format", "-f", help="Format to write; see docs/reference/formats.md")]
AnyFormat = Annotated[
    str | None,
    typer.Option(
        "--format", "-f", help="Format of the files (docs/reference/formats.md); default: what each looks like"
    ),
]
Location = Annotated[Path, typer.Argument(help="File or folder")]


@dataclasses.dataclass
class PipelineOptions:
    """Which pipeline a command works on, and with which settings."""

    file: File
    profile: Profile = None
    settings: Settings = None


@dataclasses.dataclass
class PlanOptions:
    """Which stages of a pipeline may run."""

    only: Only = None
    first: From = None
    until: Until = None
    force: Force = False


@dataclasses.dataclass
class Rows:
    """Which rows of the buffer a command works on."""

    store: Store = "store"
    where: Where = None
    split: Split = None
    selection: Selection = None

    def split_or(self, default: str | None) -> str | None:
        """The split that rows are taken of; None for all."""
        return None if self.split == "all" else self.split or default


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a command. A parameter whose annotation is a dataclass of this module stands for its fields."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, Any] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            annotation = hints[parameter.name]
            if not dataclasses.is_dataclass(annotation):
                parameters.append(parameter.replace(annotation=annotation))
                continue
            groups[parameter.name] = annotation
            fields = get_type_hints(annotation, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=fields[field.name],
                    default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
                )
                for field in dataclasses.fields(annotation)
            ]

        @functools.wraps(function)
        def call(**values: Any) -> Any:
            for group, kind in groups.items():
                values[group] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
            return function(**values)

        keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        call.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        del call.__wrapped__
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
        app.command(name)(call)
        return function

    return declare
