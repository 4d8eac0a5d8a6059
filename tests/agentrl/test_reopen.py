"""Rows after another opening: what follows the opening stays as it is."""

import math

from agentrl.chat.codec import tokenize
from agentrl.environments import load_environment
from agentrl.models.tiny import tiny_policy
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.reopen import opening_of, reopened
from agentrl.schemas.trajectory import Message, Role, Span, Trajectory

ENV = load_environment("lookup")
TASK = next(task for task in ENV.tasks({"train": 20}, 0)["train"] if task.level == 3)
WRITTEN = demonstrate(ENV, TASK, 0.0, 0, "written")
POLICY = tiny_policy([WRITTEN.messages], 0)
CODEC = POLICY.codec
OTHER = [Message(role=Role.SYSTEM, content="Be brief."), Message(role=Role.USER, content="job of the boss of Ann?")]


def sampled() -> Trajectory:
    row = tokenize(WRITTEN, CODEC, POLICY.tokenizer_fingerprint)
    logprobs = [-0.5 if acted else math.nan for acted in row.action_mask]
    first = row.action_mask.index(True)
    spans = [Span(version=3, start=first, end=len(row.input_ids))]
    return row.model_copy(update={"logprobs": logprobs, "spans": spans, "group_id": "g"})


def test_the_tail_is_identical_and_the_log_probs_are_gone() -> None:
    row = sampled()
    made = reopened(row, OTHER, CODEC, "new", "relabelled", level=2)
    start, before = row.action_mask.index(True), made.action_mask.index(True)
    assert made.input_ids[:before] == CODEC.opening(OTHER, row.tools)
    assert made.input_ids[before:] == row.input_ids[start:]
    assert made.action_mask[before:] == row.action_mask[start:]
    assert all(map(math.isnan, made.logprobs))
    assert (made.trajectory_id, made.episode_id, made.parent_id, made.level) == ("new", "new", row.trajectory_id, 2)
    assert made.n_tokens == len(made.input_ids) == len(made.logprobs) == len(made.action_mask)
    assert opening_of(made)[0].token_end == before
    for old, new in zip(row.messages[1:], made.messages[2:], strict=True):
        assert new.content == old.content
        assert made.input_ids[new.token_start : new.token_end] == row.input_ids[old.token_start : old.token_end]
    [span] = made.spans
    assert made.input_ids[span.start : span.end] == row.input_ids[row.spans[0].start : row.spans[0].end]


def test_a_forked_row_is_reopened_at_its_first_turn_although_the_mask_is_false_there() -> None:
    row = sampled()
    second = [message for message in row.messages if message.role is Role.ASSISTANT][1]
    mask = [acted and position >= second.token_start for position, acted in enumerate(row.action_mask)]
    logprobs = [-0.5 if acted else math.nan for acted in mask]
    fork = row.model_copy(
        update={"action_mask": mask, "logprobs": logprobs, "fork_at": second.token_start, "parent_id": "p"}
    )
    made = reopened(fork, OTHER, CODEC, "new", "relabelled")
    opened, whole = len(CODEC.opening(OTHER, row.tools)), row.action_mask.index(True)
    assert made.input_ids[opened:] == row.input_ids[whole:]
    assert made.action_mask[opened:] == mask[whole:]
    assert made.fork_at == 0, "it shares no tokens with its parent"


def test_a_row_without_tokens_is_reopened_without_a_codec() -> None:
    made = reopened(WRITTEN, OTHER, None, "new", "relabelled")
    assert made.messages == [*OTHER, *WRITTEN.messages[1:]]
    assert made.input_ids == []
