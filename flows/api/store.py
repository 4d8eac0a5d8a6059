"""A store: rows, artifacts and runs, as frames."""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.api.answers import frame, indexed, shown_work
from agentrl.flows.api.run import RunResult, StageResult, stage_result

if TYPE_CHECKING:
    from datetime import datetime

    import polars as pl

    from agentrl.datastore.formats.annotations import Annotations, Said
    from agentrl.datastore.formats.imported import Imported
    from agentrl.datastore.read.torch_stream import TokenStream
    from agentrl.datastore.search.experience import Demonstration
    from agentrl.flows.api.cuts import Cut
    from agentrl.flows.api.servers import ModelServer, View
    from agentrl.pipelines.replay.step import Replayed
    from agentrl.pipelines.results.compare import Comparison
    from agentrl.pipelines.results.lineage import Lineage
    from agentrl.schemas.trajectory import Trajectory


class Store:
    """A folder, or ``s3://bucket/prefix``. It need not exist: a run or an import makes it."""

    def __init__(self, path: str | os.PathLike[str] = "store") -> None:
        self.path = os.fspath(path)

    def __repr__(self) -> str:
        return f"Store({self.path!r})"

    @cached_property
    def buffer(self) -> TrajectoryBuffer:
        """The table of trajectories."""
        return TrajectoryBuffer(self.path)

    @cached_property
    def catalog(self) -> Catalog:
        """The artifacts and the records of runs."""
        return Catalog(self.path)

    # rows

    @property
    def rows(self) -> "pl.LazyFrame":
        """All rows of the newest version, lazily: ``store.rows.filter(pl.col("success")).collect()``."""
        return self.buffer.scan()

    def sql(self, query: str, *, at: "int | datetime | None" = None) -> "pl.DataFrame":
        """Answer a query over ``trajectories``, ``steps``, ``tool_calls`` and ``annotations``, in Polars' SQL dialect;
        ``at`` names a version of the table of trajectories by its number or time. Raises StoreError if the query is
        wrong."""
        return self.buffer.sql(query, at)

    def row(self, trajectory_id: str) -> "Trajectory":
        """One row whole. Raises UnknownTrajectoryError if there is none."""
        return self.buffer.get(trajectory_id)

    def search(self, text: str, k: int = 5, *, progress: bool = True, **options: Any) -> "pl.DataFrame":
        """The ``k`` rows whose prompts are most like a text, best first; options are those of ``agentrl buffer
        search``: ``method``, ``where``, ``diverse``, ``per_task``, ``embedder``. ``method="text"`` finds words in
        messages, calls and answers of tools instead, as in ``'refund "gift card" -paypal'``. What is new is indexed
        first, and ``progress`` shows how far that is."""
        with shown_work("search index", progress) as told:
            return self.buffer.search(text, k, progress=told, **options)

    def index(
        self, embedder: str | None = None, *, rebuild: bool = False, progress: bool = True, shard_engine: Any = None
    ) -> "pl.DataFrame":
        """Bring the search index up to date, which a search does too: its embedder, the version of the table, how many
        prompts it holds, and how many of them are longer than the embedder looks at. ``shard_engine``: as for imports.
        """
        return indexed(self.buffer, embedder, rebuild, progress, shard_engine)

    def experience(self, prompt: str, **options: Any) -> "list[Demonstration]":
        """Successful runs of tasks like this one, as demonstrations; options are those of ``agentrl buffer
        experience``: ``k``, ``max_tokens``, ``embedder``."""
        return self.buffer.experience(prompt, **options)

    def stats(self) -> dict[str, Any]:
        """Counts of rows, tokens and files."""
        return self.buffer.stats()

    def history(self, limit: int | None = None) -> "pl.DataFrame":
        """The versions of the table, newest first."""
        return frame(self.buffer.history(limit))

    # in and out

    def import_(
        self,
        paths: str | os.PathLike[str] | Sequence[str],
        format: str | None = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> "Imported":
        """Append files of other formats. The options are those of ``agentrl buffer import``: ``join``, ``on``, ``env``,
        ``split``, ``reward``, ``success``, ``tokenizer``, ``quarantine``, ``dry_run``, ``shard_engine``. ``format``
        None finds each file's own. Files that are in the buffer already are left out. ``progress`` shows how far it is.

        Raises StoreError for files that cannot be read.
        """
        from agentrl.pipelines.stages.imports import import_files

        given = [os.fspath(paths)] if isinstance(paths, str | os.PathLike) else list(map(os.fspath, paths))
        with shown_work("import", progress) as told:
            return import_files(self.buffer, given, format, progress=told, **options)

    def export(self, path: str | os.PathLike[str], format: str, **options: Any) -> dict[str, Any]:
        """Write rows in another format; returns what was written, and what the format cannot carry. The options:
        ``where``; ``split`` (None: as the command does, the train split for formats of training sets and all rows for
        others; "all": all); ``secrets`` ("redact" writes placeholders for secrets, "refuse" fails if a row holds any);
        ``annotations`` (true writes what people and judges said of the rows too).
        """
        from agentrl.flows.api.answers import exported

        return exported(self.buffer, Path(path), format, **options).as_dict()

    # what people and judges say

    def annotate(self, annotations: "Said | None" = None, /, **fields: Any) -> "Annotations":
        """Say something of rows: one thing, ``annotate(trajectory_id=..., name="thumbs", value="up", author="ann")``,
        several as a frame or as dicts, or those of a file (JSON Lines, CSV, Parquet). ``fields`` are those of
        :class:`agentrl.schemas.annotation.Annotation`; beside a frame or a file they are for those that lack them. No
        row is rewritten. Raises StoreError if one does not fit, and then nothing is written; lines of a file that do
        not fit are set aside instead, as ``refused`` of what is returned says."""
        from agentrl.datastore.formats.annotations import annotate_by_python

        return annotate_by_python(self.buffer, annotations, fields)

    @property
    def annotations(self) -> "pl.DataFrame":
        """The annotations that count: the newest of each author, name and target. ``annotation_log()`` has all."""
        from agentrl.datastore.annotations.current import current

        return current(self.annotation_log())

    def annotation_log(self, version: int | None = None) -> "pl.DataFrame":
        """All annotations that were ever given, oldest first; ``version`` is how many appends are taken."""
        return self.buffer.annotations.frame(version)

    def stream(self, batch_rows: int, *, where: str | None = None, **options: Any) -> "TokenStream":
        """Training rows of version ``at`` of the table (default: the newest) as a torch ``IterableDataset`` of batches
        that shards and resumes; see :func:`token_stream` for the options: ``columns``, ``seed``, ``epochs``,
        ``position``, ``rank``, ``world``. ``split=None`` takes rows of any."""
        from agentrl.datastore.read.torch_stream import token_stream
        from agentrl.pipelines.stages.select import in_split, matching

        ids = matching(self.buffer, in_split(where, options.pop("split", "train")), options.pop("at", None))
        return token_stream(self.buffer, ids, batch_rows, **options)

    def to_ray_dataset(self, columns: Sequence[str] | None = None, *, where: str | None = None) -> Any:
        """Rows as a ``ray.data.Dataset``, with typed messages, tokens and masks; ``columns`` None: all."""
        from agentrl.datastore.read.dataframes import ray_dataset
        from agentrl.pipelines.stages.select import matching

        return ray_dataset(self.buffer, columns, matching(self.buffer, where) if where else None)

    def to_daft(self, columns: Sequence[str] | None = None) -> Any:
        """Rows as a ``daft.DataFrame``. Join by strings such as ``trajectory_id`` only: in Daft 0.7 a join by a binary
        column is silently a cross product, or does not end."""
        from agentrl.datastore.read.dataframes import daft_frame

        return daft_frame(self.buffer, columns)

    # choosing

    def curate(
        self,
        rules: "str | os.PathLike[str] | dict[str, Any] | Sequence[dict[str, Any]]",
        *,
        where: str | None = None,
        split: str | None = "train",
        name: str = "curated",
        progress: bool = True,
    ) -> StageResult:
        """Narrow rows by rules to a selection, which is published as ``name``; its outputs are ``trajectories``,
        ``funnel`` and ``dropped``. ``rules``: a YAML file, or what it holds. ``split`` None takes rows of any;
        ``progress`` shows how far it is.

        Raises StoreError if a rule is wrong.
        """
        from agentrl.datastore.curation.rules import Rules
        from agentrl.flows.commands._selections import read_rules

        chosen = read_rules(rules, Rules)
        config = {"where": where, "split": split, **chosen.model_dump(mode="json", exclude={"seed"})}
        return self._published(name, config, chosen.seed, progress)

    def select(self, name: str, *, where: str | None = None, split: str | None = "train") -> StageResult:
        """Save rows as a selection with a name, which pipelines and other commands take."""
        return self._published(name, {"where": where, "split": split})

    def sample(
        self, n: int, strategy: str = "uniform", *, seed: int = 0, split: str | None = "train", name: str = "sampled"
    ) -> StageResult:
        """Draw ``n`` training rows into a selection; see ``docs/reference/buffer.md`` for the strategies."""
        return self._published(name, {"split": split, "draw": {"n": n, "strategy": strategy}}, seed)

    def cut(self, name: str, rules: Any = None, **options: Any) -> "Cut":
        """Cut rows as a data set to give to others, or open the cut of this name; see :func:`agentrl.cut`."""
        from agentrl.flows.api.cuts import cut

        return cut(name, rules, store=self, **options)

    def cuts(self) -> "pl.DataFrame":
        """The cuts of this store, newest first under each name: ``cut``, ``rows``, ``sha256``, ``made``, ``by``."""
        from agentrl.flows.api.cuts import cuts

        return cuts(self.path)

    def import_cut(self, path: str | os.PathLike[str], name: str | None = None, *, progress: bool = True) -> "Cut":
        """Take a cut that another store exported (as ``parquet``), after every file and row was compared with it."""
        from agentrl.flows.api.cuts import import_cut

        return import_cut(self.path, path, name, progress)

    def _published(self, name: str, config: dict[str, Any], seed: int = 0, progress: bool = False) -> StageResult:
        from agentrl.flows.commands._selections import publish
        from agentrl.flows.options import Rows

        def of(version: int) -> StageResult:
            outcome = publish(Rows(self.path), name, {"version": version, **config}, seed, Path(), told)
            return StageResult(self.catalog, outcome.manifest)

        with shown_work(name, progress) as told:
            return self.buffer.newest(of)

    # what runs left

    def runs(self, limit: int = 20) -> "pl.DataFrame":
        """The newest runs: id, pipeline, state, times, and how many stages ran."""
        from agentrl.pipelines.run.runs import all_runs, summary

        return frame([summary(run) for run in all_runs(self.catalog)[:limit]])

    def run(self, run_id: str = "last") -> RunResult:
        """A run by its id or the beginning of it. Raises LookupError if there is none."""
        from agentrl.pipelines.run.runs import find_run

        return RunResult(self.catalog, find_run(self.catalog, run_id), {})

    def stage(self, name: str) -> StageResult:
        """An artifact: of a stage (its newest), ``stage/fingerprint``, ``pipeline:stage`` or a tag. Raises LookupError
        if there is none."""
        return stage_result(self.catalog, name)

    def compare(self, *names: str, greedy: bool = False) -> "Comparison":
        """Evaluations, rollouts or models that were evaluated, side by side: success with intervals, and paired
        differences to the first. Raises LookupError if one is unknown."""
        from agentrl.pipelines.results.compare import compare

        return compare(self.catalog, names, greedy=greedy)

    def diff(self, run_a: str, run_b: str) -> dict[str, dict[str, Any]]:
        """What differs between two runs, by stage: config, code, inputs, metrics, row counts. Raises LookupError if one
        is unknown."""
        from agentrl.pipelines.run.runs import diff_runs, find_run

        return diff_runs(self.catalog, find_run(self.catalog, run_a), find_run(self.catalog, run_b))

    def lineage(self, name: str) -> "Lineage":
        """What an artifact was made from. Raises LookupError if it is unknown."""
        from agentrl.pipelines.results.lineage import find_artifact, lineage

        manifest = find_artifact(self.catalog, name)
        return lineage(self.catalog, manifest.ingredients.stage, manifest.fingerprint)

    def tag(self, artifact: str, name: str) -> StageResult:
        """Give an artifact a name; gc never frees an artifact that has one. Raises LookupError if there is no such
        artifact, ValueError if the name cannot be one."""
        from agentrl.pipelines.results.lineage import tag

        return StageResult(self.catalog, tag(self.catalog, artifact, name))

    def gc(self, *, keep_runs: int, dry_run: bool = True) -> dict[str, Any]:
        """Remove artifacts that no tag, and none of the newest runs, needs; a dry run lists them."""
        from agentrl.pipelines.results import gc

        return (gc.find_garbage if dry_run else gc.collect)(self.catalog, keep_runs).to_json()

    def doctor(self, run_id: str = "last", *, recompute: bool = False, rewards: bool = False) -> "pl.DataFrame":
        """What is wrong with a run's rollouts and training: stage, name, evidence, threshold, remedy, rows. ``rewards``
        looks through its stored rows for success that was not earned, instead."""
        from agentrl.pipelines.diagnose import diagnose
        from agentrl.pipelines.parts.audited import audit_run

        record = self.run(run_id).record
        findings = audit_run(self.path, record) if rewards else diagnose(self.path, record, recompute)
        rows = [{"stage": name, **vars(finding)} for name, each in findings.items() for finding in each]
        return frame(rows, ["stage", "name", "evidence", "threshold", "remedy"])

    def replay(self, stage: str, step: int, *, set: dict[str, Any] | None = None) -> "Replayed":
        """Compute one training step again from Parquet; ``set`` changes settings of that step only."""
        from agentrl.pipelines.replay.step import replay

        settings = [f"{key}={value}" for key, value in (set or {}).items()]
        return replay(self.catalog, self.stage(stage).manifest, step, settings)

    # upkeep

    def changes(self, old: "int | datetime", new: "int | datetime | None" = None) -> "pl.DataFrame":
        """Rows that were added and removed between two versions of the table, by stage; ``new`` None is the newest."""
        return self.buffer.diff(old, new)

    def quarantined(self) -> "pl.DataFrame":
        """Rows that appends set aside, with what is wrong with them."""
        return self.buffer.quarantined()

    def forget(self, fingerprint: str, *, dry_run: bool = False) -> int:
        """Remove the rows of an import, or of one file of it, by the beginning of its fingerprint; their number."""
        from agentrl.datastore.upkeep import forget

        return forget(self.buffer, fingerprint, dry_run=dry_run).rows

    def check(self) -> "pl.DataFrame":
        """What is wrong with the table: kind, what, and the next step; no rows if nothing is."""
        from agentrl.datastore.upkeep import check

        return frame([vars(fault) for fault in check(self.buffer)], ["kind", "what", "advice"])

    def compact(self) -> dict[str, int]:
        """Merge small files; no row changes."""
        from agentrl.datastore.upkeep import compact

        return compact(self.buffer)

    def vacuum(self, *, retention_hours: float = 168, dry_run: bool = True) -> list[str]:
        """Remove files that no version within the retention needs; a dry run lists them."""
        from agentrl.datastore.upkeep import vacuum

        return vacuum(self.buffer, retention_hours=retention_hours, dry_run=dry_run)

    # models

    def generate(
        self, model: str, *, task: str | None = None, prompt: str | None = None, seed: int = 0, **sampling: Any
    ) -> "Trajectory":
        """One episode of a model (a folder, a GGUF, or an artifact) with its tokens: at a task by its id, or an answer
        to a prompt. ``sampling``: ``temperature``, ``max_turn_tokens``. Nothing is written.

        Raises LookupError if there is no such model or task, and ValueError if it cannot be tried.
        """
        from agentrl.pipelines.generate import find_task, generate, policy_of, question
        from agentrl.pipelines.parts.budget import SamplingConfig

        if (task is None) == (prompt is None):
            raise ValueError("task and prompt: give one of them")
        policy, manifest = policy_of(self.catalog, model)
        asked = question(prompt) if prompt is not None else find_task(self.catalog, str(task), manifest)
        return generate(policy, asked, SamplingConfig(**sampling), seed)

    def serve(self, model: str, *, port: int = 0, api_key: str | None = None, **options: Any) -> "ModelServer":
        """Serve a model to agents, and record what they do in this store: in a process of its own, until ``.close()``.
        The options are those of ``agentrl serve``: ``shard_engine``, ``served_name``, ``fixed_temperature``,
        ``max_turn_tokens``, ``context``, ``history``, ``idle_s``, ``accept_any_model``, ``unconstrained``,
        ``seed``. Port 0 takes a free one.

        Raises RuntimeError with what the command said if it does not start.
        """
        from agentrl.flows.api.servers import ModelServer

        return ModelServer.of(self.path, model, port, api_key, options)

    def dialect(self, model: str, form: str | None = None) -> "pl.DataFrame":
        """Prove the dialect of a model: what was tried, what its chat template wrote, what came back, the verdict.
        Raises LookupError if there is no such model, and ValueError if the dialect is refused."""
        from agentrl.pipelines.file.external import as_folder
        from agentrl.pipelines.generate import model_path
        from agentrl.pipelines.plan.proved import proved

        folder = as_folder(model_path(self.catalog, model), weights=False)
        return frame(proved(str(folder), form).table())

    def view(self, *, height: int = 800, write: bool = False, port: int = 0) -> "View":
        """Start the viewer on this store. In a notebook it is shown inline, ``height`` pixels high; ``.url`` is its
        address, ``.close()`` ends it."""
        from agentrl.flows.api.servers import View

        return View.of(self.path, height, write, port)

    def _repr_html_(self) -> str:
        from agentrl.pipelines import displays

        rows = [{"of": name, "count": value} for name, value in self.stats().items() if isinstance(value, int | float)]
        shown = displays.Frame()
        shown.block([("font-weight:600", repr(self))], "")
        shown.add(displays.table(rows, ["of", "count"]))
        return shown.done()
