"""The rules that read text. Each is divided into shards, and gives the same rows however it is."""

import pickle
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

from agentrl.datastore.curation import diversity, duplicates, semantic
from agentrl.datastore.curation import rules as r
from agentrl.datastore.curation.calls import Verdict
from agentrl.datastore.curation.contamination import HeldOut
from agentrl.datastore.curation.kernels import CallCheck, CalledTools, Digest, FirstQuestion, Leaks
from agentrl.datastore.curation.text import first_question, part_text, tool_vectors
from agentrl.datastore.errors import StoreError
from agentrl.datastore.read.ranking import RANK
from agentrl.datastore.shards.shard import finished

if TYPE_CHECKING:
    from agentrl.datastore.curation.curate import Work


def exact_duplicates(rows: pl.DataFrame, rule: r.Exact, work: "Work") -> pl.DataFrame:
    if not rows.height:
        return rows
    ranked = rows.sort(*RANK)
    digests = work.division.evidence(Digest(tuple(rule.compare)), work.division.pieces(ranked)).column("digest")
    compared = pl.Series("__compared", pl.from_arrow(digests.cast(pa.binary())))
    keys = ["__compared"] + (["task_id"] if rule.scope == "task" else [])
    return ranked.with_columns(compared).unique(keys, keep="first", maintain_order=True).drop("__compared")


def _ranked(rows: pl.DataFrame, scope: r.Scope) -> tuple[pl.DataFrame, list[str]]:
    """Rows from best to worst, and what each is compared within."""
    ranked = rows.sort(*RANK)
    return ranked, ranked["task_id"].to_list() if scope == "task" else [""] * rows.height


def near_duplicates(rows: pl.DataFrame, rule: r.Near, work: "Work") -> pl.DataFrame:
    ranked, scopes = _ranked(rows, rule.scope)
    doubled = duplicates.near_duplicates(ranked, scopes, rule.compare, rule.threshold, work.division)
    return ranked.filter(~pl.Series(doubled, dtype=pl.Boolean))


def semantic_duplicates(rows: pl.DataFrame, rule: r.Semantic, work: "Work") -> pl.DataFrame:
    if not rows.height:
        return rows
    ranked, scopes = _ranked(rows, rule.scope)
    texts = work.parts(ranked, rule.compare)
    doubled = semantic.semantic_duplicates(texts, scopes, rule.threshold, work.embed, work.seed)
    return ranked.filter(~pl.Series(doubled, dtype=pl.Boolean))


def valid_calls(rows: pl.DataFrame, rule: r.ValidCalls, work: "Work") -> pl.DataFrame:
    if not rows.height:
        return rows
    evidence = work.division.evidence(CallCheck(), work.division.pieces(rows))
    verdicts = evidence.column("verdict").to_numpy()
    kept = {Verdict.VALID} | ({Verdict.UNDECLARED, Verdict.UNUSABLE} if rule.undeclared == "keep" else set())
    unusable = np.flatnonzero(verdicts == Verdict.UNUSABLE)
    if len(unusable):
        first = int(unusable[0])
        problem = evidence.column("problem")[first].as_py()
        warnings.warn(
            f"valid_calls: {len(unusable)} rows call tools whose schema cannot be used, and are "
            f"{'kept' if rule.undeclared == 'keep' else 'dropped'}; the first is {rows['trajectory_id'][first]}: "
            f"{problem}",
            stacklevel=2,
        )
    return rows.filter(pl.Series(np.isin(verdicts, sorted(kept)), dtype=pl.Boolean))


def diverse(rows: pl.DataFrame, rule: r.Diverse, work: "Work") -> pl.DataFrame:
    if rows.height <= rule.n:
        return rows
    ranked = rows.sort(*RANK)
    values, numbers = _compared(ranked, rule, work)
    vectors = work.vectors(values) if rule.over == "prompt" else tool_vectors(values)
    if rule.method == "clusters":
        return ranked[diversity.cluster_balanced(vectors[numbers], rule.n, rule.clusters, work.seed)]
    if rule.method == "core_sets":
        keys = np.array([xxh3_64_intdigest(str(value).encode()) for value in values], np.uint64)
        taken = diversity.core_sets(vectors, keys, rule.n, work.division)
    else:
        diversity.warn_of_one_process(len(vectors), rule.n, work.division)
        taken = diversity.k_center(vectors, rule.n)
    best = np.unique(numbers, return_index=True)[1][taken]  # of rows that are compared by equal values
    others = np.delete(np.arange(rows.height), best)  # are at no distance from those taken
    return ranked[np.concatenate([best, others[: rule.n - len(best)]])]


def _compared(ranked: pl.DataFrame, rule: r.Diverse, work: "Work") -> tuple[list[Any], np.ndarray]:
    """The distinct prompts, or sequences of tools, by which rows are compared, in the order in which they first come,
    and the number of each row's."""
    if rule.over == "prompt":
        values = ranked["prompt"].to_list()
    else:
        evidence = work.division.evidence(CalledTools(), work.division.pieces(ranked))
        values = list(map(tuple, evidence.column("tools").to_pylist()))
    known: dict[Any, int] = {}
    numbers = np.array([known.setdefault(value, len(known)) for value in values])
    return list(known), numbers


def decontaminate(rows: pl.DataFrame, rule: r.Decontaminate, work: "Work") -> pl.DataFrame:
    held_out = pl.col("split").is_in(rule.splits)
    ids = work.column(lambda rows: rows.filter(held_out).select("trajectory_id")).sort()
    heldout, questions = HeldOut(rule.ngram), dict.fromkeys(work.heldout)
    for row in work.conversations(ids.to_frame()):
        question = first_question(row["prompt"], row["messages"])
        questions[question] = None
        if "actions" in rule.against:
            heldout.add_actions(question, part_text("actions", "", row["messages"]))
    if "question" in rule.against:
        for question in sorted(questions):
            heldout.add_question(question)
    if not len(heldout):
        splits = ", ".join(rule.splits)
        raise StoreError(
            f"decontaminate has nothing to compare with: no held-out tasks given, no rows of split {splits}"
        )
    rows = rows.filter(~held_out)
    if not rows.height:
        return rows
    path = work.division.work / f"{heldout.digest}.heldout"
    with finished(path) as unfinished:
        unfinished.write_bytes(pickle.dumps(heldout))
    pieces = work.division.pieces(rows)
    leaks = work.division.evidence(Leaks(path, rule.overlap), pieces).column("leaks")
    dirty = pc.fill_null(leaks, False).to_numpy()
    if rule.cosine is not None:
        asked = work.division.evidence(FirstQuestion(), pieces).column("question").combine_chunks().dictionary_encode()
        vectors = work.vectors(asked.dictionary.to_pylist())
        cosine = vectors @ work.vectors(sorted(filter(None, questions))).T
        dirty = dirty | (cosine.max(1) >= rule.cosine)[asked.indices.to_numpy()]
    return rows.filter(~pl.Series(dirty, dtype=pl.Boolean))
