"""What came out of a run: its stages as a table, and each stage with its metrics and outputs."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines import displays
from agentrl.pipelines.handles import Handle
from agentrl.pipelines.results.lineage import find_artifact
from agentrl.schemas.manifest import Manifest

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class StageResult:
    """One artifact: what a stage made. ``summary`` holds its metrics as they are shown after a run."""

    catalog: Catalog
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest.ingredients.stage

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def summary(self) -> dict[str, Any]:
        return dict(self.manifest.metrics)

    @property
    def warnings(self) -> list[str]:
        return self.manifest.warnings

    @property
    def metrics(self) -> "pl.DataFrame":
        """The metrics of each step of a training stage; of another stage its ``summary`` as one row."""
        import polars as pl

        if "metrics" in self.manifest.outputs:
            return self.frame("metrics")
        return pl.DataFrame([self.summary] if self.summary else [])

    @property
    def outputs(self) -> "pl.DataFrame":
        """One row for each output: its name, kind and number of rows."""
        import polars as pl

        named = self.manifest.outputs.items()
        return pl.DataFrame([{"output": name, "kind": str(output.kind), "rows": output.rows} for name, output in named])

    def output(self, name: str | None = None) -> Handle:
        """A handle on an output, which reads its rows. ``name`` may be left out if there is only one.

        Raises KeyError if there is no such output.
        """
        from agentrl.datastore.buffer import TrajectoryBuffer
        from agentrl.pipelines.run.execute import open_output
        from agentrl.schemas.manifest import InputRecord

        names = list(self.manifest.outputs)
        name = names[0] if name is None and len(names) == 1 else name
        if name not in names:
            raise KeyError(f"{self.name} has no output {name!r}; it has {', '.join(names)}")
        record = InputRecord(stage=self.name, output=str(name), fingerprint=self.fingerprint)
        return open_output(record, self.catalog, TrajectoryBuffer(self.catalog.storage.uri))

    def frame(self, output: str | None = None) -> "pl.DataFrame":
        """An output as a frame: the columns of a table, the scalar columns of trajectories, the fields of other rows.

        Raises TypeError for a model or a report, which are folders.
        """
        import polars as pl

        handle = self.output(output)
        if hasattr(handle, "table"):
            return pl.DataFrame(pl.from_arrow(handle.table()))
        if hasattr(handle, "read"):
            return pl.DataFrame([row.model_dump() for row in handle.read()])
        raise TypeError(f"{self.name}.{output or ''} is a {type(handle).__name__.lower()}: a folder at {handle.path}")

    def _repr_html_(self) -> str:
        rows = [{"metric": name, "value": value} for name, value in self.summary.items()]
        frame = displays.Frame()
        frame.block([("font-weight:600", f"{self.name}/{self.fingerprint[:8]}")], "")
        frame.add(displays.table(rows, ["metric", "value"]))
        return frame.done()


def stage_result(catalog: Catalog, name: str) -> StageResult:
    """The artifact that a tag, a stage (its newest), ``stage/fingerprint`` or ``pipeline:stage`` names.

    Raises LookupError with a message for the user if there is none.
    """
    return StageResult(catalog, find_artifact(catalog, name))


@dataclass(frozen=True)
class RunResult:
    """A run and its record. ``id`` is empty if everything was up to date, so that nothing ran."""

    catalog: Catalog
    record: dict[str, Any]
    fingerprints: dict[str, str]

    @property
    def id(self) -> str:
        return str(self.record.get("run_id") or "")

    @property
    def state(self) -> str:
        return str(self.record["state"])

    @cached_property
    def stages(self) -> "pl.DataFrame":
        """One row for each stage: its status, why it ran, how long it took in seconds, and its fingerprint."""
        import polars as pl

        rows = [
            {
                "stage": name,
                "status": stage["status"],
                "reasons": "; ".join(stage.get("reasons") or ()),
                "duration_s": stage.get("duration_s"),
                "fingerprint": stage.get("fingerprint") or self.fingerprints.get(name),
            }
            for name, stage in self.record["stages"].items()
        ]
        return pl.DataFrame(rows, schema_overrides={"duration_s": pl.Float64, "fingerprint": pl.String})

    def stage(self, name: str) -> StageResult:
        """What this run made or re-used of a stage. Raises LookupError if it made nothing of that name."""
        known = dict(self.stages.select("stage", "fingerprint").iter_rows())
        fingerprint = known.get(name)
        manifest = self.catalog.manifest(name, fingerprint) if fingerprint else None
        if manifest is None:
            raise LookupError(f"run {self.id or '(nothing ran)'} has no result of {name!r}; stages: {', '.join(known)}")
        return StageResult(self.catalog, manifest)

    def _repr_html_(self) -> str:
        frame = displays.Frame()
        frame.block(
            [("font-weight:600", f"run {self.id}: {self.state}" if self.id else "everything is up to date")], ""
        )
        frame.add(displays.table(self.stages.to_dicts(), self.stages.columns))
        return frame.done()
