"""Agents that act by tags in running text: Search-R1 and ReTool."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from architectures import POLICIES, expert_runs
from chats import FIND, answers, row, says, user

from agentrl.chat.codec import ChatCodec, tokenize
from agentrl.chat.dialects import find_dialect
from agentrl.engines.base import Sampling, Session, Turn
from agentrl.engines.blocking import blocking
from agentrl.environments.base import Score, Step
from agentrl.models.policy import Policy
from agentrl.pipelines.parts.common import ModelConfig, start_policy
from agentrl.rollouts.acting import Act
from agentrl.rollouts.attempts import Attempt
from agentrl.rollouts.episodes import EpisodeRun
from agentrl.rollouts.limits import Limits
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Span, Termination, ToolCall


def tagged(name: str) -> ChatCodec:
    policy = POLICIES["qwen"]()
    policy.tokenizer.init_kwargs["dialect"] = name
    return find_dialect(policy.tokenizer)


TAGGED = {
    "search_r1": (
        ToolCall(id="call_0", name="search", arguments=json.dumps({"query": "who wrote Faust?"})),
        "<search>who wrote Faust?</search>\n\n<information>Goethe <b></information>\n\n",
    ),
    "retool": (
        ToolCall(id="call_0", name="code_interpreter", arguments=json.dumps({"code": "x = 1 > 0\nprint(x)"})),
        "<code>\n```python\nx = 1 > 0\nprint(x)\n```\n</code>\n<interpreter>\nGoethe <b>\n</interpreter>\n",
    ),
}


@pytest.mark.parametrize("name", TAGGED)
def test_agents_of_tags_are_written_as_published(name: str) -> None:
    item, text = TAGGED[name]
    codec = tagged(name)
    made = tokenize(
        row(
            [
                user("Who?"),
                says("", item, reasoning="Hm."),
                answers(item, "Goethe <b>"),
                says("Goethe", reasoning="So <b>."),
            ]
        ),
        codec,
        "digest",
    )
    tokenizer = codec.template.tokenizer
    opening = tokenizer.decode(codec.opening([user("Who?")]))
    end = "<|im_end|>"
    whole = f"{opening}<think>Hm.</think>\n{text}<think>So <b>.</think>\n<answer>Goethe</answer>{end}"
    assert tokenizer.decode(made.input_ids) == whole
    texts = [tokenizer.decode(made.input_ids[m.token_start : m.token_end]) for m in made.messages]
    assert texts[2] not in texts[1] + texts[3]
    assert texts[1].endswith(text.partition(texts[2])[0])


@pytest.mark.parametrize("name", TAGGED)
def test_a_turn_of_tags_stops_at_its_end_and_nowhere_before(name: str) -> None:
    codec = tagged(name)
    for message in (says("", TAGGED[name][0], reasoning="a <b>c</b> -> d"), says("x > y", reasoning="z")):
        ids = codec.assistant(message)
        over = [
            position
            for position, token in enumerate(ids)
            if token in codec.stop_ids and codec.ended(ids[: position + 1])
        ]
        assert over == [len(ids) - 1]
        parsed = codec.parse(ids)
        assert (parsed.error, parsed.message.content, parsed.message.reasoning) == (
            None,
            message.content,
            message.reasoning,
        )
        assert [call.arguments for call in parsed.message.tool_calls] == [call.arguments for call in message.tool_calls]


def test_calls_that_tags_cannot_write_are_refused_and_broken_ones_are_errors() -> None:
    codec = tagged("search_r1")
    with pytest.raises(ValueError, match=r"one call of search\(query\) in a turn, and the turn calls find"):
        codec.assistant(says("", FIND))
    assert codec.parse(codec.template.encode("<search>who")).error
    with pytest.raises(ValueError, match="'tags'; allowed are search_r1, retool"):
        tagged("tags")


def test_a_chosen_dialect_stays_with_the_model_and_is_part_of_its_tokenizers_fingerprint(tmp_path: Path) -> None:
    policy = POLICIES["qwen"]()
    before = policy.tokenizer_fingerprint
    policy.tokenizer.init_kwargs["dialect"] = "retool"
    policy.save(tmp_path)
    loaded = Policy.load(tmp_path)
    assert loaded.codec.dialect == "retool"
    assert loaded.tokenizer_fingerprint != before


class Scripted:
    """An engine that says given tokens, and stops as engines do: at the first stop token, or at a limit."""

    exact, reproducible, version = True, True, 0

    def __init__(self, says: list[list[int]]) -> None:
        self.left = [value for turn in says for value in turn]
        self.asked = 0

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        return Session(key=key, root=root)

    async def turn(self, session: Session, sampling: Sampling, *, stop: Sequence[int], **_: Any) -> Turn:
        self.asked += 1
        texts: list[int] = []
        while len(texts) < sampling.max_turn_tokens and (not texts or texts[-1] not in stop):
            texts.append(self.left.pop(0))
        ended = "stop" if texts[-1] in stop else "length"
        return Turn(texts, [-1.0] * len(texts), [Span(version=0, start=0, end=len(texts))], ended)


class Library:
    """An environment whose tool is called ``search``."""

    name, version, opening, tools = "library", "1", [user("Who wrote Faust?")], "[]"

    async def reset(self, task: Task) -> "Library":
        return self

    async def step(self, message: Message) -> Step:
        return Step([answers(call, "Goethe <b>") for call in message.tool_calls])

    async def score(self) -> Score:
        return Score(True, ())

    async def close(self) -> None:
        pass


def test_an_episode_of_tags_goes_on_over_stops_that_end_nothing_and_stores_what_was_sampled() -> None:
    """Each ``>`` stops the engine; only the closing tag of the call and the end-of-turn token end a turn."""
    codec = tagged("search_r1")
    turns = [codec.assistant(says("", TAGGED["search_r1"][0], reasoning="a > b")), codec.assistant(says("Goethe"))]
    engine = Scripted(turns)
    task = Task(task_id="t", env="library", split="train", prompt="Who wrote Faust?", ground_truth='"Goethe"')
    act = Act(engine, codec, Sampling(max_turn_tokens=200, max_tokens=2000), Limits())
    run = EpisodeRun(act, Library(), Attempt(task), engine.open(), 0)
    blocking(run.run())
    assert run.error == ""
    assert (run.termination, run.steps, run.tool_calls) == (Termination.ANSWERED, 2, 1)
    assert engine.asked > 4
    texts = [token for token, acts in zip(run.session.ids, run.session.mask, strict=True) if acts]
    assert texts == turns[0] + turns[1]
    assert run.messages[-1].content == "Goethe"
    bare = [m.model_copy(update={"token_start": None, "token_end": None}) for m in run.messages]
    written = tokenize(row(bare), codec, "")
    assert written.input_ids == run.session.ids
    assert written.action_mask == run.session.mask


def test_a_pipeline_chooses_the_tags_of_the_model_that_it_starts_from() -> None:
    conversations = [row.messages for row in expert_runs(4)]
    policy = start_policy(None, ModelConfig(init="tiny", dialect="search_r1"), conversations, seed=0)
    assert policy.codec.dialect == "search_r1"
