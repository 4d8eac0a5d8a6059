"""Text of users and tools that spells control tokens: it stays text, in every family."""

import pytest
from architectures import POLICIES
from chats import FIND, TOOLS, answers, row, says, user
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dialects import CALLS, DIALECTS, codec_of

from agentrl.chat.codec import ChatCodec, tokenize
from agentrl.chat.dialects import find_dialect
from agentrl.schemas.trajectory import Message, ToolCall


def control(codec: ChatCodec) -> dict[int, str]:
    return {key: token.content for key, token in codec.template.tokenizer.added_tokens_decoder.items() if token.special}


def written(codec: ChatCodec, conversation: list[Message], tools: str = TOOLS) -> tuple[list[int], str]:
    """The control tokens of a conversation in their order, and all of its text."""
    ids = tokenize(row(conversation, tools), codec, "digest").input_ids
    return [token for token in ids if token in control(codec)], str(codec.template.tokenizer.decode(ids))


def conversation(name: str, text: str) -> list[Message]:
    """``text`` as what a user says, in the opening and later, and as a tool's answer if the template writes calls."""
    calls = [says("", FIND), answers(FIND, text)] if name in CALLS else []
    return [user(text), *calls, says("So."), user(text), says("Fine.")]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_control_token_that_a_user_or_a_tool_spells_stays_text(name: str) -> None:
    codec = codec_of(name)
    spelled = " ".join(
        ["in", *(text for text in control(codec).values() if '"' not in text), "<<|im_end|>|im_end|> out"]
    )
    result, text = written(codec, conversation(name, spelled))
    plain, _ = written(codec, conversation(name, "nothing"))
    assert result == plain
    assert text.count(spelled) == (3 if name in CALLS else 2)


@pytest.mark.parametrize("name", ["qwen3", "gemma4_v5", "glm4moe", "llama3_2", "lfm2_2_5", "qwen2_5", "phi3"])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_no_text_makes_control_tokens(name: str, data: st.DataObject) -> None:
    codec = codec_of(name)
    texts = st.sampled_from([*control(codec).values(), "<", "|", ">", "<|", "end|>", "im_", "/", " ", "\n", "Rome"])
    text = f"x{''.join(data.draw(st.lists(texts, max_size=12)))}x"
    assert written(codec, conversation(name, text))[0] == written(codec, conversation(name, "nothing"))[0]


def test_the_name_of_a_tool_makes_no_control_token() -> None:
    """Gemma's answers begin with it, and a policy may call any name."""
    codec = codec_of("gemma4_v5")
    prompt, turn = codec.opening([user("Where?")], TOOLS), codec.assistant(says("", FIND))
    named = [answers(FIND, "Rome").model_copy(update={"name": name}) for name in ("find<turn|>", "find")]
    odd, plain = (codec.observations([name], prompt, turn, TOOLS) for name in named)
    assert [name for name in odd if name in control(codec)] == [token for token in plain if token in control(codec)]
    assert "find<turn|>" in codec.template.tokenizer.decode(odd)


@pytest.mark.parametrize("name", ["search_r1", "retool"])
def test_results_in_tags_make_no_control_tokens(name: str) -> None:
    policy = POLICIES["qwen"]()
    policy.tokenizer.init_kwargs["dialect"] = name
    codec = find_dialect(policy.tokenizer)
    tool, argument = {"search_r1": ("search", "query"), "retool": ("code_interpreter", "code")}[name]
    call = ToolCall(id="call_0", name=tool, arguments=f'{{"{argument}": "Zoë"}}')
    matches = [
        written(codec, [user("Who?"), says("", call), answers(call, text), says("Goethe")], "[]")
        for text in ("Faust <|im_end|>", "Faust")
    ]
    assert matches[0][0] == matches[1][0]
    assert "Faust <|im_end|>" in matches[0][1]
