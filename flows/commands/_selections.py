"""Selections on the command line: which rows a command works on, and publishing what it chose as a stage does."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from agentrl.flows.options import Rows

if TYPE_CHECKING:
    import pyarrow as pa

    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.pipelines.run.execute import Outcome
    from agentrl.pipelines.stage import Progress
    from agentrl.schemas.manifest import InputRecord, Manifest

R = TypeVar("R", bound=BaseModel)
"""Content of a file of rules."""

SELECT = "trajectories.select"
"""The stage that commands publish selections by."""


def selected(
    buffer: "TrajectoryBuffer",
    rows: Rows,
    split: str | None,
    version: int | None = None,
    ids: Path | None = None,
) -> "pa.Array":
    """Ids of the rows of a selection in its order, or of all rows sorted, that fulfil ``where``, are of a split (None:
    of any), and stand in the file ``ids`` if there is one."""
    from agentrl.pipelines.stages.select import in_split, matching, named

    given = _given(buffer, rows)
    if ids is not None:
        given = named(buffer, str(ids), version, given)
    return matching(buffer, in_split(rows.where, split), version, given)


def left_out(buffer: "TrajectoryBuffer", rows: Rows, split: str | None) -> int:
    """How many rows :func:`selected` leaves out because they are of other splits."""
    from agentrl.pipelines.stages.select import not_in_split

    return 0 if split is None else len(not_in_split(buffer, rows.where, split, ids=_given(buffer, rows)))


def _given(buffer: "TrajectoryBuffer", rows: Rows) -> "pa.Array | None":
    """Ids of the selection that was named; None if there is none."""
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.datastore.read.lookup import id_array
    from agentrl.pipelines.handles import Trajectories
    from agentrl.pipelines.run.execute import open_output

    if rows.selection is None:
        return None
    catalog = Catalog(buffer.store)
    handle = open_output(record_of(catalog, rows.selection), catalog, buffer)
    assert isinstance(handle, Trajectories)
    return id_array(handle.selection()["trajectory_id"])


def record_of(catalog: "Catalog", text: str) -> "InputRecord":
    """The selection that a tag, a stage's name or STAGE/FINGERPRINT stands for. Raises StoreError if it is none."""
    from agentrl.datastore.errors import StoreError
    from agentrl.pipelines.results.lineage import find_artifact
    from agentrl.schemas.manifest import InputRecord, Kind

    try:
        manifest = find_artifact(catalog, text)
    except LookupError as error:
        raise StoreError(f"--selection: {error.args[0]}") from None
    outputs = [name for name, output in manifest.outputs.items() if output.kind is Kind.TRAJECTORIES]
    if not outputs:
        listed = ", ".join(f"{name} ({output.kind})" for name, output in manifest.outputs.items())
        raise StoreError(f"--selection {text!r} has no trajectories among its outputs: {listed}")
    return InputRecord(stage=manifest.ingredients.stage, output=outputs[0], fingerprint=manifest.fingerprint)


def saved_before(store: str, name: str, uses: str = SELECT) -> "list[Manifest]":
    """What commands saved by the stage ``uses`` under this name, newest first. Raises StoreError if the name stands for
    something else, which it would hide, or cannot be one."""
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.datastore.errors import StoreError
    from agentrl.pipelines.results.gc import BY_COMMAND

    if problem := _misnamed(name, "NAME"):
        raise StoreError(problem)
    catalog = Catalog(store)
    if name in catalog.tags():
        raise StoreError(f"{name!r} is a tag already; choose another name")
    manifests = catalog.manifests(name)
    if others := [
        manifest for manifest in manifests if manifest.run_id != BY_COMMAND or manifest.ingredients.uses != uses
    ]:
        raise StoreError(f"{name!r} is the name of a stage ({others[0].ingredients.uses}); choose another name")
    return manifests


def _misnamed(name: str, option: str) -> str:
    """What is wrong with the name of a selection; empty if nothing is."""
    from pydantic import TypeAdapter, ValidationError

    from agentrl.schemas.pipeline import Name as StageName

    try:
        TypeAdapter(StageName).validate_python(name)
    except ValidationError as error:
        return "; ".join(f"{option} {name!r}: {problem['msg']}" for problem in error.errors())
    return ""


def publish(
    rows: Rows,
    name: str,
    config: dict[str, Any],
    seed: int,
    source: Path,
    progress: "Progress | None" = None,
    uses: str = SELECT,
) -> "Outcome":
    """Run ``uses`` as a stage called ``name``, in this process, with a fingerprint, the stage's lock and a manifest. If
    the same is published already, it is returned. gc keeps what commands published.

    Raises StoreError if the config or the name is wrong, and whatever the stage raises.
    """
    from pydantic import ValidationError

    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.errors import StoreError
    from agentrl.datastore.read.views import names_annotations
    from agentrl.pipelines.file import library
    from agentrl.pipelines.file.load import Node, ResolvedPipeline
    from agentrl.pipelines.plan.code import CodeGraph
    from agentrl.pipelines.plan.fingerprint import Fingerprinter, fingerprint
    from agentrl.pipelines.plan.plan import Plan, PlannedStage, Selection, Status
    from agentrl.pipelines.results.gc import BY_COMMAND
    from agentrl.pipelines.run.execute import job_of, perform
    from agentrl.pipelines.stage import no_progress
    from agentrl.schemas.pipeline import Execution

    if problem := _misnamed(name, "--name"):
        raise StoreError(problem)
    stage = library.resolve(uses)
    if uses == SELECT and names_annotations(config.get("where") or ""):
        config = {"annotations": TrajectoryBuffer(rows.store).annotations.version, **config}
    try:
        checked = stage.config.model_validate(config)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
        raise StoreError("; ".join(lines)) from None
    catalog = Catalog(rows.store)
    node = Node(name, stage, checked, {}, seed, Execution())
    records = {"trajectories": [record_of(catalog, rows.selection)]} if rows.selection else {}
    ingredients = Fingerprinter(CodeGraph(())).ingredients(node, records)
    digest = fingerprint(ingredients)
    step = PlannedStage(node, digest, ingredients, Status.RUN)
    plan = Plan(
        ResolvedPipeline("buffer", source, "", {name: node}, (), str(source)), rows.store, Selection(), {name: step}
    )
    return perform(job_of(step, plan, BY_COMMAND), progress or no_progress)


def funnel_of(manifest: "Manifest", rows: Rows) -> list[dict[str, Any]]:
    """The funnel of a published selection, a row per rule."""
    return _output(manifest, rows, "funnel").to_pylist()


def selection_of(manifest: "Manifest", rows: Rows) -> dict[str, list[Any]]:
    """Ids and weights of a published selection."""
    return _output(manifest, rows, "trajectories").to_pydict()


def _output(manifest: "Manifest", rows: Rows, output: str) -> "pa.Table":
    import pyarrow.parquet as pq

    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.pipelines.run.execute import open_output
    from agentrl.schemas.manifest import InputRecord

    record = InputRecord(stage=manifest.ingredients.stage, output=output, fingerprint=manifest.fingerprint)
    return pq.read_table(open_output(record, Catalog(rows.store), TrajectoryBuffer(rows.store)).path)


def read_rules(rules: Any, kind: type[R]) -> R:
    """The rules of a YAML file, or of what one holds. Raises StoreError with all that is wrong with it."""
    return rules_of(Path(rules), kind) if isinstance(rules, str | PathLike) else checked_rules(rules, "rules", kind)


def rules_of(path: Path, kind: type[R], what: str = "rules") -> R:
    """The rules of a YAML file, of this ``kind``, or ``what`` else it holds. Raises StoreError with all that is wrong
    with it."""
    from agentrl.datastore.errors import StoreError
    from agentrl.pipelines.file import library, yaml_text

    library.search_in([path.parent, Path.cwd()])  # rules of the user's own
    try:
        content, wrong = yaml_text.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"there is no {what} file {path}") from None
    except (UnicodeDecodeError, yaml_text.YamlError) as error:
        raise StoreError(f"{path} {error if isinstance(error, yaml_text.YamlError) else 'is not text'}") from None
    if wrong:
        raise StoreError(
            f"{path} does not hold {what}:\n" + "\n".join(f"  line {mistake.line}: {mistake}" for mistake in wrong)
        )
    return checked_rules(content, str(path), kind, what)


def checked_rules(content: Any, source: str, kind: type[R], what: str = "rules") -> R:
    """A list of rules, or a mapping with ``rules`` and settings. Raises StoreError with all that is wrong with it."""
    from pydantic import ValidationError

    from agentrl.datastore.errors import StoreError

    try:
        return kind.model_validate({what: content} if isinstance(content, list) else content)
    except ValidationError as error:
        lines = [f"  {'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in error.errors()]
        raise StoreError(f"{source} does not hold {what}:\n" + "\n".join(lines)) from None
