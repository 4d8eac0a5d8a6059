"""Secrets are found by kind, and placeholders stand for them in texts, in JSON and in token ids."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_tokenizers import MADE
from tokenizers import AddedToken, Tokenizer

from agentrl.datastore.artifacts.tokenizers import keep
from agentrl.datastore.errors import StoreError
from agentrl.datastore.redaction.detect import Detectors
from agentrl.datastore.redaction.patterns import PLACEHOLDER
from agentrl.datastore.redaction.placeholders import Placeholders
from agentrl.datastore.redaction.rows import REDACTED, RowRedaction
from agentrl.datastore.redaction.settings import EVERYTHING, Redaction
from agentrl.datastore.redaction.texts import RowSecrets
from agentrl.datastore.redaction.tokens import Vocabulary, changes, positions, runs
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table.validation import conform, validate
from agentrl.schemas.arrow import to_table
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Message, Span, ToolCall, Trajectory
from benchmarks.planted_secrets import tokenizer, with_tokens

DETECT = Detectors(EVERYTHING)
SECRETS = {
    "AKIAQ3EGRTYUIOPASDFG": "AWS_KEY",
    "ghp_" + "a1B2" * 9: "GITHUB_TOKEN",
    "jane.roe@northwind.io": "EMAIL",
    "+49 30 90182055": "PHONE",
    "sk-ant-api03-" + "x9Y8" * 10: "ANTHROPIC_KEY",
}


def detected(text: str) -> list[tuple[str, str]]:
    return [(hit.kind, text[hit.start : hit.end]) for hit in DETECT(text)]


@pytest.mark.parametrize(
    ("text", "kind", "secret"),
    [
        ("PGPASSWORD=tulip%77q psql", "PASSWORD", "tulip%77q"),
        ('{"db": {"password": "aB3$x(9)z"}}', "PASSWORD", "aB3$x(9)z"),
        ("the passphrase is rocket!88.", "PASSWORD", "rocket!88"),
        ("postgres://app:q1w2e3r4@db:5432/x", "PASSWORD", "q1w2e3r4"),
        ("root:$6$saltsalt$" + "Ab1/" * 16 + ":19000:", "PASSWORD_HASH", "$6$saltsalt$" + "Ab1/" * 16),
        ("-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\ncut off", "PRIVATE_KEY", None),
        ("log in with pw: Sommer2024!", "PASSWORD", "Sommer2024!"),
        ("my number is 07911 123456", "PHONE", "07911 123456"),
        ("call (415) 555-2671 now", "PHONE", "(415) 555-2671"),
        ("from 10.20.31.44 port 22", "HOST", "10.20.31.44"),
        ("at 2001:db8:85a3::8a2e:370:7334 now", "HOST", "2001:db8:85a3::8a2e:370:7334"),
        ("ping db-03.prod.internal", "HOST", "db-03.prod.internal"),
        ("mpetrov@gpu-7:~/run$ ls", "USER", "mpetrov"),
        ("C:\\Users\\mpetrov\\x", "USER", "mpetrov"),
        ("Author: Marta Petrov <x@y.org>", "NAME", "Marta Petrov"),
        ("call +49 30 90182055 0000", "PHONE", "+49 30 90182055"),
    ],
)
def test_a_secret_is_found_by_its_kind(text: str, kind: str, secret: str | None) -> None:
    kinds = dict(detected(text))
    assert kind in kinds
    assert secret is None or kinds[kind] == secret


@pytest.mark.parametrize(
    "text",
    [
        "password = getpass.getpass('Password: ')",
        "if password != confirm_password: raise ValueError('wrong password')",
        "token = tokenizer.next_token(ids[0]); max_tokens=4096; pad_token='<pad>'",
        "api_key=os.environ['KEY']; DATABASE_URL=postgres://user:password@localhost/db",
        "sha256:" + "0123456789abcdef" * 4 + " commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "2026-01-15 10:30:22 version 10.20.30.40 from 127.0.0.1 order 4155552671",
        "git@github.com:acme/tool.git image@2x.png react@18.2.0 /home/user/x uid=0(root)",
        "<EMAIL_1> wrote to password=<PASSWORD_2> at /home/<USER_1>/x",
    ],
)
def test_what_is_only_like_a_secret_is_none(text: str) -> None:
    assert detected(text) == []


@given(st.text(max_size=60), st.sampled_from(sorted(SECRETS)), st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_a_second_redaction_finds_nothing(before: str, secret: str, after: str) -> None:
    text = f"{before} {secret} {after}"
    once = RowSecrets(DETECT, Placeholders()).text(text)
    assert secret not in once
    assert PLACEHOLDER.search(once)
    assert RowSecrets(DETECT, Placeholders()).text(once) == once


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12) | st.sampled_from(sorted(SECRETS)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.booleans())
@settings(max_examples=80, deadline=None)
def test_json_stays_json_and_keeps_all_but_the_secrets(value: object, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=1)
    clean = RowSecrets(DETECT, Placeholders()).json(text)
    after = json.loads(clean)
    assert not any(secret in json.dumps(after, ensure_ascii=False) for secret in SECRETS)
    if not detected(json.dumps(value, ensure_ascii=False)) and not any(s in text for s in SECRETS):
        assert json.dumps(after) == json.dumps(value) or PLACEHOLDER.search(clean)


def test_names_of_json_say_what_a_value_is() -> None:
    secrets = RowSecrets(DETECT, Placeholders())
    text = '{"phone": 14155552671, "login": "mpetrov", "password": "a\\"b!9zz", "host": "db-3", "n": 14155552672}'
    clean = json.loads(secrets.json(text))
    assert clean == {
        "phone": "<PHONE_1>",
        "login": "<USER_1>",
        "password": "<PASSWORD_1>",
        "host": "<HOST_1>",
        "n": 14155552672,
    }


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@given(before=st.text("find the boss café 東京🦊 ", max_size=20), after=st.text("the boss é東🦊", max_size=20))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_give_way_to_those_of_a_placeholder(name: str, before: str, after: str) -> None:
    made = MADE[name]
    vocabulary = Vocabulary(name, made.to_str())
    ids = made.encode(f"{before}SECRET{after}", add_special_tokens=False).ids
    text, _ = vocabulary.text(ids)
    replaced = (text.index("SECRET"), text.index("SECRET") + 6, "<A_1>")
    [change] = changes(vocabulary, ids, [replaced])
    new = [*ids[: change.start], *change.ids, *ids[change.end :]]
    assert vocabulary.text(new)[0].replace(" ", "") == text.replace("SECRET", "<A_1>").replace(" ", "")
    assert new[: change.start] == ids[: change.start]
    moved = positions(len(ids), [change])
    assert moved[-1] == len(new)
    assert list(moved) == sorted(moved)


def test_control_tokens_bound_the_runs_of_text() -> None:
    made = MADE["byte_level"]
    vocabulary = Vocabulary("byte_level", made.to_str())
    end = made.token_to_id("<|im_end|>")
    assert runs(vocabulary, [5, 6, end, 7, end, end]) == [(0, 2), (3, 4)]
    assert runs(vocabulary, []) == []


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path)
    keep(storage, "chatml-4000", tokenizer().to_str)
    return storage


def conversation(secret: str) -> Trajectory:
    arguments = json.dumps({"command": f"echo {secret}", "note": "é\n"})
    call = ToolCall(id="c", name="bash", arguments=arguments)
    messages = [
        Message(role="user", content="say it"),
        Message(role="assistant", reasoning=f"It is {secret}.", tool_calls=[call]),
        Message(role="tool", content=f"{secret}\nok", tool_call_id="c", name="bash"),
        Message(role="assistant", content="done, nothing else"),
    ]
    row = with_tokens(0, "say it", messages)
    spans = [
        Span(version=0, start=0, end=row.messages[1].token_end),
        Span(version=1, start=row.messages[3].token_start, end=row.n_tokens),
    ]
    return row.model_copy(update={"spans": spans})


@pytest.mark.parametrize("secret", sorted(SECRETS))
def test_a_row_keeps_the_contract_and_all_else(storage: LocalStorage, secret: str) -> None:
    row = conversation(secret)
    cleaned = RowRedaction(storage).clean(row)
    after = cleaned.row
    assert validate(conform(to_table([after], TRAJECTORY_SCHEMA))) == []
    placeholder = f"<{SECRETS[secret]}_1>"
    assert secret not in after.model_dump_json() + tokenizer().decode(after.input_ids, skip_special_tokens=False)
    assert json.loads(after.messages[1].tool_calls[0].arguments) == {"command": f"echo {placeholder}", "note": "é\n"}
    assert cleaned.counts == {SECRETS[secret]: 3}
    assert after.tags == [REDACTED]
    after_texts = [tokenizer().decode(after.input_ids[m.token_start : m.token_end]) for m in after.messages]
    before = [tokenizer().decode(row.input_ids[m.token_start : m.token_end]) for m in row.messages]
    assert after_texts == [text.replace(secret, placeholder) for text in before]
    hidden = sum(row.action_mask) - sum(after.action_mask)
    assert 0 < hidden < sum(row.action_mask)
    assert all(math.isnan(p) != sampled for p, sampled in zip(after.logprobs, after.action_mask, strict=True))
    last = after.messages[3]
    assert all(after.action_mask[last.token_start : last.token_end]), "what was not replaced is sampled still"
    assert RowRedaction(storage).clean(after).row == after


def test_an_indented_key_is_found_in_tokens_of_indents(tmp_path: Path) -> None:
    """A tokenizer may have tokens for indents that were added and are no control tokens."""
    indents = Tokenizer.from_str(tokenizer().to_str())
    indents.add_tokens([AddedToken("    ", normalized=False)])
    keep(storage := LocalStorage(tmp_path), "indents", indents.to_str)
    lines = ["x9Y8" * 16, "b7C6" * 16]
    key = "".join(f"    {line}\n" for line in ["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----"])
    ids = indents.encode(f"key: |\n{key}", add_special_tokens=False).ids
    assert indents.token_to_id("    ") in ids
    row = with_ids([Message(role="user", content=f"key: |\n{key}")], ids, "indents")
    after = RowRedaction(storage).clean(row).row
    assert not any(line in indents.decode(after.input_ids) for line in lines)


def with_ids(messages: list[Message], ids: list[int], tokenizer: str = "chatml-4000") -> Trajectory:
    """A row of these messages, and of token ids that belong to none of them."""
    row = conversation("nothing")
    update = {"messages": messages, "input_ids": ids, "tokenizer": tokenizer, "n_tokens": len(ids), "spans": []}
    return row.model_copy(
        update={**update, "action_mask": [False] * len(ids), "logprobs": [math.nan] * len(ids), "n_action_tokens": 0}
    )


def encoded(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", ["alice", "bob"])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"db_username": "NAME", "q": "NAMEs"}}',
        "<function=f>\n<parameter=db_username>\nNAME\n</parameter><parameter=q>NAMEs</parameter>",
    ],
)
def test_a_user_whose_name_is_a_word_gives_way_in_the_tokens_of_the_message(
    storage: LocalStorage, name: str, text: str
) -> None:
    arguments = json.dumps({"db_username": name, "q": f"{name}s"})
    call = Message(role="assistant", tool_calls=[ToolCall(id="c", name="f", arguments=arguments)])
    asked, called = encoded(f"ask {name}, please"), encoded(text.replace("NAME", name))
    placed = call.model_copy(update={"token_start": len(asked), "token_end": len(asked) + len(called)})
    after = RowRedaction(storage).clean(with_ids([placed], [*asked, *called])).row
    assert json.loads(after.messages[0].tool_calls[0].arguments) == {"db_username": "<USER_1>", "q": f"{name}s"}
    expected = text.replace("NAMEs", f"{name}s").replace("NAME", "<USER_1>")
    assert tokenizer().decode(after.input_ids) == f"ask {name}, please{expected}"
    everywhere = RowRedaction(storage).clean(with_ids([call], [*asked, *called])).row
    assert name not in tokenizer().decode(everywhere.input_ids).replace(f"{name}s", "")


def test_names_and_ids_of_messages_are_cleaned_alike(storage: LocalStorage) -> None:
    key = "sk-ant-api03-" + "x9Y8" * 10
    messages = [
        Message(role="user", content="hi", name="jane.roe@northwind.io"),
        Message(role="assistant", tool_calls=[ToolCall(id=key, name="f", arguments="{}")]),
        Message(role="tool", content="ok", tool_call_id=key, name="f"),
    ]
    user, call, answer = RowRedaction(storage).clean(with_ids(messages, [])).row.messages
    assert user.name == "<EMAIL_1>"
    assert call.tool_calls[0].id == answer.tool_call_id == "<ANTHROPIC_KEY_1>"
    assert answer.name == "f"


def test_tokens_that_would_be_dropped_are_searched_or_counted(storage: LocalStorage) -> None:
    """What refuses rows with secrets asks for no tokens, and must see what stands in them alone."""
    row = with_ids([Message(role="user", content="hi")], encoded("hi jane.roe@northwind.io"))
    searched = RowRedaction(storage, on_tokens="drop").clean(row)
    assert (searched.changed, searched.counts, searched.row.input_ids) == (True, {"EMAIL": 1}, [])
    unread = RowRedaction(storage, on_tokens="drop").clean(row.model_copy(update={"tokenizer": "other"}))
    assert (unread.changed, unread.unread) == (False, True)
    assert not RowRedaction(storage, on_tokens="drop").clean(with_ids(row.messages, encoded("hi"))).unread


def test_a_row_without_secrets_is_the_same_row(storage: LocalStorage) -> None:
    row = conversation("nothing")
    assert RowRedaction(storage).clean(row).row is row


def test_tokens_of_an_unknown_tokenizer_are_refused_or_dropped(storage: LocalStorage) -> None:
    row = conversation("jane.roe@northwind.io").model_copy(update={"tokenizer": "other"})
    with pytest.raises(StoreError, match=r"tokenizer other.*does not keep.*agentrl buffer tokenizer") as raised:
        RowRedaction(storage).clean(row)
    assert "northwind" not in str(raised.value)
    after = RowRedaction(storage, on_tokens="drop").clean(row).row
    assert (after.input_ids, after.n_action_tokens, after.messages[1].token_start) == ([], 0, None)


def test_patterns_of_ones_own_and_what_is_kept() -> None:
    own = Redaction(patterns={"EMPLOYEE_ID": r"E-[0-9]{6}"}, keep=[r".*@public\.org"], detect=["mail"])
    text = RowSecrets(Detectors(own), Placeholders()).text("E-123456 a@public.org b@acme.com 10.20.30.44")
    assert text == "<EMPLOYEE_ID_1> a@public.org <EMAIL_1> 10.20.30.44"
    for wrong in ({"patterns": {"X": "("}}, {"patterns": {"X": "a*"}}, {"patterns": {"x": "a"}}, {"detect": ["mails"]}):
        with pytest.raises(ValidationError):
            Redaction.model_validate(wrong)
    with pytest.raises(StoreError, match="regions: 'UK'"):
        Detectors(Redaction(regions=["UK"]))


@pytest.mark.parametrize(
    "text", ["A" * 20_000, "a1" * 10_000, "=" * 20_000, "a@" * 5_000, ":" * 9_000, "x." * 9_000, "1 " * 9_000]
)
def test_no_text_takes_long(text: str) -> None:
    import time

    started = time.process_time()
    DETECT(text + " PRIVATE KEY----- password token host @ :// aws")
    assert time.process_time() - started < 2
