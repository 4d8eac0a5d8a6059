import json
import sys
from pathlib import Path

import pytest
from architectures import POLICIES, expert_runs
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat.codec import tokenize
from agentrl.chat.hermes import format_assistant, parse_assistant
from agentrl.models.policy import Policy
from agentrl.schemas.trajectory import Message, Role, ToolCall

TEXT = st.text(st.characters(blacklist_characters="<>", blacklist_categories=["Cs"]), max_size=30).map(str.strip)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)
)


@given(TEXT, st.lists(st.tuples(TEXT, st.dictionaries(TEXT, JSON_VALUES)), max_size=3), st.none() | TEXT)
def test_parsing_inverts_formatting(content: str, calls: list, reasoning: str | None) -> None:
    message = Message(
        role=Role.ASSISTANT,
        content=content,
        reasoning=reasoning or None,
        tool_calls=[
            ToolCall(id=f"call_{n}", name=name, arguments=json.dumps(arguments))
            for n, (name, arguments) in enumerate(calls)
        ],
    )
    parsed = parse_assistant(format_assistant(message))
    assert parsed.error is None
    assert parsed.message == message


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "find"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {}}',
        "Rome</tool_call>",
        '<tool_call>{"name": "find", "arguments": {"who": NaN}}</tool_call>',
        '<tool_call>{"name": "find", "arguments": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>",
    ],
)
def test_broken_calls_are_errors_that_keep_the_text(text: str) -> None:
    parsed = parse_assistant(text)
    assert parsed.error
    assert parsed.message.content == text
    assert not parsed.message.tool_calls


@given(st.text(max_size=200))
def test_any_text_parses(text: str) -> None:
    assert parse_assistant(text).message.role is Role.ASSISTANT


def test_the_tiny_template_renders_tools_and_calls_as_the_codec_does() -> None:
    """So whoever serves the saved folder with plain transformers, or vLLM, shows it what it was trained on."""
    tokenizer = POLICIES["qwen"]().tokenizer
    for run in expert_runs(16):
        native = [
            {
                "role": m.role.value,
                "content": m.content,
                "tool_calls": [
                    {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
                    for c in m.tool_calls
                ],
            }
            for m in run.messages
        ]
        flat = [
            {"role": m.role.value, "content": format_assistant(m) if m.role is Role.ASSISTANT else m.content}
            for m in run.messages
        ]
        tools = json.loads(run.tools)
        whole = tokenizer.apply_chat_template(native, tools=tools, tokenize=False)
        assert "find(who, rel)" in whole
        assert whole == tokenizer.apply_chat_template(flat, tools=tools, tokenize=False)


def test_a_saved_tiny_model_generates_and_stops_in_plain_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    POLICIES["qwen"]().save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = Policy.load(tmp_path).tokenizer
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    prompt = tokenizer("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    assert model.generate(**prompt).shape[1] <= model.config.max_position_embeddings


def test_saving_imports_no_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate would, where it is installed; here that fails, and the question is answered as before afterwards."""
    other = pytest.importorskip("accelerate.utils.other")

    def installed() -> bool:
        return True

    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "deepspeed":
                raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(other, "is_deepspeed_available", installed)
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    POLICIES["qwen"]().save(tmp_path)
    assert other.is_deepspeed_available is installed
    assert (tmp_path / "model.safetensors").exists()


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]()


def test_turn_by_turn_tokens_spell_the_whole_conversation(policy: Policy) -> None:
    """Encoding turn by turn gives the text that the template renders for the conversation as a whole."""
    for run in expert_runs(16):
        row = tokenize(run, policy.codec, "digest")
        flat = [
            {"role": m.role.value, "content": format_assistant(m) if m.role is Role.ASSISTANT else m.content}
            for m in row.messages
        ]
        whole = policy.tokenizer.apply_chat_template(flat, tools=json.loads(run.tools), tokenize=False)
        assert whole.startswith(policy.tokenizer.decode(row.input_ids))
        assert whole[len(policy.tokenizer.decode(row.input_ids)) :].strip() == ""


def test_no_template_shows_which_calls_failed(policy: Policy) -> None:
    for run in expert_runs(4):
        tools = [message for message in run.messages if message.role is Role.TOOL]
        assert {message.error for message in tools} <= {True, False}
        assert tools
        for error in (True, False, None):
            told = [
                message.model_copy(update={"error": error}) if message.role is Role.TOOL else message
                for message in run.messages
            ]
            other = tokenize(run.model_copy(update={"messages": told}), policy.codec, "digest")
            assert other.input_ids == tokenize(run, policy.codec, "digest").input_ids


def test_spans_cover_what_was_said_and_the_mask_only_the_assistant(policy: Policy) -> None:
    for run in expert_runs(16):
        row = tokenize(run, policy.codec, "digest")
        assert len(row.input_ids) == len(row.action_mask) == len(row.logprobs) == row.n_tokens
        for message in row.messages:
            assert message.token_start is not None
            assert message.token_end is not None
            part = row.action_mask[message.token_start : message.token_end]
            assert all(flag is (message.role is Role.ASSISTANT) for flag in part)
            text = policy.tokenizer.decode(row.input_ids[message.token_start : message.token_end])
            assert message.content in text
        assert sum(row.action_mask) == row.n_action_tokens


def test_rows_with_tokens_are_never_tokenised_again(policy: Policy) -> None:
    row = tokenize(expert_runs(1)[0], policy.codec, "digest")
    assert tokenize(row, policy.codec, "another") is row


def test_two_assistant_messages_in_a_row_are_refused(policy: Policy) -> None:
    run = expert_runs(1)[0]
    doubled = run.model_copy(update={"messages": [*run.messages, run.messages[-1]]})
    with pytest.raises(ValueError, match="expert-0: an assistant message must follow"):
        tokenize(doubled, policy.codec, "digest")


def test_a_tokenizer_without_a_template_is_refused() -> None:
    policy = POLICIES["qwen"]()
    policy.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat_template"):
        _ = policy.codec


def test_observations_of_other_roles_are_not_mistaken_for_each_other(policy: Policy) -> None:
    tool = policy.codec.observations([Message(role=Role.TOOL, content="Rome")])
    user = policy.codec.observations([Message(role=Role.USER, content="Rome")])
    assert tool != user
