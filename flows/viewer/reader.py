"""What the viewer reads of one store, one method for each question. Nothing here writes."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from agentrl.datastore.annotations.labels import LabelSchema
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.tokenizers import TokenBytes
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import StoreError, UnknownTrajectoryError
from agentrl.datastore.read.prefixes import sampled
from agentrl.datastore.table.writer import SCALARS
from agentrl.flows.viewer.pages import compare, curation, pairs, runs, tokens, training, trajectory, tree
from agentrl.flows.viewer.pages.better import newest_two
from agentrl.flows.viewer.pages.decoding import Decoded, decoded
from agentrl.flows.viewer.pages.doctor import Doctor
from agentrl.flows.viewer.pages.graph import Plans
from agentrl.flows.viewer.pages.overview import known_settings, overview, what_if
from agentrl.flows.viewer.pages.run import run_answer
from agentrl.flows.viewer.query import among, facets
from agentrl.flows.viewer.query.artifacts import Artifacts, numbers
from agentrl.flows.viewer.query.excerpts import with_excerpts
from agentrl.flows.viewer.query.tables import TEXT, Recent, Snapshot, Tables, both, column_of, stream
from agentrl.flows.viewer.refused import RefusedError
from agentrl.flows.viewer.wire import Filled
from agentrl.flows.viewer.wire.buffer import Answers, Facets, Hit, Hits
from agentrl.flows.viewer.wire.compare import (
    Aligned,
    Better,
    Evaluations,
    Funnels,
    PairAnswer,
    PairedDifference,
    PairLines,
    TaskAttempts,
    TaskTree,
)
from agentrl.flows.viewer.wire.overview import Overview, PlanAnswer
from agentrl.flows.viewer.wire.queries import Filtered, Page
from agentrl.flows.viewer.wire.runs import KnownSettings, RunsCompared
from agentrl.flows.viewer.wire.training import LiveAnswer, RunAnswer, TrainingStage, TrainingStages
from agentrl.flows.viewer.wire.trajectory import RowAnswer, ShownMessage
from agentrl.pipelines.run.runs import all_runs
from agentrl.pipelines.tokenizers import token_bytes
from agentrl.schemas.manifest import Kind

if TYPE_CHECKING:
    from agentrl.datastore.search.index import SearchIndex, State

LOST = 5
"""Lost tasks that are named beside the sentence that says whether the policy got better."""
PLAN_S = 5.0
"""Seconds that a question for a plan waits for it."""


class StoreReader:
    """A store, as the viewer sees it."""

    def __init__(self, store: str, labels: LabelSchema = LabelSchema()) -> None:  # noqa: B008  (it is frozen)
        self.store, self.labels = store, labels
        self.catalog = Catalog(store)
        self.tables = Tables(TrajectoryBuffer(store))
        self.artifacts = Artifacts(self.catalog)
        self._compared: Recent[tuple[str, str, bool], PairedDifference] = Recent(16)
        self._rows: Recent[tuple[str, int], pa.Table] = Recent(2)
        self._tokenizers: Recent[tuple[str, str], TokenBytes] = Recent(8)
        self.plans = Plans(self.catalog, store)
        self._trained: Recent[str, TrainingStage] = Recent(256)
        self._pulses = training.Pulses(self.catalog, self.tables)
        self.doctor = Doctor(self.catalog, store)

    def overview(self, pipeline: str | None) -> Overview:
        return overview(self.store, self.catalog, self.tables, self.artifacts, self.plans, pipeline)

    def tabs(self) -> Filled:
        """Pages that have something to show. What shows runs is there from the first one on, whatever came of it."""
        made_now = self.artifacts.all()
        kinds = {output.kind for made in made_now for output in made.outputs.values()}
        ran, rows = bool(all_runs(self.catalog)), self.tables.buffer.version is not None
        filled = {
            "/": True,
            "/buffer": rows,
            "/calls": rows,
            "/evaluation": any(made.ingredients.uses.startswith("evaluate.") for made in made_now),
            "/pair": Kind.PAIRS in kinds,
            "/training": ran,
            "/doctor": ran,
            "/curation": Kind.TRAJECTORIES in kinds,
            "/labels": rows,
            "/runs": ran,
        }
        return Filled(paths=[path for path, is_filled in filled.items() if is_filled])

    def plan(self, pipeline: str, settings: list[str]) -> PlanAnswer:
        return what_if(self.catalog, self.plans, pipeline, settings, patience=PLAN_S)

    def settings(self, pipeline: str) -> KnownSettings:
        return known_settings(self.catalog, pipeline)

    def runs(self, a: str | None, b: str | None, at: str | None) -> RunsCompared:
        return runs.runs_compared(self.catalog, self._snapshot_if_any(at), a, b)

    def rows(self, page: Page) -> tuple[bytes, dict[str, str]]:
        """A page as an Arrow stream, and the headers that go with it. Without ``columns`` it has all."""
        snapshot = self.tables.at(page.at)
        part = self.part(page, snapshot)
        asked = [name for name in page.columns.split(",") if name] or SCALARS
        names = dict.fromkeys(["trajectory_id", *(column_of(name, "columns") for name in asked)])
        sorting = (page.filter, column_of(page.sort, "sort"), page.desc, page.offset, page.limit)
        table, total = snapshot.page(*sorting, list(names), part.mask if part else None)
        words = snapshot.words(page.filter)
        if words and table.num_rows:
            ids = table["trajectory_id"].to_pylist()
            messages = self.read(ids, ("trajectory_id", "messages"), snapshot)["messages"].to_pylist()
            table = with_excerpts(table, messages, words)
        counts = {"x-total": total, "x-version": snapshot.version, "x-absent": part.absent if part else 0}
        return stream(table), {name: str(count) for name, count in counts.items()} | {
            "x-columns": ",".join(SCALARS),
            "x-words": json.dumps(words),
        }

    def facets(self, question: Filtered) -> Facets:
        snapshot = self.tables.at(question.at)
        part = self.part(question, snapshot)
        return facets.facets(snapshot, question.filter, part.mask if part else None)

    def answers(self, ids: list[str], at: str | None) -> Answers:
        """What the policy said last in these rows. Raises RefusedError if one is not there."""
        snapshot = self.tables.at(at)
        try:
            messages = self.read(ids, ("messages",), snapshot)["messages"].to_pylist()
        except UnknownTrajectoryError as error:
            raise RefusedError(str(error), field="id", status=404) from None
        last_words = zip(ids, map(trajectory.last_words, messages), strict=True)
        return Answers(version=snapshot.version, answers={name: text[:TEXT] for name, text in last_words})

    def search(self, text: str, k: int) -> Hits:
        """The rows whose prompts are nearest. The index is only read. Raises RefusedError if there is none."""
        from agentrl.datastore.search.embedding import EMBEDDED

        index, state = self._index()
        if index.name == EMBEDDED and self.tables.buffer.storage.read(f"{index.folder}/model.npz") is None:
            raise self._no_index()
        ranked = index.search(text, k, refresh=False)
        hits = [Hit(trajectory_id=hit["trajectory_id"], score=hit["score"]) for hit in ranked.to_dicts()]
        return Hits(version=state.table_version, behind=state.stale, hits=hits)

    def row(self, trajectory_id: str, at: str | None) -> RowAnswer:
        row, snapshot = self.row_of(trajectory_id, at)
        return trajectory.answer(row, snapshot, self.artifacts, self.sampled(row))

    def sampled(self, row: pa.Table) -> np.ndarray:
        """Which tokens of a row it or its parents sampled; it alone, if the store does not have a parent."""
        try:
            mask = sampled(self.tables.buffer, row)
        except UnknownTrajectoryError:
            mask = row["action_mask"].combine_chunks()
        return numbers(mask[0], bool)

    def message(
        self, trajectory_id: str, number: int, at: str | None, start: int = 0, most: int | None = None
    ) -> ShownMessage:
        """A message whose content begins at a character and has at most so many."""
        row, _ = self.row_of(trajectory_id, at)
        shown = trajectory.one_message(row, number)
        end = shown.characters if most is None else start + most
        return shown.model_copy(update={"content": shown.content[start:end], "cut": end < shown.characters})

    def tokens(self, trajectory_id: str, at: str | None) -> bytes:
        """The tokens of a row as an Arrow stream."""
        row, snapshot = self.row_of(trajectory_id, at)
        return stream(self.tokens_of(row, snapshot.version)[0])

    def tokens_of(self, row: pa.Table, version: int) -> tuple[pa.Table, bytes | None]:
        """The tokens of one row with their columns, and their text if their tokenizer is known."""
        text, reason = self._decoded(row)
        scalars = {name: row[name][0] for name in trajectory.TOKENS}
        learned = self.artifacts.trained_on(row["trajectory_id"][0].as_py(), numbers(scalars["input_ids"], np.int32))
        matching = next((trained for trained in learned if trained.rows), learned[0] if learned else None)
        table = tokens.token_table(scalars, text, matching, version, reason)
        return table, None if text is None else text.text

    def text(self, trajectory_id: str, at: str | None) -> bytes:
        """The text of a row's tokens; empty if their tokenizer is not known, which the answer with the tokens says."""
        row, _ = self.row_of(trajectory_id, at)
        decoded, _ = self._decoded(row)
        return decoded.text if decoded else b""

    # compared

    def evaluations(self) -> Evaluations:
        return compare.evaluations(self.artifacts)

    def compared(self, than: str, arm: str, greedy: bool) -> PairedDifference:
        return self._compared.get_or((than, arm, greedy), lambda: compare.compared(self.catalog, than, arm, greedy))

    def better(self) -> Better:
        """The newest policy against the one before it."""
        two = newest_two(self.catalog, self.artifacts)
        try:
            difference = self.compared(*two, greedy=False) if two else None
        except RefusedError:  # one was freed meanwhile, or has no attempts at temperature 1
            difference = None
        if difference is None:
            return Better(difference=None)
        few = {"gained": [], "lost": difference.lost[:LOST]}
        return Better(difference=difference.model_copy(update=few))

    def task(self, env: str, task_id: str, at: str | None) -> TaskAttempts:
        return compare.task(self.tables.at(at), env, task_id)

    def task_tree(self, env: str, task_id: str, at: str | None) -> TaskTree:
        """The attempts at a task as a tree. Raises RefusedError if there is none."""
        snapshot = self.tables.at(at)
        names, rows = compare.newest_attempts(snapshot, env, task_id)
        table = self.read(names, ("tokenizer", "policy", "input_ids", "success", "reward"), snapshot)
        kinds = Counter(kind for kind in table["tokenizer"].to_pylist() if kind)
        tokenizer = kinds.most_common(1)[0][0] if kinds else ""
        chosen = [
            number
            for number, kind in enumerate(table["tokenizer"].to_pylist())
            if kind == tokenizer and tokenizer and len(table["input_ids"][number])
        ]
        sequences = [numbers(table["input_ids"][number], np.int32) for number in chosen]
        branches = tree.prefix_tree(sequences)
        texts = []
        for branch in branches:
            part = sequences[branch.members[0]][branch.start : min(branch.end, branch.start + tree.TOKENS)]
            texts.append(self._beginning(part, tokenizer, table["policy"][chosen[branch.members[0]]].as_py()))
        success, reward = (
            table[column].take(np.array(chosen, np.int64)).to_pylist() for column in ("success", "reward")
        )
        drawn = tree.drawn(branches, [names[number] for number in chosen], success, reward, texts)
        return TaskTree(version=snapshot.version, rows=len(chosen), left_out=rows - len(chosen), branches=drawn)

    def aligned(self, a: str, b: str, at: str | None) -> Aligned:
        (first, snapshot), (second, _) = (self.row_of(row_id, at) for row_id in (a, b))
        return compare.aligned((a, b), (first, second), snapshot.version)

    def pairs(self, artifact: str | None, offset: int, limit: int) -> PairLines:
        return pairs.pair_lines(self.artifacts, artifact, offset, limit)

    def pair(self, artifact: str, pair_id: str) -> PairAnswer:
        return pairs.pair_answer(self.artifacts, artifact, pair_id)

    def pair_tokens(self, artifact: str, pair_id: str, side: str) -> bytes:
        """The tokens of a side of a pair as an Arrow stream."""
        _, pair = pairs.pair_scalars(self.artifacts, artifact, pair_id)
        text, reason = self._text_of(numbers(pair[f"{side}_ids"], np.int32), pair["tokenizer"].as_py(), "")
        return stream(tokens.side_table(pair[f"{side}_ids"], pair[f"{side}_mask"], text, reason))

    def pair_text(self, artifact: str, pair_id: str, side: str) -> bytes:
        _, pair = pairs.pair_scalars(self.artifacts, artifact, pair_id)
        decoded, _ = self._text_of(numbers(pair[f"{side}_ids"], np.int32), pair["tokenizer"].as_py(), "")
        return decoded.text if decoded else b""

    def curation(self, at: str | None) -> Funnels:
        return curation.funnels(self.artifacts, self._snapshot_if_any(at))

    # training, and what goes on now

    def training(self) -> TrainingStages:
        return training.stages(self.catalog, self.artifacts, self._trained)

    def metrics(self, artifact: str) -> bytes:
        return stream(training.metrics(self.artifacts, artifact))

    def rows_of_step(self, artifact: str, step: int, at: str | None) -> tuple[bytes, dict[str, str]]:
        snapshot = self.tables.at(at)
        return stream(training.rows_of(self.artifacts, snapshot, artifact, step)), {"x-version": str(snapshot.version)}

    def run(self, text: str) -> RunAnswer:
        return run_answer(self.catalog, self.artifacts, text)

    def lines(self, run_id: str, stage: str, cursor: int) -> LiveAnswer:
        return training.lines(self.catalog, run_id, stage, cursor)

    def events(self, ended: Callable[[], bool] = lambda: False) -> AsyncIterator[bytes]:
        return training.events(self._pulses, ended)

    # what they share

    def _index(self) -> "tuple[SearchIndex, State]":
        """The search index and its state. Raises RefusedError if there is none."""
        from agentrl.datastore.search.index import SearchIndex

        index = SearchIndex.of_store(self.tables.buffer)
        if index is None or (state := index.state()) is None:
            raise self._no_index()
        return index, state

    def _no_index(self) -> RefusedError:
        command = f"agentrl buffer index --store {self.store}"
        return RefusedError("this store has no search index", following=command, status=409)

    def mask(self, question: Filtered, snapshot: Snapshot) -> np.ndarray | None:
        """The rows that a question is about; None if it is about all."""
        part = self.part(question, snapshot)
        return both(snapshot.matching(question.filter), part.mask if part else None)

    def _snapshot_if_any(self, at: str | None) -> Snapshot | None:
        """The rows at a version; None if nothing was ever appended."""
        return None if self.tables.buffer.version is None else self.tables.at(at)

    def part(self, question: Filtered, snapshot: Snapshot) -> among.Subset | None:
        """The part of the buffer that a question is about; None if it is about all of it."""
        if question.among:
            return among.part(self.artifacts, snapshot, question.among, question.rule)
        if question.rule:
            raise RefusedError("a rule needs the artifact that has it", field="among")
        return None

    def _decoded(self, row: pa.Table) -> tuple[Decoded | None, str]:
        """The tokens of a row with their text, or why there is none."""
        ids = numbers(row["input_ids"][0], np.int32)
        if not len(ids):
            return None, "this row has no tokens: it can be read, but not trained on as sampled"
        return self._text_of(ids, row["tokenizer"][0].as_py(), row["policy"][0].as_py())

    def _text_of(self, ids: np.ndarray, tokenizer: str, policy: str) -> tuple[Decoded | None, str]:
        try:
            known = self._tokenizers.get_or((tokenizer, policy), lambda: token_bytes(self.catalog, tokenizer, policy))
        except (LookupError, StoreError) as error:
            return None, str(error.args[0])
        return decoded(known, ids), ""

    def _beginning(self, ids: np.ndarray, tokenizer: str, policy: str) -> str:
        """The text of some tokens, as far as it is shown; empty if their tokenizer is not known."""
        decoded, _ = self._text_of(ids, tokenizer, policy)
        return decoded.text[: tree.TEXT_BYTES].decode(errors="ignore") if decoded else ""

    def read(self, ids: list[str], columns: tuple[str, ...], snapshot: Snapshot) -> pa.Table:
        """Rows at the snapshot's version. The newest is followed, which is faster than opening a version."""
        newest = snapshot.version == self.tables.buffer.version
        return self.tables.buffer.read(ids, columns, None if newest else snapshot.version)

    def row_of(self, trajectory_id: str, at: str | None) -> tuple[pa.Table, Snapshot]:
        """A whole row. A page asks for it three times: the others wait for the first that reads it."""
        snapshot = self.tables.at(at)

        def read() -> pa.Table:
            row = self.read([trajectory_id], trajectory.CONTENT, snapshot)
            return row.take(np.array([0]))  # a copy, which does not hold the rows that were decoded with it

        try:
            return self._rows.get_or((trajectory_id, snapshot.version), read), snapshot
        except UnknownTrajectoryError as error:
            raise RefusedError(str(error), field="id", status=404) from None
