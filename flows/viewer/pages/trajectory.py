"""One row as the trajectory page shows it: messages, where it came from, who learned from it, and the proof that only
sampled tokens are trained on."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import repeat
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import Field

from agentrl.datastore.table.writer import SCALARS
from agentrl.flows.viewer.query.artifacts import Artifacts, label, numbers
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, RefusedError, RowQuery
from agentrl.schemas.manifest import Kind, Manifest

CUT = 20_000
"""Characters of a message's texts, unless the whole message is asked for."""
CUT_MORE, WHOLE = 200, 4_000_000
"""Characters of a message after messages that have :data:`WHOLE` together."""
CUT_JSON = 200_000
BREACHES = 1000
ATTEMPTS = 1024


class MessageQuery(RowQuery):
    number: int
    start: int = Field(0, ge=0, lt=2**40)
    most: int | None = Field(None, ge=1)


class ShownCall(Answer):
    """``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


class ShownMessage(Answer):
    """A message. ``content``, ``reasoning`` and ``arguments`` are cut after 20,000 characters if ``cut`` is true;
    ``characters`` counts the whole ``content``, and GET /api/rows/{id}/messages/{number}?start=&most= gives the whole
    message, or these characters of its content, as JSON of this model. ``error``: it is the answer of a tool that
    failed. ``seconds`` its turn or call took, if that is known. ``token_start`` and ``token_end`` are its span."""

    number: int
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str | None
    tool_calls: list[ShownCall]
    tool_call_id: str | None
    name: str | None
    reward: float | None
    token_start: int | None
    token_end: int | None
    seconds: float | None
    error: bool
    characters: int
    cut: bool


class Component(Answer):
    name: str
    value: float
    weight: float


class VersionSpan(Answer):
    """The weights of ``version`` sampled the action tokens of [start, end)."""

    version: int
    start: int
    end: int


class Maker(Answer):
    """The stage run that appended the row. ``uses`` and ``inputs`` (STAGE/FINGERPRINT) are empty if it is gone."""

    pipeline: str | None
    stage: str
    fingerprint: str
    run_id: str
    uses: str
    inputs: list[str]


class LearnedFrom(Answer):
    """What a model learned from: STAGE/FINGERPRINT of rows, as /api/rows?among= takes it, or of pairs."""

    artifact: str
    kind: Literal["rows", "pairs"]


class SampledBy(Answer):
    """What sampled the row. ``stage`` and ``fingerprint`` name the artifact if the policy is one."""

    name: str
    version: int
    stage: str | None
    fingerprint: str | None
    learned_from: list[LearnedFrom]


class LearnedBy(Answer):
    """A stage that learned from the row, newest first, in which ``steps`` as its metrics number them (optimiser steps,
    online iterations), and the ``models`` that it made, as rows that they sample name them."""

    stage: str
    fingerprint: str
    steps: list[int]
    models: list[str]


class Made(Answer):
    made_by: Maker
    policy: SampledBy
    learned_by: list[LearnedBy]


class Breach(Answer):
    """A token that is trained on and that no policy sampled, and the rule that it breaks."""

    token: int
    rule: str


class Neighbours(Answer):
    """Rows of the same stage run before and after this one, and all rows of the same task (this one too, at most
    1,024 of ``all_attempts``), in the order of time."""

    previous: str | None
    next: str | None
    attempts: list[str]
    all_attempts: int


class RowAnswer(Answer):
    """One trajectory. ``row`` holds the scalar columns by name, times as ISO 8601; ``tools`` and ``final_state`` are
    JSON texts, cut after 200,000 of so many characters. ``proof`` lists at most 1,000 breaches, ``breaches`` counts
    all."""

    version: int
    row: dict[str, Any]
    messages: list[ShownMessage]
    tools: str
    tools_characters: int
    final_state: str
    final_state_characters: int
    reward_components: list[Component]
    tags: list[str]
    spans: list[VersionSpan]
    lineage: Made
    proof: list[Breach]
    breaches: int
    neighbours: Neighbours


def row(reader: StoreReader, question: RowQuery) -> RowAnswer:
    table, snapshot = reader.row_of(question.id, question.at)
    scalars = scalars_of(table)
    about = content(table, scalars, reader.artifacts, reader.sampled(table))
    return RowAnswer(**about, version=snapshot.version, neighbours=beside(scalars, snapshot))


def scalars_of(row: pa.Table) -> dict[str, Any]:
    """Scalar columns of one row by name, times as ISO 8601."""
    return {name: _plain(row[name][0].as_py()) for name in SCALARS}


def _cut(value: Any) -> Any:
    """A text of a row as far as a page shows it; a prompt stands in the messages too."""
    if not isinstance(value, str) or len(value) <= CUT:
        return value
    return f"{value[:CUT]} … (the first {CUT:,} of {len(value):,} characters)"


def content(
    row: pa.Table, scalars: dict[str, Any], artifacts: Artifacts, sampled: np.ndarray, *, whole: bool = False
) -> dict[str, Any]:
    """What a row says by itself. ``whole`` says that no text is cut."""
    messages = timed(row["messages"][0].as_py(), row["message_seconds"][0].as_py())
    breaches_found = list(breaches(row, messages, artifacts, sampled))
    errors, cut = failed(messages, scalars["n_tool_errors"]), None if whole else CUT_JSON
    tools, state = row["tools"][0].as_py(), row["final_state"][0].as_py()
    turns = (turn(number, message, number in errors, None) for number, message in enumerate(messages))
    return {
        "row": scalars if whole else {name: _cut(value) for name, value in scalars.items()},
        "messages": list(turns if whole else _shown(messages, errors)),
        "tools": tools[:cut],
        "tools_characters": len(tools),
        "final_state": state[:cut],
        "final_state_characters": len(state),
        "reward_components": [Component(**component) for component in row["reward_components"][0].as_py()],
        "tags": row["tags"][0].as_py(),
        "spans": [VersionSpan(**span) for span in row["spans"][0].as_py()],
        "lineage": _lineage(scalars, artifacts),
        "proof": [Breach(token=token, rule=rule) for token, rule in sorted(breaches_found)[:BREACHES]],
        "breaches": len(breaches_found),
    }


def timed(messages: Sequence[dict[str, Any]], seconds: Sequence[float | None] | None) -> list[dict[str, Any]]:
    """Messages with their ``seconds``."""
    return [message | {"seconds": known} for message, known in zip(messages, seconds or repeat(None), strict=False)]


def _shown(messages: Sequence[dict[str, Any]], errors: set[int]) -> Iterator[ShownMessage]:
    """All messages. Texts are cut, and much shorter after a whole page of them."""
    left = WHOLE
    for number, message in enumerate(messages):
        made = turn(number, message, number in errors, CUT if left > 0 else CUT_MORE)
        left -= len(made.content) + len(made.reasoning or "") + sum(len(call.arguments) for call in made.tool_calls)
        yield made


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def last_words(messages: Sequence[dict[str, Any]]) -> str:
    """The last content of the policy, or the call that it made last; empty without either."""
    for message in reversed(messages):
        if message["role"] == "assistant" and (message["content"] or message["tool_calls"]):
            call = message["tool_calls"][-1] if message["tool_calls"] else None
            return str(message["content"] or f"{call['name']}({call['arguments']})" if call else message["content"])
    return ""


def message(reader: StoreReader, question: MessageQuery) -> ShownMessage:
    """A message whose content begins at a character and has at most so many. Raises RefusedError if there is none of
    this number."""
    table, _ = reader.row_of(question.id, question.at)
    messages, number = timed(table["messages"][0].as_py(), table["message_seconds"][0].as_py()), question.number
    if number >= len(messages):
        raise RefusedError(
            f"this row has no message {number}", field="number", allowed=[f"0 to {len(messages) - 1}"], status=404
        )
    errors = failed(messages, table["n_tool_errors"][0].as_py())
    shown = turn(number, messages[number], number in errors, None)
    end = shown.characters if question.most is None else question.start + question.most
    return shown.model_copy(update={"content": shown.content[question.start : end], "cut": end < shown.characters})


def failed(messages: Sequence[dict[str, Any]], n_errors: int) -> set[int]:
    """Numbers of the tools' answers that are known to be errors: those that say so. Of rows in which none says it of
    itself, as older ones, all if all failed, else those whose words say so."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "tool"]
    if any(messages[number].get("error") is not None for number in answers):
        return {number for number in answers if messages[number].get("error")}
    if n_errors == len(answers):
        return set(answers)
    return {number for number in answers if n_errors and _says_error(messages[number]["content"])}


def turn(number: int, message: dict[str, Any], error: bool, cut: int | None) -> ShownMessage:
    content, reasoning = message["content"], message["reasoning"]
    calls = [ShownCall(**{**call, "arguments": call["arguments"][:cut]}) for call in message["tool_calls"]]
    texts = [content, reasoning or "", *(call["arguments"] for call in message["tool_calls"])]
    shown = {
        "number": number,
        "content": content[:cut],
        "reasoning": reasoning and reasoning[:cut],
        "tool_calls": calls,
        "error": error,
        "characters": len(content),
        "cut": cut is not None and any(len(text) > cut for text in texts),
    }
    return ShownMessage(**message | shown)


def _says_error(content: str) -> bool:
    """Whether a tool's answer reports a failure, as our environments and most others word it."""
    start = content[:200].lstrip().lower()
    return start.startswith(("error", "traceback", "exception", '{"error', "failed"))


# the proof

NOT_ASSISTANT = "sampled by the policy, but inside a message of another role"
OUTSIDE = "sampled by the policy, but outside the assistant messages"
NO_LOGPROB = "sampled by the policy, but without a log-prob, which other tokens of the row have"
SHARED = "sampled by the policy, but before fork_at: it belongs to the parent"
NO_VERSION = "sampled by the policy, but by no known version of its weights"


def breaches(
    row: pa.Table, messages: Sequence[dict[str, Any]], artifacts: Artifacts, sampled: np.ndarray
) -> Iterator[tuple[int, str]]:
    """Tokens that are trained on and that no policy sampled, with the rule that each breaks."""
    mask, ids = numbers(row["action_mask"][0], bool), numbers(row["input_ids"][0], np.int32)
    if not len(ids):
        return
    for rule, broken in _rules(row, messages, mask):
        yield from ((int(token), rule) for token in np.flatnonzero(broken))
    for learned in artifacts.trained_on(row["trajectory_id"][0].as_py(), ids):
        if learned.mask is not None:
            rule = f"{learned.label} trained on it, and no policy sampled it"
            yield from ((int(token), rule) for token in np.flatnonzero(learned.mask & ~sampled))


def _rules(row: pa.Table, messages: Sequence[dict[str, Any]], mask: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    speaker = np.zeros(len(mask), np.int8)  # 1 the assistant, 2 another role
    spanned = [
        message for message in messages if message["token_start"] is not None and message["token_end"] is not None
    ]
    for message in spanned:
        speaker[message["token_start"] : message["token_end"]] = 1 if message["role"] == "assistant" else 2
    if spanned:
        yield NOT_ASSISTANT, mask & (speaker == 2)
        yield OUTSIDE, mask & (speaker == 0)
    logprobs = numbers(row["logprobs"][0], np.float32)
    if len(logprobs) == len(mask):
        unknown = np.isnan(logprobs)
        if (mask & ~unknown).any():
            yield NO_LOGPROB, mask & unknown
    yield SHARED, mask & (np.arange(len(mask)) < row["fork_at"][0].as_py())
    spans = row["spans"][0].as_py()
    if spans:
        covered = np.zeros(len(mask), dtype=bool)
        for span in spans:
            covered[span["start"] : span["end"]] = True
        yield NO_VERSION, mask & ~covered


# where it came from, and what is beside it


def _lineage(row: dict[str, Any], artifacts: Artifacts) -> Made:
    made = artifacts.find(row["stage"], row["fingerprint"])
    inputs = [] if made is None else [record for records in made.ingredients.inputs.values() for record in records]
    policy = artifacts.named(row["policy"])
    return Made(
        made_by=Maker(
            pipeline=row["pipeline"],
            stage=row["stage"],
            fingerprint=row["fingerprint"],
            run_id=row["run_id"],
            uses=made.ingredients.uses if made else "",
            inputs=list(dict.fromkeys(f"{record.stage}/{record.fingerprint[:8]}" for record in inputs)),
        ),
        policy=SampledBy(
            name=row["policy"],
            version=row["policy_version"],
            stage=policy.ingredients.stage if policy else None,
            fingerprint=policy.fingerprint if policy else None,
            learned_from=list(_learned_from(policy, artifacts)) if policy else [],
        ),
        learned_by=[
            LearnedBy(stage=learned.stage, fingerprint=learned.fingerprint, steps=learned.steps, models=learned.models)
            for learned in artifacts.learned(row["trajectory_id"])
        ],
    )


def _learned_from(policy: Manifest, artifacts: Artifacts) -> Iterator[LearnedFrom]:
    """Rows and pairs that a model's stage read, and rows that it sampled itself to learn from."""
    records = [record for each in policy.ingredients.inputs.values() for record in each]
    read = [(artifacts.find(record.stage, record.fingerprint), record.output) for record in records]
    outputs = [(manifest, manifest.outputs.get(name)) for manifest, name in read if manifest is not None]
    outputs += [(policy, output) for output in policy.outputs.values()]
    for manifest, output in outputs:
        if output is not None and output.kind is Kind.TRAJECTORIES:
            yield LearnedFrom(artifact=label(manifest), kind="rows")
        elif output is not None and output.kind is Kind.PAIRS:
            yield LearnedFrom(artifact=label(manifest), kind="pairs")


def beside(row: dict[str, Any], snapshot: Snapshot) -> Neighbours:
    """The neighbours of a row, looked up among all rows of a snapshot by equal values."""
    rows = snapshot.columns(["trajectory_id", "stage", "fingerprint", "env", "task_id", "created_at"])
    name = row["trajectory_id"]
    same = (pl.col("fingerprint") == row["fingerprint"]) & (pl.col("stage") == row["stage"])
    beside = rows.filter(same)["trajectory_id"]
    before, after = beside.filter(beside < name).max(), beside.filter(beside > name).min()
    others = rows.filter((pl.col("task_id") == row["task_id"]) & (pl.col("env") == row["env"]))
    own_first = others.sort(pl.col("trajectory_id") != name, "created_at", "trajectory_id").head(ATTEMPTS)
    attempts = own_first.sort("created_at", "trajectory_id")["trajectory_id"]
    return Neighbours(
        previous=None if before is None else str(before),
        next=None if after is None else str(after),
        attempts=attempts.to_list(),
        all_attempts=others.height,
    )
