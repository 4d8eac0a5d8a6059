"""Whatever an agent asks, each sampled token is in exactly one row, as it was sampled, after what the policy read."""

import asyncio
import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import RowsInMemory, ScriptedTokens, policy_for_tests

from agentrl.datastore.table.ingest import as_table
from agentrl.datastore.table.validation import validate
from agentrl.engines.base import Sampling, Session, Turn
from agentrl.models.policy import Policy
from agentrl.recorder.episode import About, PostedReward, RecordedEpisode
from agentrl.recorder.episodes import Episodes
from agentrl.recorder.recorder import Recorder
from agentrl.recorder.sampler import Sampler
from agentrl.recorder.wire import TurnRequest
from agentrl.schemas.trajectory import Message, Role, Trajectory


@pytest.fixture(scope="module")
def policy() -> Policy:
    return policy_for_tests()


class Watched(ScriptedTokens):
    """Keeps what each turn read, and what it sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.turns: list[tuple[list[int], list[int]]] = []

    async def turn(self, session: Session, sampling: Sampling, **options: object) -> Turn:
        read = list(session.ids)
        turn = await super().turn(session, sampling, **options)  # type: ignore[arg-type]
        self.turns.append((read, turn.ids))
        return turn


Choice = tuple[str, int, str]
CHOICES = st.tuples(
    st.sampled_from(["go on", "go on", "go on", "branch", "edit", "anew", "other agent"]),
    st.integers(0, 100),
    st.sampled_from(["hello", "weather?", "and 20 degrees", ""]),
)


def conversation_of(choice: Choice, talks: list[list[Message]]) -> list[Message]:
    """The messages of the next request. ``talks`` are the conversations so far, each up to an answer."""
    how, number, text = choice
    message = Message(role=Role.USER, content=text)
    if how == "other agent":
        return [Message(role=Role.SYSTEM, content=f"agent {number % 3}"), message]
    if how == "anew" or not talks:
        return [message]
    if how == "go on":
        return [*talks[-1], message]
    talk = talks[number % len(talks)]
    if how == "edit":
        position = next(n for n, line in enumerate(talk) if line.role is Role.ASSISTANT)
        edited = talk[position].model_copy(update={"content": f"edited {text}"})
        return [*talk[:position], edited, *talk[position + 1 :], message]
    return [*talk, message]


async def recorded(policy: Policy, choices: list[Choice], folder: Path) -> tuple[list[Trajectory], Watched]:
    numbers = itertools.count()
    engine = Watched(policy, lambda _: f"answer {next(numbers) % 3}")
    sampler = Sampler(engine, policy, Sampling(max_tokens=4000, max_turn_tokens=50), 60.0, 0)
    store = RowsInMemory()
    recorder = Recorder(sampler, "tiny", Episodes(folder, store, "tiny", policy.tokenizer_fingerprint))
    await recorder.start()
    episode = recorder.episodes.open(About(), "ep-key")
    talks: list[list[Message]] = []
    for choice in choices:
        messages = conversation_of(choice, talks)
        reply = await recorder.ask(episode, TurnRequest("tiny", messages), "", False)
        answer = await reply.answered()
        recorder.received(reply)
        await recorder.left(reply)
        talks.append([*messages, answer.message])
    again = RecordedEpisode.read(episode.path)
    assert again is not None
    await recorder.reward(episode, PostedReward(reward=1.0))
    again.outcome, again.closed = episode.outcome, True
    assert repr(again.rows()) == repr(episode.rows()), "the file says the same"
    await recorder.stop()
    return store.all(), engine


@settings(max_examples=40, deadline=None)
@given(st.lists(CHOICES, min_size=1, max_size=12))
def test_each_sampled_token_is_in_one_row_as_it_was_sampled(policy: Policy, choices: list[Choice]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows, engine = asyncio.run(recorded(policy, choices, Path(folder)))
    assert validate(as_table(rows)) == [], "rows keep the contract of the buffer"
    matches = []
    for row in rows:
        start = None
        for position, own in enumerate([*row.action_mask, False]):
            if own and start is None:
                start = position
            elif not own and start is not None:
                matches.append((row.input_ids[:start], row.input_ids[start:position]))
                start = None
    assert sorted(matches) == sorted(engine.turns)
    parents = {row.trajectory_id: row for row in rows}
    for row in rows:
        if row.parent_id:
            assert row.input_ids[: row.fork_at] == parents[row.parent_id].input_ids[: row.fork_at]
