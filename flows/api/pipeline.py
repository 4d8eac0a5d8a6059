"""Pipelines in Python: read from a file or written here, planned, run, and saved as YAML."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.api.run import RunResult
from agentrl.flows.api.store import Store
from agentrl.pipelines.file.document import default_store, find, parse, read, with_profile, with_settings
from agentrl.pipelines.file.load import ResolvedPipeline, resolve
from agentrl.pipelines.plan.plan import Plan, Selection, make_plan
from agentrl.schemas.pipeline import PipelineSpec

if TYPE_CHECKING:
    import polars as pl

Names = str | Sequence[str] | None
"""Names of stages: one, several, or None for all."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline that was checked: every name in it is known, every edge typed, every config valid. It has a store,
    which its plans and runs use."""

    resolved: ResolvedPipeline
    spec: PipelineSpec
    store: Store

    @classmethod
    def of(
        cls,
        spec: PipelineSpec | Mapping[str, Any],
        *,
        store: "Store | str | os.PathLike[str] | None" = None,
        folder: str | os.PathLike[str] = ".",
    ) -> "Pipeline":
        """A pipeline written in Python: a :class:`PipelineSpec`, or a mapping with the keys of a pipeline file.

        ``folder`` is where modules of your own and relative files are looked for, and where ``store`` is if none is
        given. Raises SpecError with everything that
        is wrong with it, as for a file.
        """
        text = to_yaml(spec)
        document = parse(text, Path(folder) / "<python>")
        resolved = resolve(document, str(document.path), None, ())
        return cls(resolved, PipelineSpec.model_validate(document.value), _store(store, document.path))

    @property
    def name(self) -> str:
        return self.resolved.name

    @property
    def stages(self) -> list[str]:
        """Names of the stages, in an order in which they can run."""
        return list(self.resolved.nodes)

    def plan(self, *, only: Names = None, first: Names = None, until: Names = None, force: bool = False) -> Plan:
        """What a run would do and why, a row for each stage. ``first`` also selects all that reads from those stages,
        ``until`` all that they read from; ``force`` runs what is selected though it is cached.

        Raises SpecError if a name is no stage, or if something that the pipeline names is missing.
        """
        stages = Selection(_names(only), _names(first), _names(until), force)
        return make_plan(self.resolved, self.store.catalog, self.store.path, stages)

    def run(
        self,
        *,
        only: Names = None,
        first: Names = None,
        until: Names = None,
        force: bool = False,
        jobs: int = 1,
        prefect: bool | None = None,
        progress: bool = True,
    ) -> RunResult:
        """Run what is not cached, and return the run. ``jobs``: stages that may run at once; ``prefect``: None uses
        Prefect if a stage needs it; ``progress`` prints or shows how far the stages are.

        Raises SpecError as :meth:`plan` does, CannotRunError if stages are blocked or something that they need is
        missing, and StageError if a stage fails; what was done stays done.
        """
        from agentrl.flows.run import carried_out
        from agentrl.flows.showing import display_for
        from agentrl.flows.terminal import console

        plan = self.plan(only=only, first=first, until=until, force=force)
        session = carried_out(
            plan, self.store.catalog, jobs=jobs, prefect=prefect, display=display_for(console(), quiet=not progress)
        )
        if session is None:
            return _nothing_ran(plan, self.store.catalog)
        if session.failure:
            raise session.failure
        return RunResult(self.store.catalog, session.record, {n: m.fingerprint for n, m in session.manifests().items()})

    def status(self) -> "pl.DataFrame":
        """One row for each stage: whether it is cached, at work or out of date, since when, and its metrics or why it
        would run."""
        import polars as pl

        from agentrl.flows.show import status_rows
        from agentrl.pipelines.run.runs import all_runs

        runs = all_runs(self.store.catalog, self.name)
        return pl.DataFrame(status_rows(self.plan(), runs), infer_schema_length=None)

    def schedule(
        self, cron: str, *, name: str = "default", timezone: str | None = None, pool: str | None = None
    ) -> str:
        """Run the pipeline's file on a schedule of the Prefect server that ``PREFECT_API_URL`` names:
        ``pipeline.schedule("0 2 * * *")``. Returns the schedule's full name, which ``agentrl schedule`` lists, pauses
        and deletes.

        Raises ValueError if there is no server, if the line never comes true, or if the pipeline has no file.
        """
        from agentrl.flows.schedules import scheduled

        if not self.resolved.path.is_file():
            raise ValueError(f"pipeline {self.name} has no file that a worker could read; save() it and load() that")
        return scheduled(self.plan(), name, cron, timezone, pool)[0]

    def with_store(self, store: "Store | str | os.PathLike[str]") -> "Pipeline":
        """The same pipeline on another store."""
        return replace(self, store=_store(store, self.resolved.path))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the pipeline as YAML. Raises FileExistsError if there is a file already."""
        file = Path(path)
        with file.open("x", encoding="utf-8") as out:
            out.write(to_yaml(self.spec))
        return file

    def _repr_html_(self) -> str:
        return self.plan()._repr_html_()


def load(
    name: str | os.PathLike[str],
    *,
    set: Mapping[str, Any] | None = None,
    profile: str | None = None,
    store: "Store | str | os.PathLike[str] | None" = None,
) -> Pipeline:
    """A pipeline by the path of its file or by its name in the library. ``set`` changes settings by their keys:
    ``load("quickstart", set={"stages.grpo.with.iterations": 2})``. If no store is given, it is ``store`` beside the
    file, and for a pipeline of the library in the working directory.

    Raises SpecError with everything that is wrong with it.
    """
    settings = tuple(f"{key}={_yaml(value).strip()}" for key, value in (set or {}).items())
    document = read(find(str(name)))
    if profile:
        document = with_profile(document, profile)
    document = with_settings(document, settings)
    resolved = resolve(document, str(name), profile, settings)
    return Pipeline(resolved, PipelineSpec.model_validate(document.value), _store(store, document.path))


def to_yaml(spec: PipelineSpec | Mapping[str, Any]) -> str:
    """A pipeline as the text of a pipeline file, with the keys that were set alone."""
    if isinstance(spec, PipelineSpec):
        spec = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return _yaml(dict(spec))


def _yaml(value: Any) -> str:
    from ruamel.yaml import YAML

    writer, out = YAML(typ="safe"), StringIO()
    writer.default_flow_style = None if isinstance(value, dict) and "stages" in value else True
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.width = 4096
    writer.dump(value, out)
    return out.getvalue().removesuffix("...\n")


def _store(store: "Store | str | os.PathLike[str] | None", path: Path) -> Store:
    if isinstance(store, Store):
        return store
    return Store(default_store(path) if store is None else store)


def _names(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


def _nothing_ran(plan: Plan, catalog: Catalog) -> RunResult:
    stages = {step.name: {"status": str(step.status), "reasons": step.reasons} for step in plan.steps.values()}
    prints = {step.name: step.manifest.fingerprint for step in plan.steps.values() if step.manifest}
    return RunResult(catalog, {"run_id": None, "state": "up to date", "stages": stages}, prints)
