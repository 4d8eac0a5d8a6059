"""Twelve model families and more: what we write is what their own chat templates write, token for token."""

import json
import re
import sys
from functools import cache
from typing import Any

import pytest
from architectures import POLICIES
from chats import FIND, LOOK, TOOLS, answers, call, row, says, user
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import families
from agentrl.chat.codec import ChatCodec, tokenize
from agentrl.chat.dialects import NO_ANSWERS, NO_CALLS, NO_REASONING, NO_RENDERERS, NO_TOOLS, REWRITES, find_dialect
from agentrl.schemas.trajectory import Role, Trajectory
from benchmarks.chat_families import tokenizer_of

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
    "lfm2_2_5": "learned",
    "lfm2_v2": "learned",
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


@cache
def codec_of(name: str) -> ChatCodec:
    return find_dialect(tokenizer_of(name))


MARKUP = '[{"name": "find", "arguments": {}}] <b>so</b> </result> <|x|> & {% raw %}'


def conversations(name: str) -> dict[str, Trajectory]:
    """What a family is tried with: only what its template can write."""
    thought = "It is so." if name in REASONS else None
    made = {"plain": row([user("Why?"), says("So.", reasoning=thought)])}
    if name in CALLS:
        acts = says("", FIND, reasoning=thought)
        both = says("", FIND, LOOK, reasoning=thought)
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
                    "id": item.id,
                    "function": {"name": item.name, "arguments": json.loads(item.arguments)},
                }
                for item in message.tool_calls
            ]
        if message.role is Role.TOOL:
            plain |= {"name": message.name, "tool_call_id": message.tool_call_id}
        chat.append(plain)
    return codec.template.tokenizer.apply_chat_template(
        chat, tools=json.loads(made.tools) or None, return_dict=False, chat_template=codec.template.source
    )


HIDES_THOUGHTS = {"deepseek_r1_distill"}
"""Families whose finished turns leave out the thought that the generation prompt begins; see the test below."""

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


def test_only_the_thoughts_that_deepseeks_template_hides_differ_from_it() -> None:
    codec = codec_of("deepseek_r1_distill")
    tokenizer = codec.template.tokenizer
    messages = [user("Why?"), says("So.", reasoning="It is so."), user("And?"), says("Fine.")]
    made = tokenize(row(messages), codec, "digest")
    ours = tokenizer.decode(made.input_ids)
    thoughts = re.findall("<think>.*?</think>\n\n", ours, re.DOTALL)
    assert thoughts == ["<think>\nIt is so.\n</think>\n\n", "<think>\n\n</think>\n\n"]
    for thought in thoughts:
        ours = ours.replace(thought, "")
    assert codec.template.encode(ours) == native(codec, made)


def test_a_thought_is_closed_only_where_the_generation_prompt_begins_one() -> None:
    """DeepSeek's begins none after a tool's answer."""
    codec = codec_of("deepseek_r1_distill")
    tokenizer = codec.template.tokenizer
    first, last = says("", FIND), says("In Rome.")
    made = tokenize(row([user("Where?"), first, answers(FIND, "Rome"), last], TOOLS), codec, "digest")
    turns = [made.input_ids[message.token_start : message.token_end] for message in made.messages]
    assert tokenizer.decode(turns[1]).startswith("\n</think>\n\n<tool_call>")
    assert tokenizer.decode(turns[3]) == "In Rome.<｜end▁of▁sentence｜>"
    assert codec.parse(turns[3], made.input_ids[: made.messages[3].token_start]).message.content == "In Rome."
    thinks = codec.assistant(says("In Rome.", reasoning="Hm."), before=[answers(FIND, "Rome")])
    assert tokenizer.decode(thinks).startswith("<think>Hm.\n</think>\n\nIn Rome.")


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_mask_decodes_to_exactly_what_the_assistant_said(name: str, kind: str) -> None:
    codec = codec_of(name)
    made = tokenize(conversations(name)[kind], codec, "digest")
    for message in made.messages:
        start, end = message.token_start or 0, message.token_end or 0
        part = made.action_mask[start:end]
        assert all(flag is (message.role is Role.ASSISTANT) for flag in part)
        if message.role is Role.ASSISTANT:
            text = made.input_ids[start:end]
            assert text[-1] in codec.stop_ids
            assert not set(text[:-1]) & set(codec.stop_ids)
            parsed = codec.parse(text, made.input_ids[:start], made.tools)
            assert parsed.error is None
            assert parsed.message.content == message.content
            assert (parsed.message.reasoning or None) == message.reasoning
            assert [(item.name, item.parsed()) for item in parsed.message.tool_calls] == [
                (item.name, item.parsed()) for item in message.tool_calls
            ]
    assert sum(made.action_mask) == sum(
        (m.token_end or 0) - (m.token_start or 0) for m in made.messages if m.role is Role.ASSISTANT
    )


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("reasons", [False, True])
def test_a_call_that_nothing_has_answered_yet_reads_back(name: str, reasons: bool) -> None:
    """An adviser's turn is written before the tools answer."""
    codec = codec_of(name)
    wanted = says("", call(0, "find", "Ann"), reasoning="It is so." if reasons and name in REASONS else None)
    ids = codec.assistant(wanted)
    assert ids[-1] in codec.stop_ids
    parsed = codec.parse(ids, codec.opening([user("Where?")], TOOLS), TOOLS)
    assert parsed.error is None
    assert parsed.message.reasoning == wanted.reasoning
    assert [(item.name, item.parsed()) for item in parsed.message.tool_calls] == [("find", {"q": "Ann"})]


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
    assert codec_of("llama3").remarks == [NO_CALLS, NO_TOOLS, NO_REASONING]
    assert codec_of("qwen2_5").remarks == [NO_REASONING]
    assert codec_of("gemma3").remarks == [NO_CALLS, NO_TOOLS, NO_ANSWERS, NO_REASONING]


def test_reasoning_is_kept_where_a_template_writes_none() -> None:
    codec = codec_of("llama3_2")
    made = tokenize(row([user("Why?"), says("So.", reasoning="It is so.")]), codec, "digest")
    texts = [token for token, acts in zip(made.input_ids, made.action_mask, strict=True) if acts]
    assert codec.parse(texts).message.reasoning == "It is so."


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gptoss", "the end of a sampled turn is unknown"),
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
    turn = [*codec.template.encode("<think>\nIt is"), codec.stop_ids[0]]
    assert codec.parse(turn, prompt).error == "the turn ended inside its reasoning"
    with pytest.raises(ValueError, match="cannot go on after"):
        codec.observations([user("And?")], prompt, turn)


@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "lfm2_2_5", "qwen2_5"])
@pytest.mark.parametrize("value", ['{"name": " {"}', "[1]", "7", "null"])
def test_a_call_whose_name_is_no_string_is_an_error(name: str, value: str) -> None:
    codec = codec_of(name)
    call = f'{{"name": {value}, "arguments": {{"q": "."}}}}'
    written = {
        "llama3_2": call.replace("arguments", "parameters"),
        "lfm2_2_5": f"<|tool_call_start|>[{call}]<|tool_call_end|>",
    }
    turn = codec.template.encode(written.get(name, f"<tool_call>\n{call}\n</tool_call>"))
    parsed = codec.parse([*turn, codec.stop_ids[0]], codec.opening([user("Where?")], TOOLS), TOOLS)
    assert not parsed.message.tool_calls
    assert value in parsed.message.content


def test_openings_do_not_depend_on_the_day() -> None:
    codec = codec_of("llama3_2")
    assert "26 Jul 2024" in codec.template.tokenizer.decode(codec.opening([user("Why?")]))


def test_without_renderers_the_remarks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    families.candidates.cache_clear()
    monkeypatch.setitem(sys.modules, "renderers", None)
    codec = find_dialect(tokenizer_of("qwen3"))
    [remark] = [remark for remark in codec.remarks if NO_RENDERERS in remark]
    assert remark.endswith("[dialects]'")


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
    turn = [
        *data.draw(st.lists(pieces.filter(lambda value: value not in codec.stop_ids), max_size=12)),
        codec.stop_ids[0],
    ]
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
