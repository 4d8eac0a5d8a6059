"""Formats of others, read and written. Each module's docstring is its mapping, and says what it cannot carry."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import (
    alpaca,
    anthropic,
    atif,
    chat,
    huggingface,
    inspect_logs,
    mini_swe,
    nemo_gym,
    openhands,
    otel,
    responses,
    sharegpt,
    swe_agent,
    tau2,
    tau_bench,
    trl,
    verifiers,
    verifiers_v1,
    verl,
)
from agentrl.datastore.formats.blocks import RowBlock
from agentrl.datastore.formats.columns import Keep, batches, of_each
from agentrl.datastore.formats.own import OWN_FORMAT, OwnFormat
from agentrl.datastore.formats.parts import Cut, by_record
from agentrl.datastore.formats.regular import Regular
from agentrl.datastore.formats.sessions import (
    claude_code,
    claude_stream,
    codex,
    codex_exec,
    gemini_cli,
    langgraph,
    openai_agents,
    opencode,
)
from agentrl.datastore.formats.source import Row, Source
from agentrl.datastore.formats.valid import Write, valid
from agentrl.schemas.arrow import from_table
from agentrl.schemas.choice import RULE
from agentrl.schemas.hints import did_you_mean
from agentrl.schemas.trajectory import Trajectory

Fits = Callable[[Source], float]
Rows = Callable[[Source], Iterator[Row]]
RECORDS = ("lines", "array", "document", "parquet")
"""Kinds of files that have records."""


@dataclass(frozen=True)
class Format:
    """``fits`` says how well a file fits: 0 is not at all, a higher number is a better fit. ``rows`` reads it;
    ``write`` takes rows, and gives the number of records written, and is None for a format that is only read."""

    fits: Fits
    rows: Rows
    write: Write | None = None
    tokens: bool = False
    """Whether token ids, mask and log-probs come back exactly."""
    suffix: str = ".jsonl"
    """Extension of the file that is written; "" means a folder."""
    loses: frozenset[str] = frozenset()
    """Parts of a row (``losses.PARTS``) that do not come back."""
    leaves_out: Callable[[Trajectory], bool] | None = None
    """Rows that are not written at all."""
    training: bool = False
    """Whether what is written is a training set: held-out rows are then left out unless they are asked for."""
    cut: Cut | None = None
    """How a large file is cut; None: files are read as a whole."""
    reads: Collection[str] = RECORDS
    """Kinds of files that the reader takes."""
    companions: Callable[[Path], list[Path]] | None = None
    """Files that are read with a file, and are none of their own beside it."""
    regular: Regular[Any] | None = None
    """What most of its records look like, which are then read without the reader. They all fit the format."""

    def blocks(self, source: Source, keep: Keep | None = None) -> Iterator[Row | RowBlock]:
        """The rows of a file. Those of regular records are blocks, unless something is kept of each record."""
        if self.regular is None or source.kind != "lines" or source.given is not None or of_each(keep):
            return self.rows(source)
        return self.regular.rows(source, self.rows)

    def tables(self, source: Source) -> Iterator[pa.Table]:
        """The rows of a file, checked, a bounded number at a time. A record that gives none is refused."""
        return (batch.table for batch in batches((source, row) for row in self.blocks(source)))

    def read(self, source: Source) -> Iterator[Trajectory]:
        """The rows of a file as objects."""
        for table in self.tables(source):
            yield from from_table(Trajectory, table)


@dataclass(frozen=True)
class ByRecord:
    """How well the first records of a file fit on average; a record without the shape of the format does not fit."""

    fits: Callable[[Any], int]
    kinds: Collection[str] = RECORDS

    def of(self, record: Any) -> int:
        try:
            return self.fits(record)
        except (AttributeError, LookupError, TypeError, ValueError):
            return 0

    def __call__(self, source: Source) -> float:
        if source.kind not in self.kinds or not source.sample:
            return 0
        return sum(map(self.of, source.sample)) / len(source.sample)


_SPANS = frozenset({"spans of assistant messages", "spans of other messages"})
_TOKENS = frozenset({"token ids", "tokenizer", "action mask", "log-probs", "versions of the weights"}) | _SPANS
_OUTCOME = frozenset({"reward", "success", "end", "reward components", "step rewards", "tool errors"})
_OUTCOME |= {"which calls failed"}
_ORIGIN = frozenset({"identity", "agent and segment", "policy", "tags", "final state"})
_TEXT_ONLY = _TOKENS | _OUTCOME | _ORIGIN | {"tools that are no functions"}
_SPELLING = frozenset({"spelling of arguments"})
_SHAREGPT = frozenset(
    {"reasoning", "text beside calls", "call ids", "ids of answers", "names of answers"}
    | {"boundaries of neighbouring messages", "places of system messages"}
)


def _unscored(row: Trajectory) -> bool:
    return row.success is None


def _pairless(row: Trajectory) -> bool:
    return row.success is None or row.reward is None


FORMATS: dict[str, Format] = {
    "openai-chat": Format(
        ByRecord(chat.fits),
        chat.read,
        valid(chat.write),
        loses=_TEXT_ONLY,
        training=True,
        cut=by_record,
        regular=chat.REGULAR,
    ),
    "openai-responses": Format(ByRecord(responses.fits), responses.read, cut=by_record, regular=responses.REGULAR),
    "anthropic": Format(
        ByRecord(anthropic.fits),
        anthropic.read,
        valid(anthropic.write),
        regular=anthropic.REGULAR,
        loses=_TEXT_ONLY - {"which calls failed"}
        | _SPELLING
        | {"arguments that are no object", "places of system messages"},
        cut=by_record,
    ),
    "trl-sft": Format(
        ByRecord(trl.fits_sft),
        trl.read_sft,
        valid(trl.write_sft),
        regular=trl.REGULAR_SFT,
        loses=_TEXT_ONLY - {"token ids", "action mask"} | _SPELLING,
        training=True,
        cut=by_record,
    ),
    "trl-prompt-completion": Format(
        ByRecord(trl.fits_prompt_completion),
        trl.read_prompt_completion,
        valid(trl.write_prompt_completion),
        regular=trl.REGULAR_PROMPT_COMPLETION,
        loses=_TEXT_ONLY | _SPELLING,
        training=True,
        cut=by_record,
    ),
    "trl-preference": Format(
        ByRecord(trl.fits_preference),
        trl.read_preference,
        valid(trl.write_preference),
        loses=_TEXT_ONLY - {"success"} | _SPELLING,
        leaves_out=_pairless,
        training=True,
        cut=by_record,
    ),
    "trl-kto": Format(
        ByRecord(trl.fits_kto),
        trl.read_kto,
        valid(trl.write_kto),
        regular=trl.REGULAR_KTO,
        loses=_TEXT_ONLY - {"success"} | _SPELLING,
        leaves_out=_unscored,
        training=True,
        cut=by_record,
    ),
    "verl-sft": Format(
        ByRecord(verl.fits, ["parquet"]),
        verl.read,
        valid(verl.write),
        suffix=".parquet",
        loses=_TEXT_ONLY,
        training=True,
        cut=by_record,
    ),
    "verifiers": Format(
        ByRecord(verifiers.fits),
        verifiers.read,
        valid(verifiers.write),
        tokens=True,
        loses=frozenset({"spans of other messages"}),
        cut=by_record,
    ),
    "verifiers-v1": Format(
        ByRecord(verifiers_v1.fits), verifiers_v1.read, valid(verifiers_v1.write), tokens=True, cut=by_record
    ),
    "nemo-gym": Format(ByRecord(nemo_gym.fits), nemo_gym.read, cut=by_record, regular=nemo_gym.REGULAR),
    "atif": Format(ByRecord(atif.fits), atif.read, valid(atif.write), tokens=True, suffix="", cut=by_record),
    "swe-agent": Format(
        ByRecord(swe_agent.fits),
        swe_agent.read,
        valid(swe_agent.write),
        suffix="",
        loses=_TOKENS - {"tokenizer"} | {"step rewards"},
    ),
    "tau2": Format(
        ByRecord(tau2.fits),
        tau2.read,
        valid(tau2.write),
        suffix=".json",
        loses=_TOKENS - {"tokenizer"} | {"step rewards"} | _SPELLING,
        cut=tau2.cut,
    ),
    "mini-swe-agent": Format(mini_swe.fits, mini_swe.read),
    "openhands": Format(ByRecord(openhands.fits), openhands.read, cut=openhands.cut),
    "claude-code": Format(
        ByRecord(claude_code.fits), claude_code.read, cut=claude_code.cut, companions=claude_code.companions
    ),
    "claude-code-stream": Format(ByRecord(claude_stream.fits), claude_stream.read),
    "codex": Format(ByRecord(codex.fits), codex.read),
    "codex-exec": Format(ByRecord(codex_exec.fits), codex_exec.read),
    "opencode": Format(ByRecord(opencode.fits), opencode.read),
    "gemini-cli": Format(ByRecord(gemini_cli.fits), gemini_cli.read),
    "openai-agents": Format(openai_agents.fits, openai_agents.read, reads=("sqlite",)),
    "langgraph": Format(langgraph.fits, langgraph.read, reads=("sqlite",)),
    "inspect": Format(inspect_logs.fits, inspect_logs.read, cut=inspect_logs.cut, reads=(*RECORDS, "zip")),
    "otel": Format(ByRecord(otel.fits, (*RECORDS, "csv")), otel.read, cut=otel.cut, reads=(*RECORDS, "csv")),
    "alpaca": Format(ByRecord(alpaca.fits), alpaca.read, cut=by_record, regular=alpaca.REGULAR),
    "tau-bench": Format(ByRecord(tau_bench.fits), tau_bench.read, cut=by_record),
    "sharegpt": Format(
        ByRecord(sharegpt.fits),
        sharegpt.read,
        valid(sharegpt.write),
        loses=_TEXT_ONLY | _SPELLING | _SHAREGPT,
        training=True,
        cut=by_record,
    ),
    "sharegpt-preference": Format(ByRecord(sharegpt.fits_preference), sharegpt.read_preference, cut=by_record),
    "huggingface": Format(
        huggingface.fits,
        huggingface.read,
        huggingface.write,
        tokens=True,
        suffix="",
        cut=huggingface.cut,
        reads=("folder",),
    ),
}


def named(name: str | OwnFormat) -> Format:
    """The format of that name: one of ours, ``module:Class`` of the user's, or the user's with its settings. Raises
    StoreError if there is none."""
    if isinstance(name, OwnFormat):
        write = None if type(name).write is OwnFormat.write else name.write
        return Format(name.fits, name.rows, write, name.tokens, name.suffix, name.loses, training=name.training)
    if ":" in name:
        try:
            return named(OWN_FORMAT.read(name))
        except ValidationError as error:
            raise StoreError(error.errors(include_url=False)[0]["msg"]) from None
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS)
        raise StoreError(f"there is no format {name!r}{hint}; formats are {', '.join(FORMATS)}; {RULE}")
    return FORMATS[name]


def detect(source: Source) -> str | None:
    """The name of the format that fits a file best; None if none does. Of those that fit equally it is the first."""
    scores = {name: format.fits(source) for name, format in FORMATS.items()}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] else None
