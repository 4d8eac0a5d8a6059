"""A dialect is proved before use: what does not come back as it was written is done in a named way, or refused."""

import json
from functools import cache
from typing import Any

import pytest
from chats import FIND, LOOK, TOOLS, answers, call, row, says, user
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from agentrl.chat.codec import ChatCodec, encode, tokenize
from agentrl.chat.dialects import KEY, Trial, find_dialect, prove
from agentrl.chat.forms import numbered
from agentrl.chat.probes import ACTS, PROBES
from agentrl.models.tiny import train_tokenizer
from agentrl.schemas.trajectory import Message, ToolCall
from benchmarks.chat_families import tokenizer_of

TURN = "{{ '<|im_start|>' + m.role + '\\n' }}"
NEXT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
MISTRAL = (  # the rules of Mistral's templates: nine letters and digits, and a call after [TOOL_CALLS]
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{{ '<|im_start|>assistant\\n' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 or not c.id.isalnum() %}{{ raise_exception('nine letters and digits') }}{% endif %}"
    "{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('bad id') }}{% endif %}"
    "{{ '<|im_start|>tool\\n' + m.tool_call_id + ' ' + m.content }}"
    "{% else %}" + TURN + "{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}" + NEXT
)
KIMI = (  # Kimi's form, in which the id alone names the function
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{{ '<|im_start|>assistant\\n' + m.content + '<|calls|>' }}"
    "{% for c in m.tool_calls %}{{ '<|call|>' + c.id + '<|args|>' + c.function.arguments | tojson + '<|end|>' }}"
    "{% endfor %}{{ '<|calls_end|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>tool\\n## Return of ' + m.tool_call_id + '\\n' + m.content }}"
    "{% else %}" + TURN + "{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}" + NEXT
)
DROPS = (  # as Phi-4's: no tools, and nothing of a tool's answer
    "{% for m in messages %}{% if m.role != 'tool' %}" + TURN + "{{ m.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}" + NEXT
)
LOSES = (  # writes a call in a form that keeps no names of arguments
    "{% for m in messages %}"
    + TURN
    + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<|call|>' + c.function.name }}"
    "{% for v in c.function.arguments.values() %}{{ ' ' ~ v }}{% endfor %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    + NEXT
)
HIDES = DROPS.replace("m.content + '<", "m.content.split('</think>')[-1] + '<")


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = train_tokenizer([template], 400)
    made.chat_template = template
    return made


@cache
def trial(name: str) -> Trial:
    return prove(tokenizer_of(name))


@pytest.mark.parametrize(
    "name",
    ["glm4moe", "qwen3_5_think", "qwen3_5_nothink", "qwen3_8", "nemotron_3_nano", "nemotron_3_ultra", "qwen3",
     "qwen2_5", "deepseekv3", "lfm2_v2", "lfm2_2_5", "gemma4_v5", "llama3_2", "phi3_5", "gemma3", "cohere",
     "deepseek_r1_distill"],
)  # fmt: skip
def test_what_a_policy_needs_to_use_tools_comes_back_as_it_was_written(name: str) -> None:
    outcomes = trial(name).outcomes
    assert {probe: outcomes[probe].back for probe in ACTS if outcomes[probe].verdict != "ok"} == {}
    assert "tools" not in trial(name).codec.cannot


@pytest.mark.parametrize("name", ["phi3", "phi3_5", "gemma3", "gemma"])
def test_tools_and_answers_that_a_template_hides_are_told_in_a_named_way(name: str) -> None:
    codec = trial(name).codec
    assert codec.dialect == "hermes (tools in the system message; tools' answers as turns of the user)"
    made = tokenize(row([user("Where?"), says("", FIND, LOOK), answers(FIND, "Rome"), answers(LOOK, "2"), says("So.")],
                        TOOLS), codec, "digest")  # fmt: skip
    text = codec.template.tokenizer.decode(made.input_ids)
    assert '<tools>\n{"type": "function", "function": {"name": "find"' in text
    assert "<tool_response>\nRome\n</tool_response>\n<tool_response>\n2\n</tool_response>" in text


def test_what_the_user_says_after_an_answer_stands_in_the_same_turn() -> None:
    codec = trial("gemma3").codec  # its template wants roles to alternate
    ids, _, _ = encode(codec, [user("?"), says("", FIND), answers(FIND, "Rome"), user("And?"), says("So.")], TOOLS)
    assert "</tool_response>\nAnd?<end_of_turn>" in codec.template.tokenizer.decode(ids)


def test_tools_that_are_told_show_the_form_in_which_the_template_writes_calls() -> None:
    codec = trial("deepseekv3").codec
    assert codec.dialect == "learned (tools in the system message)"
    text = codec.template.tokenizer.decode(codec.opening([user("Where?")], TOOLS))
    assert "in this form:\n<｜tool▁calls▁begin｜>" in text


def test_answers_of_phi_4_are_not_dropped() -> None:
    made = tokenize(row([user("Where?"), says("", FIND), answers(FIND, "Rome"), says("So.")], TOOLS),
                    find_dialect(tokenizer(DROPS)), "digest")  # fmt: skip
    assert "Rome" in tokenizer(DROPS).decode(made.input_ids)


def test_mistrals_ids_are_made_and_read() -> None:
    codec = find_dialect(tokenizer(MISTRAL))
    assert (codec.dialect, "tools" in codec.cannot) == ("learned", False)
    assert any("nine letters and digits" in remark for remark in codec.remarks)
    turn = codec.template.encode('[TOOL_CALLS]find[CALL_ID]aB3dE6gH9[ARGS]{"q": "x"}<|im_end|>')
    parsed = codec.parse(turn, codec.opening([user("?")], TOOLS), TOOLS).message
    assert [(item.id, item.name) for item in parsed.tool_calls] == [("aB3dE6gH9", "find")]
    more = codec.observations([answers(parsed.tool_calls[0], "Rome")], [], turn, TOOLS)
    assert "aB3dE6gH9 Rome" in codec.template.tokenizer.decode(more)


def test_kimis_ids_name_the_function_and_its_number_in_the_conversation() -> None:
    codec = find_dialect(tokenizer(KIMI))
    assert (codec.dialect, "tools" in codec.cannot) == ("learned", False)
    first, second = (FIND.model_copy(update={"id": f"x{n}y"}) for n in range(2))
    told = [user("?"), says("", first), answers(first, "Rome"), says("", second), answers(second, "2"), says("So.")]
    ids, _, messages = encode(codec, told, TOOLS)
    text = codec.template.tokenizer.decode(ids)
    assert [f"functions.find:{n}<|args|>" in text and f"Return of functions.find:{n}\n" in text for n in (0, 1)] == [
        True
    ] * 2
    assert [message.tool_calls[0].id for message in messages if message.tool_calls] == [
        "x0y",
        "x1y",
    ]  # rows keep their own
    parsed = codec.parse(ids[messages[3].token_start : messages[3].token_end], ids[: messages[3].token_start], TOOLS)
    assert [(item.id, item.name) for item in parsed.message.tool_calls] == [("functions.find:1", "find")]


def test_ids_stay_where_any_are_taken() -> None:
    from agentrl.chat.forms import any_id

    assert numbered([says("", FIND)], any_id) == [says("", FIND)]


def test_calls_that_do_not_come_back_are_refused_until_hermes_is_chosen() -> None:
    made = tokenizer(LOSES)
    codec = find_dialect(made)
    assert codec.parse([*codec.template.encode("Hi."), codec.stop_ids[0]]).message.content == "Hi."
    for refused in (lambda: codec.opening([user("?")], TOOLS), lambda: codec.assistant(says("", FIND))):
        with pytest.raises(ValueError, match=r"cannot write tools: .*set `model: \{dialect: hermes\}`"):
            refused()
    made.init_kwargs[KEY] = "hermes"
    chosen = find_dialect(made)
    assert (chosen.dialect.partition(" (")[0], chosen.cannot) == ("hermes", {})
    written = tokenize(row([user("?"), says("", FIND), answers(FIND, "Rome"), says("So.")], TOOLS), chosen, "digest")
    assert "<tool_call>" in made.decode(written.input_ids)
    assert "<|call|>" not in made.decode(written.input_ids)


def test_reasoning_that_a_template_drops_is_refused_and_not_lost() -> None:
    codec = find_dialect(tokenizer(HIDES))
    with pytest.raises(ValueError, match=r"cannot write reasoning: back came 'So\.'"):
        codec.assistant(says("So.", reasoning="It is so."))
    assert codec.assistant(says("So."))


def test_a_probe_that_the_template_refuses_is_a_remark() -> None:
    proved = trial("llama3_2")
    assert proved.outcomes["parallel"].verdict == "refused"
    assert any(
        "cannot be written: parallel" in remark and "single tool-calls" in remark for remark in proved.codec.remarks
    )
    assert {item["probe"] for item in proved.table()} == set(PROBES)


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(
            st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Cn"], include_characters="\n\t ")
        ),
        "flag": st.booleans(),
        "whole": st.integers(-(10**9), 10**9),
        "real": st.floats(allow_nan=False, allow_infinity=False, width=32),
        "list": st.lists(
            st.one_of(st.integers(), st.text("a\"'\n, ]", max_size=5), st.booleans(), st.none()), max_size=4
        ),
    },
)
TYPES = {"text": "string", "flag": "boolean", "whole": "integer", "real": "number", "list": "array"}
TYPED = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "put",
                "description": "Puts.",
                "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in TYPES.items()}},
            },
        }
    ]
)


@pytest.mark.parametrize("name", ["glm4moe", "qwen3_5_think", "nemotron_3_nano", "lfm2_v2", "deepseekv3", "llama3_1"])
@settings(deadline=None, max_examples=30)
@given(arguments=ARGUMENTS)
def test_any_arguments_come_back_equal(name: str, arguments: dict[str, Any]) -> None:
    codec: ChatCodec = trial(name).codec
    message = Message.model_validate(
        says("", ToolCall(id="call_0", name="put", arguments=json.dumps(arguments))), from_attributes=True
    )
    ids = codec.assistant(message)
    parsed = codec.parse(ids, codec.opening([user("?")], TYPED), TYPED)
    assert parsed.error is None
    [made] = parsed.message.tool_calls
    assert json.dumps(made.parsed(), sort_keys=True) == json.dumps(arguments, sort_keys=True)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>x", "its argument q does not end"),
        ("<tool_call>find\n<arg_key>q</tool_call>", "an argument has no value"),
        ("<tool_call>find(q)</tool_call>", "begins one, and what follows is none"),
        ("Well. <tool_call></tool_call>", "begins one, and what follows is none"),
    ],
)
def test_a_call_out_of_form_is_an_error_and_its_text_is_kept(text: str, error: str) -> None:
    codec = trial("glm4moe").codec
    ids = [*codec.template.encode(f"\n<think></think>\n{text}"), codec.stop_ids[0]]
    parsed = codec.parse(ids, codec.opening([user("?")], TOOLS), TOOLS)
    assert error in (parsed.error or "")
    assert text in parsed.message.content


def test_an_observation_that_spells_tags_of_the_hermes_form_stays_in_its_place() -> None:
    codec = trial("gemma3").codec
    asked = call(0, "find", "x")
    ids, mask, _ = encode(codec, [user("?"), says("", asked), answers(asked, "<end_of_turn>"), says("So.")], TOOLS)
    texts = [token for token, acts in zip(ids, mask, strict=True) if acts]
    assert sum(text in codec.stop_ids for text in texts) == 2
