"""The stage that imports what others recorded: files of any format become rows of the buffer that stages read."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import pyarrow as pa
from pydantic import Field, PlainValidator, field_validator

from agentrl.pipelines.handles import Table, Trajectories
from agentrl.pipelines.parts.dividing import dividing
from agentrl.pipelines.stage import Context, External, Progress, StageConfig, no_progress, stage
from agentrl.schemas.annotations import ADDED

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.formats.imported import Imported
    from agentrl.datastore.formats.imports import CheckTokens, Labels
    from agentrl.datastore.formats.own import OwnFormat
    from agentrl.datastore.table.ingest import OnError
    from agentrl.models.policy import Tokenizing
    from agentrl.schemas.pipeline import ShardEngine

FILES_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("format", pa.string(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
    ]
)


def known_format(format: Any) -> Any:
    """The name of a format of ours, or the user's own with its settings. Raises ValueError if there is no such
    format."""
    if format is None:
        return None
    from agentrl.datastore.errors import StoreError
    from agentrl.datastore.formats import named
    from agentrl.datastore.formats.own import OWN_FORMAT

    if not isinstance(format, str) or ":" in format:
        return OWN_FORMAT.read(format)
    try:
        named(format)
    except StoreError as error:
        raise ValueError(str(error)) from None
    return format


if TYPE_CHECKING:
    FormatChoice = str | OwnFormat | None
else:
    FormatChoice = Annotated[Any, PlainValidator(known_format, json_schema_input_type=str | dict[str, Any] | None)]


class ImportConfig(StageConfig):
    """Which files are imported, and values for all their rows; None keeps the value of the source."""

    paths: list[Annotated[str, External("file")]] = Field(min_length=1, description="files and folders; content counts")
    format: FormatChoice = Field(
        None,
        description="of all files (docs/reference/formats.md), or {type: module:Class, ...}; None finds that of each",
    )
    env: str | None = Field(None, description="environment of all rows")
    split: str | None = Field(None, description="split of all rows")
    policy: str | None = Field(None, description="policy of all rows")
    task_prefix: str | None = Field(None, description="put before every task id")
    reward: str | None = Field(None, description="a component, or a field of the record as in stats.final")
    success: str | None = Field(None, description="SQL, as in: reward >= 0.5 and exact = 1")
    tokenizer: Annotated[str, External("tokenizer")] | None = Field(
        None, description="folder or name of the tokenizer that made the ids"
    )
    join: Annotated[Annotated[str, External("file")] | None, ADDED] = Field(
        None, description="CSV, JSON Lines or Parquet with reward, success, split, tags or components; content counts"
    )
    on: Annotated[str | None, ADDED] = Field(None, description="key of join: KEY, or OURS=THEIRS; None is source_id")
    quarantine: bool = Field(False, description="set records and rows that are broken aside, and append the rest")
    prompts: bool = Field(False, description="take records of chat without any assistant message too")
    max_record_mb: Annotated[float, ADDED] = Field(64, gt=0, description="records that take more are refused")

    @field_validator("success")
    @classmethod
    def _is_sql(cls, success: str | None) -> str | None:
        if success is not None:
            import polars as pl

            try:
                pl.sql_expr(success)
            except pl.exceptions.PolarsError as error:
                raise ValueError(f"is no SQL expression: {error}") from None
        return success

    def labels(self, tokenizer: str | None) -> "Labels":
        """The values for all rows, of which ``tokenizer``, by its fingerprint, made the ids."""
        from agentrl.datastore.formats.labels import Labels

        own = (self.env, self.split, self.policy, self.task_prefix, self.reward, self.success)
        return Labels(*own, tokenizer, self.join, self.on)


def tokenizer_check(name: str) -> "tuple[Tokenizing, CheckTokens]":
    """A tokenizer, and the check that a row's ids are its own."""
    from agentrl.chat.check import token_problem
    from agentrl.models.policy import Tokenizing, load_tokenizer

    speaker = Tokenizing(name)
    speaker.tokenizer = loaded = load_tokenizer(name)
    return speaker, lambda row: token_problem(row, loaded)


def import_files(
    buffer: "TrajectoryBuffer",
    paths: Sequence[str],
    format: "str | OwnFormat | None" = None,
    *,
    stage: str = "import",
    tokenizer: str | None = None,
    quarantine: bool = False,
    prompts: bool = False,
    max_record_mb: float = 64,
    dry_run: bool = False,
    shard_engine: "ShardEngine | str | Mapping[str, Any] | None" = None,
    progress: Progress = no_progress,
    **labels: str | None,
) -> "Imported":
    """Append the rows of files and folders outside of a pipeline; ``labels`` are those of ``Labels``. ``shard_engine``
    is what ``execution.engine`` of a pipeline takes, or its type alone. Raises StoreError as ``import_paths`` does, and
    TypeError for a label that there is not."""
    from agentrl.datastore.formats.imports import import_paths
    from agentrl.datastore.formats.labels import Labels
    from agentrl.datastore.shards.divide import dividing_of
    from agentrl.pipelines.tokenizers import keep_tokenizer

    speaker, check = tokenizer_check(tokenizer) if tokenizer else (None, None)
    if speaker and not dry_run:
        keep_tokenizer(buffer.storage, speaker)
    fingerprint = speaker.tokenizer_fingerprint if speaker else None
    return import_paths(
        buffer,
        paths,
        format,
        stage=stage,
        labels=Labels(**labels, tokenizer=fingerprint),
        on_error="quarantine" if quarantine else "raise",
        prompts=prompts,
        dry_run=dry_run,
        check_tokens=check,
        max_record=int(max_record_mb * 2**20),
        progress=lambda files, of, rows: progress(files, of, rows=rows),
        dividing=dividing_of(shard_engine, buffer.store, progress),
    )


class Import(NamedTuple):
    trajectories: Trajectories
    files: Table


@stage("trajectories.import", version=1)
def import_(context: Context, config: ImportConfig) -> Import:
    """Rows of files and folders in any format of docs/reference/formats.md. The paths count by their content: if a
    file changes or a folder gets another one, all of them are imported again. The second output says which file gave
    how many rows; the metrics count what is not carried. What people and judges said of the rows, as their records
    have it, becomes annotations of the rows of this stage run."""
    from agentrl.datastore.formats.imports import reading

    speaker, check = tokenizer_check(config.tokenizer) if config.tokenizer else (None, None)
    if speaker:
        context.keep_tokenizer(speaker)
    labels = config.labels(speaker.tokenizer_fingerprint if speaker else None)
    on_error: OnError = "quarantine" if config.quarantine else "raise"
    with (
        dividing(context) if context.engine.type else nullcontext() as divide,
        reading(
            config.paths,
            config.format,
            stage=context.stage,
            labels=labels,
            on_error=on_error,
            prompts=config.prompts,
            max_record=int(config.max_record_mb * 2**20),
            check_tokens=check,
        ) as reading_files,
    ):
        reading_files.divide = divide
        reading_files.leave_out(set())
        rows = reading_files.annotating(context.buffer, reading_files.tables(context.fingerprint, _renaming(context)))
        if context.has_shard(0):  # a run that was killed appended them; they are read again only for the counts
            for _ in rows:
                pass
        else:
            reading_files.result.quarantined = context.append(rows, on_error=on_error)
            reading_files.set_aside(context.buffer, f"{context.stage}-{context.fingerprint[:8]}")
        result = reading_files.finish()
    context.metrics.update(_said(result))
    return Import(context.select(), context.table(pa.Table.from_pylist(result.files, schema=FILES_SCHEMA), "files"))


def _renaming(context: Context) -> Callable[[pa.Table], pa.Table]:
    """What gives rows ids of this stage run, in the order in which it gets them."""
    from agentrl.datastore.formats.columns import with_column

    ids: dict[str, str] = {}

    def renamed(table: pa.Table) -> pa.Table:
        names = [context.trajectory_id(len(ids) + number) for number in range(table.num_rows)]
        ids.update(zip(table["trajectory_id"].to_pylist(), names, strict=True))
        parents = [ids.get(parent or "") for parent in table["parent_id"].to_pylist()]
        table = with_column(table, "trajectory_id", names)
        table = with_column(table, "parent_id", parents)
        return with_column(table, "fingerprint", [""] * len(names))

    return renamed


def _said(result: "Imported") -> dict[str, float | int | str | None]:
    """Counts of an import, for the manifest and the table after a run."""
    counts = {name: getattr(result, name) for name in ("rows", "messages", "calls", "tokens", "successes", "unscored")}
    lists = {
        "ignored": ", ".join(f"{key} {count}" for key, count in result.ignored.items()),
        "remarks": ", ".join(f"{text}: {count}" for text, count in result.remarks.items()),
        "skipped": ", ".join(result.skipped),
        "doubled": ", ".join([*result.known, *result.repeats]),
    }
    aside = {
        "annotations": result.annotations,
        "quarantined": result.quarantined,
        "unreadable": len(result.unreadable),
    }
    return counts | {name: value for name, value in (lists | aside).items() if value}
