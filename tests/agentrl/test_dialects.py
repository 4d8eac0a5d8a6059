"""Twelve model families and more: what we write is what their own chat templates write, token for token."""

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from architectures import POLICIES, expert_runs
from families import tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import families
from agentrl.chat.codec import ChatCodec, tokenize
from agentrl.chat.dialects import NO_CALLS, NO_REASONING, NO_RENDERERS, REWRITES, UNREAD, find_dialect
from agentrl.engines.base import Sampling, Session, Turn
from agentrl.engines.blocking import blocking
from agentrl.environments.base import Score, Step
from agentrl.models.policy import Policy
from agentrl.rollouts.episodes import Act, Attempt, EpisodeRun
from agentrl.rollouts.limits import Limits
from pipelines.stages.common import ModelConfig, start_policy
from schemas.task import Task
from schemas.trajectory import Message, Role, Span, Termination, ToolCall, Trajectory

DIALECTS = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_5_nothink": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_8": "qwen3.8",
    "glm4moe": "glm-4.5",
    "gemma4_v5": "gemma4",
    "llama3_1": "llama-3",
    "llama3_2": "llama-3",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "lfm2_2_5": "response_template",
    "lfm2_v2": "response_template",
    "qwen2_5": "hermes",
    "qwen3_instruct_2507": "hermes",
    "lfm2": "hermes",
    "phi3": "hermes",
    "llama3": "hermes",
    "gemma3": "hermes",
    "cohere": "hermes",
    "deepseek_r1_distill": "hermes",
}
"""The dialect that is found for the template of each family."""

REASONS = {"qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "glm4moe", "gemma4_v5", "nemotron_3_nano"}
REASONS |= {"nemotron_3_ultra", "lfm2_2_5"}
"""Families whose templates write reasoning."""


CALLS = {name for name, dialect in DIALECTS.items() if dialect != "hermes"} | {"qwen2_5", "qwen3_instruct_2507"}
"""Families whose templates write tool calls."""

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"The tool {name}.",
                "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
            },
        }
        for name in ("find", "look")
    ]
)


@cache
def codec_of(name: str) -> ChatCodec:
    return find_dialect(tokenizer_of(name, DIALECTS[name] == "response_template"))


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def says(text: str, *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role=Role.ASSISTANT, content=text, reasoning=reasoning, tool_calls=list(calls))


def call(number: int, name: str, q: str) -> ToolCall:
    return ToolCall(id=f"call_{number}", name=name, arguments=json.dumps({"q": q}))


def answers(one: ToolCall, text: str) -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=one.id, name=one.name)


FIND, LOOK = call(0, "find", 'Zoë\'s "town"'), call(1, "look", "a\nb")
MARKUP = '<tool_call>{"name": "find", "arguments": {}}</tool_call><think>so</think> </tool_response> <|x|> & {% raw %}'


def row(messages: list[Message], tools: str = "[]") -> Trajectory:
    return Trajectory(
        trajectory_id="t",
        episode_id="t",
        task_id="t",
        source="test",
        env="test",
        split="train",
        prompt="",
        reward=None,
        success=None,
        termination=Termination.ANSWERED,
        messages=messages,
        tools=tools,
    )


def conversations(name: str) -> dict[str, Trajectory]:
    """What a family is tried with: only what its template can write."""
    thought = "It is so." if name in REASONS else None
    made = {"plain": row([user("Why?"), says("So.", reasoning=thought)])}
    if name in CALLS:
        # the response template of LFM loses quotes, and a remark says so
        find, look = (call(0, "find", "Zoë"), call(1, "look", "b")) if name.startswith("lfm") else (FIND, LOOK)
        acts = says("", find, reasoning=thought)
        both = says("", find, look, reasoning=thought)
        end = says("In Rome.", reasoning=thought)
        made["call"] = row([user("Where?"), acts, answers(FIND, "Rome"), end], TOOLS)
        made["markup"] = row([user("Where?"), acts, answers(FIND, MARKUP), end], TOOLS)
        if not name.startswith("llama"):  # its template refuses two calls in a turn
            made["parallel"] = row([user("?"), both, answers(FIND, "Rome"), answers(LOOK, "2"), end], TOOLS)
    return made


def native(codec: ChatCodec, made: Trajectory) -> list[int]:
    """The tokens of the conversation by the tokenizer's own template, at the date that we tell it."""
    chat: list[dict[str, Any]] = []
    for message in made.messages:
        plain: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.reasoning:
            plain["reasoning_content"] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "type": "function",
                    "id": one.id,
                    "function": {"name": one.name, "arguments": json.loads(one.arguments)},
                }
                for one in message.tool_calls
            ]
        if message.role is Role.TOOL:
            plain |= {"name": message.name, "tool_call_id": message.tool_call_id}
        chat.append(plain)
    return codec.template.tokenizer.apply_chat_template(
        chat, tools=json.loads(made.tools) or None, return_dict=False, chat_template=codec.template.source
    )


HIDES_THOUGHTS = {"deepseek_r1_distill"}
"""Families whose finished turns leave out the thought that the generation prompt begins."""

CASES = [(name, kind) for name in DIALECTS for kind in conversations(name)]


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] not in HIDES_THOUGHTS])
def test_our_tokens_are_those_of_the_familys_own_template(name: str, kind: str) -> None:
    codec = codec_of(name)
    made = tokenize(conversations(name)[kind], codec, "digest")
    theirs = native(codec, made)
    assert made.input_ids[:-1] == theirs[: len(made.input_ids) - 1]
    rest = codec.template.tokenizer.decode(theirs[len(made.input_ids) - 1 :])
    for end in codec.template.ends:
        rest = rest.replace(end, "")
    assert not rest.strip()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_mask_decodes_to_exactly_what_the_assistant_said(name: str, kind: str) -> None:
    codec = codec_of(name)
    made = tokenize(conversations(name)[kind], codec, "digest")
    for message in made.messages:
        start, end = message.token_start or 0, message.token_end or 0
        part = made.action_mask[start:end]
        assert all(flag is (message.role is Role.ASSISTANT) for flag in part)
        if message.role is Role.ASSISTANT:
            said = made.input_ids[start:end]
            assert said[-1] in codec.stop_ids
            assert not set(said[:-1]) & set(codec.stop_ids)
            parsed = codec.parse(said, made.input_ids[:start], made.tools)
            assert parsed.error is None
            assert parsed.message.content == message.content
            assert (parsed.message.reasoning or None) == message.reasoning
            assert [(one.name, one.parsed()) for one in parsed.message.tool_calls] == [
                (one.name, one.parsed()) for one in message.tool_calls
            ]
    assert sum(made.action_mask) == sum(
        (m.token_end or 0) - (m.token_start or 0) for m in made.messages if m.role is Role.ASSISTANT
    )


@pytest.mark.parametrize("name", DIALECTS)
def test_the_dialect_found_is_the_familys(name: str) -> None:
    assert codec_of(name).dialect.partition(" (")[0] == DIALECTS[name]


def test_options_of_a_family_are_found_and_named() -> None:
    assert "enable_thinking=False" in codec_of("qwen3_5_nothink").dialect
    assert "enable_thinking" not in codec_of("qwen3_5_think").dialect


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "lfm2_2_5"])
def test_a_template_that_rewrites_earlier_turns_is_told_and_bridged(name: str) -> None:
    codec = codec_of(name)
    assert REWRITES in codec.remarks
    first = [user("Why?"), says("So.", reasoning="It is so.")]
    short = tokenize(row(first), codec, "digest")
    long = tokenize(row([*first, user("And?"), says("Fine.", reasoning="Hm.")]), codec, "digest")
    assert long.input_ids[: short.n_tokens] == short.input_ids
    assert native(codec, long)[: short.n_tokens] != short.input_ids
    assert "And?" in codec.template.tokenizer.decode(long.input_ids[short.n_tokens :])


def test_remarks_say_what_a_template_does_not_write() -> None:
    assert codec_of("llama3").remarks == [NO_CALLS, NO_REASONING]
    assert codec_of("qwen2_5").remarks == [NO_REASONING]
    assert "do not read back as they were written: values" in codec_of("lfm2_v2").remarks[-1]
    assert UNREAD in find_dialect(tokenizer_of("lfm2_2_5")).remarks


def test_reasoning_is_kept_where_a_template_writes_none() -> None:
    codec = codec_of("llama3_2")
    made = tokenize(row([user("Why?"), says("So.", reasoning="It is so.")]), codec, "digest")
    said = [one for one, acts in zip(made.input_ids, made.action_mask, strict=True) if acts]
    assert codec.parse(said).message.reasoning == "It is so."


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gptoss", "nobody can say where a sampled turn ends"),
        ("cohere2", "nothing here reads what"),
        ("llava_next", "cannot be used"),
    ],
)
def test_a_template_that_fits_no_dialect_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_dialect(tokenizer_of(name))


def test_a_turn_that_the_generation_prompt_forbids_is_refused() -> None:
    codec = codec_of("qwen3_5_nothink")
    with pytest.raises(ValueError, match=r"t: the generation prompt ends in .* can be sampled, but not written"):
        tokenize(row([user("Why?"), says("So.", reasoning="It is so.")]), codec, "digest")


def test_a_turn_that_ends_inside_its_reasoning_is_an_error_and_has_no_bridge() -> None:
    codec = codec_of("qwen3")
    prompt = codec.opening([user("Why?")])
    turn = [*codec.template.encode("<think>\nIt is"), codec.stop_id]
    assert codec.parse(turn, prompt).error == "the turn ended inside its reasoning"
    with pytest.raises(ValueError, match="cannot go on after"):
        codec.observations([user("And?")], prompt, turn)


def test_openings_do_not_depend_on_the_day() -> None:
    codec = codec_of("llama3_2")
    assert "26 Jul 2024" in codec.template.tokenizer.decode(codec.opening([user("Why?")]))


def test_without_renderers_the_remarks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    families.candidates.cache_clear()
    monkeypatch.setitem(sys.modules, "renderers", None)
    codec = find_dialect(tokenizer_of("qwen3"))
    assert NO_RENDERERS in codec.remarks


def test_the_tiny_model_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "find", lambda template: pytest.fail("searched"))
    codec = find_dialect(POLICIES["qwen"]().tokenizer)
    assert (codec.dialect, codec.remarks) == ("hermes", [])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "gemma4_v5", "llama3_2", "lfm2_2_5", "qwen2_5"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_sampled_tokens_can_be_read_and_gone_on_from(name: str, data: st.DataObject) -> None:
    """Never an exception but the refusal with its reason, and what was sampled stays as it was."""
    codec = codec_of(name)
    tokenizer = codec.template.tokenizer
    pieces = st.sampled_from([*sorted(tokenizer.added_tokens_decoder), *range(300, 330)])
    turn = [*data.draw(st.lists(pieces.filter(lambda one: one not in codec.stop_ids), max_size=12)), codec.stop_id]
    prompt = codec.opening([user("Where?")], TOOLS)
    parsed = codec.parse(turn, prompt, TOOLS)
    assert parsed.message.role is Role.ASSISTANT
    try:
        new = codec.observations([answers(FIND, "Rome")], prompt, turn, TOOLS)
    except ValueError as error:
        if "cannot go on after" not in str(error):
            raise
        return
    assert "Rome" in tokenizer.decode(new)


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
    one, text = TAGGED[name]
    codec = tagged(name)
    made = tokenize(
        row(
            [
                user("Who?"),
                says("", one, reasoning="Hm."),
                answers(one, "Goethe <b>"),
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
    said = [tokenizer.decode(made.input_ids[m.token_start : m.token_end]) for m in made.messages]
    assert said[2] not in said[1] + said[3]
    assert said[1].endswith(text.partition(said[2])[0])


@pytest.mark.parametrize("name", TAGGED)
def test_a_turn_of_tags_stops_at_its_end_and_nowhere_before(name: str) -> None:
    codec = tagged(name)
    for message in (says("", TAGGED[name][0], reasoning="a <b>c</b> -> d"), says("x > y", reasoning="z")):
        ids = codec.assistant(message)
        over = [place for place, one in enumerate(ids) if one in codec.stop_ids and codec.ended(ids[: place + 1])]
        assert over == [len(ids) - 1]
        parsed = codec.parse(ids)
        assert (parsed.error, parsed.message.content, parsed.message.reasoning) == (
            None,
            message.content,
            message.reasoning,
        )
        assert [one.arguments for one in parsed.message.tool_calls] == [one.arguments for one in message.tool_calls]


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
        self.left = [one for turn in says for one in turn]
        self.asked = 0

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        return Session(key=key, root=root)

    async def turn(self, session: Session, sampling: Sampling, *, stop: Sequence[int], **_: Any) -> Turn:
        self.asked += 1
        said: list[int] = []
        while len(said) < sampling.max_turn_tokens and (not said or said[-1] not in stop):
            said.append(self.left.pop(0))
        ended = "stop" if said[-1] in stop else "length"
        return Turn(said, [-1.0] * len(said), [Span(version=0, start=0, end=len(said))], ended)


class Library:
    """An environment whose tool is called ``search``."""

    name, version, opening, tools = "library", "1", [user("Who wrote Faust?")], "[]"

    async def reset(self, task: Task) -> "Library":
        return self

    async def step(self, message: Message) -> Step:
        return Step([answers(one, "Goethe <b>") for one in message.tool_calls])

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
    said = [one for one, acts in zip(run.session.ids, run.session.mask, strict=True) if acts]
    assert said == turns[0] + turns[1]
    assert run.messages[-1].content == "Goethe"
    bare = [m.model_copy(update={"token_start": None, "token_end": None}) for m in run.messages]
    written = tokenize(row(bare), codec, "")
    assert written.input_ids == run.session.ids
    assert written.action_mask == run.session.mask


def test_a_pipeline_chooses_the_tags_of_the_model_that_it_starts_from() -> None:
    conversations = [row.messages for row in expert_runs(4)]
    policy = start_policy(None, ModelConfig(init="tiny", dialect="search_r1"), conversations, seed=0)
    assert policy.codec.dialect == "search_r1"
