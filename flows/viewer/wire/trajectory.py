"""What the viewer's server answers about one row; see :mod:`agentrl.flows.viewer.wire`."""

from typing import Any, Literal

from agentrl.flows.viewer.wire import Answer

# GET /api/rows/{id}?at=


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


# GET /api/rows/{id}/fate?at=


class SeenBy(Answer):
    """What one artifact did with a row. ``why`` is the rule that dropped it, or why it was left out. ``steps`` are
    those that trained on it, or that sampled it and left it out; ``pair_id`` the pair that it is a side of."""

    artifact: str
    uses: str
    run_id: str
    when: str
    what: Literal["made", "kept", "dropped", "chosen", "rejected", "trained", "left out", "read"]
    why: str
    pair_id: str | None
    steps: list[int]


class Fate(Answer):
    """What became of a row, in the order of time. ``unread`` older artifacts were not looked through."""

    version: int
    unread: int
    seen: list[SeenBy]


# GET /api/tokens/{id}?at= -> Arrow, one record per token; GET /api/tokens/{id}/text?at= -> text/plain, UTF-8

#
# Columns of every answer: start, length (int32, bytes in the text; null if the tokenizer is not known), joined (bool:
# the token starts inside a character, show it with the one before), id (int32), mask (bool), logprob (float32, null
# where the policy sampled nothing), version (int32, of the weights that sampled it; null where not known).
# Optional columns, each there only if something wrote it: weight (float32: in the loss; for policy gradients the
# advantage), trained (bool: the training row's mask), step (int32, of training that learned from it), ref_logprob,
# train_logprob, entropy (float32). They are null on tokens that are not trained on.
# Metadata of the schema, all texts: text is "yes" or "no", and reason says why not; version is that of the buffer;
# absent is JSON, optional column -> why it is not there; sources is JSON, optional column -> STAGE/FINGERPRINT.
