"""The stages that make a cut, a set of rows with a manifest that others can check, and bring in a cut of others."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentrl.datastore.curation.rules import ByAnnotations, Decontaminate, Rule, Rules
from agentrl.datastore.search.embedding import EmbedderChoice
from agentrl.pipelines.handles import Folder, Table, Tasks, Trajectories
from agentrl.pipelines.parts.distinct import distinct
from agentrl.pipelines.parts.dividing import dividing
from agentrl.pipelines.stage import Context, External, StageConfig, stage
from agentrl.pipelines.stages.curate import funnel_table
from agentrl.pipelines.stages.select import first_level, in_split, known_of, matching, not_in_split
from agentrl.schemas.pipeline import Name

if TYPE_CHECKING:
    from agentrl.datastore.curation.curate import Level
    from agentrl.schemas.cut import CutAnnotations, CutHeldOut, CutOrigin, CutSecrets, EvaluationSet


class ComparedSet(BaseModel):
    """Questions that no row of the cut may hold: those of a file, or of a split of the buffer. Rows are compared as the
    rule ``decontaminate`` does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: Annotated[str, External("file")] | None = Field(
        None, description="JSON Lines, a JSON array, CSV or Parquet with a record for each question; its content counts"
    )
    column: str = Field("prompt", description="of file: the key of a record that holds the question")
    split: str | None = Field(None, description="rows of the buffer of this split, with what was done to solve them")
    ngram: int = Field(8, ge=1, description="words of an n-gram")
    overlap: float = Field(0.5, gt=0, le=1, description="share of n-grams from which on a row is dropped")
    cosine: float | None = Field(
        None, gt=0, le=1, description="of embeddings of questions, from which on a row is dropped; null: n-grams alone"
    )

    @model_validator(mode="after")
    def _names_one(self) -> "ComparedSet":
        if (self.file is None) == (self.split is None):
            raise ValueError("needs file or split, and not both")
        if self.split and "column" in self.model_fields_set:
            raise ValueError("column does nothing with split; it is for file")
        return self


class CutTerms(BaseModel):
    """What a cut asks for beside rules."""

    evaluation_sets: dict[Name, ComparedSet] = Field(
        {}, description="name -> questions; rows that hold one of them are dropped after the rules, and counted"
    )
    licences: dict[str, str] = Field(
        {}, description="licence, as the hub spells it -> SQL over the scalar columns, as in {mit: source = 'model'}"
    )

    secrets: Literal["report", "refuse"] | None = Field(
        None, description="look for secrets in the rows that are left: report counts them, refuse makes no cut of them"
    )

    @field_validator("licences")
    @classmethod
    def _can_be_judged(cls, licences: dict[str, str]) -> dict[str, str]:
        from agentrl.datastore.curation.conditions import check_rows

        for where in licences.values():
            check_rows(where)
        return licences


class CutRules(CutTerms, Rules):
    """The content of the file of rules that a cut is made by."""


class CutConfig(CutTerms, StageConfig):
    rules: list[Rule] = Field([], description="applied in this order; see docs/reference/buffer.md")
    version: int | None = Field(
        None, ge=0, description="version of the buffer's table; null, with trajectories alone: the newest"
    )
    split: str | None = Field("train", description="split of the tasks whose rows are taken; null takes all")
    embedder: EmbedderChoice = Field(
        "embedded", description="embedded (the buffer's own words), minilm, or a sentence-transformers model or path"
    )

    @model_validator(mode="after")
    def _pins_splits(self) -> "CutConfig":
        split = next((name for name, compared in self.evaluation_sets.items() if compared.split), None)
        if self.version is None and split is not None:
            raise ValueError(
                f"evaluation_sets.{split} names a split of the buffer, whose rows are others in each version, and "
                "version is null: set version, or give the questions as a file or as inputs.heldout"
            )
        return self


Drop = Callable[[str, pa.Array], None]
"""Is told a rule and the ids that it dropped."""


class CutOutputs(NamedTuple):
    trajectories: Trajectories
    funnel: Table
    cut: Folder


@stage("trajectories.cut", version=1)
def cut(
    context: Context,
    config: CutConfig,
    trajectories: list[Trajectories] | None = None,
    heldout: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
) -> CutOutputs:
    """Rows of one version of the buffer, or of the selections given, narrowed by rules and compared with evaluation
    sets, as a data set to give to others. The folder ``cut`` holds ``cut.json`` (see ``schemas/cut.py``), ``rows`` (ids
    and digests of content), ``dropped`` (ids, each with the rule that dropped it) and ``heldout`` (the rows of the
    buffer that the others were compared with, if any). The same version, rules and seed
    give the same bytes. ``heldout`` tasks are evaluation sets too, by the names of their stages."""
    from agentrl.datastore.cuts import make
    from agentrl.datastore.table.delta_table import schema_version
    from agentrl.schemas.cut import CutLevel, CutManifest, CutTable

    if config.version is None and trajectories is None:
        raise ValueError("with.version is null, and no selection is given: name a version, or wire inputs.trajectories")
    buffer, whole = context.buffer, context.files(lambda folder: None, "cut")
    table = buffer.table(config.version)
    given = None if trajectories is None else distinct(trajectories)
    with make.dropping(whole.path) as add:
        ids, funnel = _narrowed(context, config, table.version(), given, add)
        ids, compared = _compared(context, config, table.version(), ids, heldout, funnel, add)
    counts, sources = make.described(buffer, ids, table.version(), config.licences)
    manifest = CutManifest(
        rows=len(ids),
        digest=make.write_rows(buffer, ids, whole.path),
        table=CutTable(id=str(table.metadata().id), version=table.version(), columns=schema_version(table)),
        origin=[_origin(selection) for selection in trajectories or []],
        split=config.split,
        seed=context.seed,
        embedder=str(config.embedder),
        rules=[rule.model_dump(mode="json") for rule in config.rules],
        funnel=[CutLevel(rule=level.rule, before=level.before, after=level.after) for level in funnel],
        counts=counts,
        licences=config.licences,
        sources=sources,
        evaluation_sets=compared,
        annotations=_annotations(context, config),
        heldout=_heldout(context, config, table.version(), whole.path),
        secrets=_secrets(context, config, ids),
        files={},
    )
    identity = make.write_manifest(whole.path, manifest).identity
    context.metrics.update(before=funnel[0].before if funnel else len(ids), after=len(ids), sha256=identity)
    return CutOutputs(context.select(ids), context.table(funnel_table(funnel), "funnel"), whole)


def _annotations(context: Context, config: CutConfig) -> "list[CutAnnotations]":
    """The annotations that rules read."""
    from agentrl.datastore.storage.digest import table_digest
    from agentrl.schemas.cut import CutAnnotations

    used = []
    for rule in config.rules:
        if isinstance(rule, ByAnnotations):
            rows = context.buffer.annotations.rows(rule.version)
            rows = rows.filter(pc.equal(rows["name"], rule.name))
            digest = table_digest([rows])
            used.append(CutAnnotations(name=rule.name, version=rule.version, annotations=len(rows), digest=digest))
    return used


def _heldout(context: Context, config: CutConfig, version: int, folder: Path) -> "CutHeldOut | None":
    """The rows of the buffer that count as held out, for rules and evaluation sets; each is named in the folder. A
    pipeline may leave the version to be the newest, and later nobody could say which it was."""
    from agentrl.datastore.cuts import make
    from agentrl.schemas.cut import CutHeldOut

    splits = {split for rule in config.rules if isinstance(rule, Decontaminate) for split in rule.splits}
    splits |= {compared.split for compared in config.evaluation_sets.values() if compared.split}
    if not splits:
        return None
    ids = pa.concat_arrays([matching(context.buffer, in_split(None, split), version) for split in sorted(splits)])
    ids = ids.take(pc.sort_indices(ids))
    if not len(ids):
        return None
    digest = make.write_rows(context.buffer, ids, folder, make.HELDOUT)
    return CutHeldOut(version=version, splits=sorted(splits), rows=len(ids), digest=digest)


def _secrets(context: Context, config: CutConfig, ids: pa.Array) -> "CutSecrets | None":
    """What a search for secrets found. Raises StoreError that names rows and kinds if rows with secrets are refused."""
    from agentrl.datastore.formats.exports import held_secrets, refuse_secrets
    from agentrl.datastore.redaction.rows import unread_tokens
    from agentrl.schemas.cut import CutSecrets

    if config.secrets is None:
        return None
    held = held_secrets(context.buffer, ids)
    if config.secrets == "refuse":
        refuse_secrets(held)
    if held.unread:
        print(unread_tokens(held.unread))
    return CutSecrets(rows=len(held.rows), places=dict(sorted(held.places.items())), unread=held.unread)


def _origin(selection: Trajectories) -> "CutOrigin":
    from agentrl.schemas.cut import CutOrigin

    chosen = selection.selection()["trajectory_id"]
    digest = selection.buffer.digest(chosen) if len(chosen) else ""
    return CutOrigin(stage=selection.stage, output=selection.output, rows=len(chosen), digest=digest)


def _narrowed(
    context: Context, config: CutConfig, version: int, given: pa.Array | None, add: Drop
) -> "tuple[pa.Array, list[Level]]":
    """The ids that split and rules leave, sorted, and the funnel. Raises StoreError if the version lacks rows that are
    given."""
    from agentrl.datastore.curation.curate import curate

    if given is not None:
        known_of(context.buffer, given, version, "selection")
    ids, funnel = matching(context.buffer, in_split(None, config.split), version, given), list["Level"]()
    if config.split is not None:
        left = not_in_split(context.buffer, None, config.split, version, given)
        funnel = first_level(config.split, len(left), len(ids))
        for level in funnel:
            add(level.rule, left)
    with dividing(context) as divide:
        result = curate(
            context.buffer,
            config.rules,
            ids=ids,
            seed=context.seed,
            embedder=config.embedder,
            version=version,
            on_dropped=add,
            progress=context.progress,
            divide=divide,
        )
    return result.ids, [*funnel, *result.funnel]


def _compared(
    context: Context,
    config: CutConfig,
    version: int,
    ids: pa.Array,
    heldout: list[Tasks],
    funnel: "list[Level]",
    add: Drop,
) -> "tuple[pa.Array, list[EvaluationSet]]":
    """The ids of rows that hold no question of an evaluation set, and what the manifest says of each set. A level for
    each is added to the funnel."""
    from agentrl.datastore.curation.curate import Level, curate
    from agentrl.schemas.cut import EvaluationSet, question_digest

    sets = {
        name: (compared, _questions(context, compared, version)) for name, compared in config.evaluation_sets.items()
    }
    for tasks in heldout:
        sets[f"{tasks.stage}.{tasks.output}"] = (
            ComparedSet(file=str(tasks.path)),
            [task.prompt for task in tasks.read()],
        )
    compared_sets = []
    for name, (compared, questions) in sets.items():
        splits = [compared.split] if compared.split else []
        settings = {"ngram": compared.ngram, "overlap": compared.overlap, "cosine": compared.cosine}
        with dividing(context) as divide:
            result = curate(
                context.buffer,
                [Decontaminate.model_validate({"rule": "decontaminate", "splits": splits, **settings})],
                ids=ids,
                heldout=[] if compared.split else questions,
                seed=context.seed,
                embedder=config.embedder,
                version=version,
                on_dropped=_under(f"evaluation set {name}", add),
                divide=divide,
            )
        [level] = result.funnel
        funnel.append(Level(f"evaluation set {name}", level.before, level.after, level.examples))
        digest, dropped = question_digest(questions), level.before - level.after
        compared_sets.append(
            EvaluationSet(name=name, questions=len(set(questions)), digest=digest, dropped=dropped, **settings)
        )
        ids = result.ids
    return ids, compared_sets


def _under(rule: str, add: Drop) -> Drop:
    """Calls ``add`` with another name of the rule."""
    return lambda _, ids: add(rule, ids)


def _questions(context: Context, compared: ComparedSet, version: int) -> list[str]:
    """The questions of a file or split, as the rule ``decontaminate`` takes them. Raises StoreError if there are none,
    or if a record has no question."""
    from agentrl.datastore.curation.text import first_question
    from agentrl.datastore.cuts.folder import BATCH_ROWS
    from agentrl.datastore.errors import StoreError
    from agentrl.datastore.formats.source import Source

    if compared.file is None:
        ids, questions = matching(context.buffer, in_split(None, compared.split), version), list[str]()
        if not len(ids):
            raise StoreError(f"evaluation set: version {version} of the buffer has no row of split {compared.split!r}")
        for start in range(0, len(ids), BATCH_ROWS):
            rows = context.buffer.read(ids.slice(start, BATCH_ROWS), ["prompt", "messages"], version)
            questions += [first_question(row["prompt"], row["messages"]) for row in rows.to_pylist()]
        return list(filter(None, questions))
    source, questions = Source(Path(compared.file)), []
    for record in source.records():
        question = record.get(compared.column) if isinstance(record, dict) else None
        if not isinstance(question, str) or not question.strip():
            keys = ", ".join(map(str, record)) if isinstance(record, dict) else "no object"
            raise StoreError(
                f"evaluation set: {source.place} has no text under {compared.column!r}; it has {keys}; column says "
                "which key holds the question"
            )
        questions.append(question)
    if not questions:
        raise StoreError(f"evaluation set: {compared.file} holds no record")
    return questions


class ImportCutConfig(StageConfig):
    path: Annotated[str, External("file")] = Field(
        description="folder that an export of a cut wrote; its content counts"
    )


class CutBroughtIn(NamedTuple):
    trajectories: Trajectories
    cut: Folder


@stage("trajectories.import_cut", version=1)
def import_cut(context: Context, config: ImportCutConfig) -> CutBroughtIn:
    """The rows of a cut of another store, under their own ids, after every file and every row was compared with the
    cut; the folder ``cut`` is the very one that was exported. Rows that are there already stay as they are."""
    from shutil import copytree

    from agentrl.datastore.cuts.bring_in import import_cut as bring_in

    done = bring_in(context.buffer, Path(config.path), context.fingerprint, context.run_id, context.progress)
    whole = context.files(lambda folder: copytree(done.cut.path, folder, dirs_exist_ok=True), "cut")
    context.metrics.update(after=done.cut.manifest.rows, appended=done.appended, known=done.known)
    context.metrics.update(sha256=done.cut.identity, annotations=done.annotations)
    if done.refused:
        print(f"{done.refused} annotations do not fit their rows and are set aside in quarantine")
    return CutBroughtIn(context.select(done.cut.ids()), whole)
