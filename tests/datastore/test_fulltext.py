"""Words in messages, calls and answers of tools: what is found, in SQL and rules too, and how the index is kept up."""

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_rows import FP, build
from typer.testing import CliRunner

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.read.matches import as_tables
from agentrl.datastore.search import text_index, words
from agentrl.datastore.search.excerpts import row_texts
from agentrl.datastore.upkeep import compact, forget
from agentrl.flows.cli import app
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Message, ToolCall, Trajectory

pytest.importorskip("tantivy")
HERE = Path(__file__).parent


def said(number: int, content: str, **fields: object) -> Trajectory:
    """A row of which the last answer is ``content``."""
    plain = build(number)
    messages = [*plain.messages[:-1], plain.messages[-1].model_copy(update={"content": content})]
    return build(number, messages=messages, **fields)


SAYINGS = [
    "The refund of order 4411 is under way.",
    "A gift card cannot get a refund; the refund policy says refund.",
    "Your café is in user_id a@b.org, see README.md",
    "東京に行きたい",
    "nothing of the kind",
]


@pytest.fixture
def buffer(tmp_path: Path) -> TrajectoryBuffer:
    made = TrajectoryBuffer(tmp_path / "store")
    made.append([said(number, text) for number, text in enumerate(SAYINGS)], stage="rollout", fingerprint=FP)
    return made


def numbers(ids: pl.Series) -> list[int]:
    return sorted(int(row_id[-6:]) for row_id in ids)


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ("refund", [0, 1]),
        ("REFUND order", [0]),
        ('refund -"gift card"', [0]),
        ('"card gift"', []),
        ('"policy says"', [1]),
        ("cafe", [2]),
        ("Café", [2]),
        ("user_id", [2]),
        ("id_user", []),
        ("a@b.org", [2]),
        ("東京", [3]),
        ("京東", []),
        ("4411", [0]),
        ("find", [0, 1, 2, 3, 4]),  # the name of the tool
        ("who Ann rel", [0, 1, 2, 3, 4]),  # its arguments
        ('"look it up"', [0, 1, 2, 3, 4]),  # reasoning
        ('"Bob 3"', [3]),  # the answer of the tool
        ('"up find"', []),  # a phrase ends where a text ends
        ("refun", []),
    ],
)
def test_words_are_found_in_all_that_is_said_and_called(buffer: TrajectoryBuffer, asked: str, rows: list[int]) -> None:
    assert numbers(buffer.text.ids(asked)) == rows


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("", "names no word that must be there"),
        ("... !", "names no word that must be there"),
        ("-refund", "not matches(messages, 'word')"),
        ('a "phrase', "lacks its closing"),
        ('refund -"!"', "holds no letter or digit"),
        ("x" * 200, "more, and no such word is found"),
        ("word " * 300, "at most 1,000 characters"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_is_allowed(
    buffer: TrajectoryBuffer, asked: str, reason: str
) -> None:
    with pytest.raises(StoreError) as refused:
        buffer.text.ids(asked)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.text(max_size=60))
def test_any_text_is_a_question_or_is_refused_in_one_line(text: str) -> None:
    try:
        asked = words.parsed(text)
    except StoreError as error:
        reason = str(error)
    else:
        reason = "" if all(any(map(str.isalnum, part)) for part in (*asked.wanted, *asked.unwanted)) else "no word"
    assert not reason or "allowed are words" in reason


def test_the_best_row_comes_first_with_the_message_and_an_excerpt(buffer: TrajectoryBuffer) -> None:
    hits = buffer.search("refund", method="text")
    assert numbers(hits["trajectory_id"].head(1)) == [1]
    assert hits["score"].is_sorted(descending=True)
    assert hits.row(0, named=True)["excerpt"] == (
        "A gift card cannot get a **refund**; the **refund** policy says **refund**."
    )
    assert hits["message"].to_list() == [3, 3]
    [call] = buffer.search('"who Ann"', 1, method="text", where="reward = 1").to_dicts()
    assert (call["message"], call["role"]) == (1, "assistant")
    assert call["excerpt"].startswith('{"**who": "Ann**"')
    assert buffer.search("who", 9, method="text", where=pl.col("success"), per_task=1).height == 1
    assert buffer.search("nowhere", method="text").height == 0
    long = "tail " * 100 + "needle " + "hay " * 100
    buffer.append([said(9, long)], stage="rollout", fingerprint="b" * 16)
    [hit] = buffer.search("needle", method="text").to_dicts()
    assert re.fullmatch(r"….*\*\*needle\*\*.*…", hit["excerpt"])


def test_escapes_in_arguments_hide_no_word() -> None:
    arguments = json.dumps({"note": "line one\nnext line", "who": ["Zoë", 7]})
    calls = [ToolCall(id=str(number), name="write", arguments=text) for number, text in enumerate([arguments, "{}"])]
    message = Message(role="assistant", content="done", tool_calls=calls).model_dump(mode="json")
    cut = {**message, "tool_calls": [{"id": "c", "name": "write", "arguments": '{"a": "b\\n'}]}
    column = pa.array([[], [message], [message, cut]], TRAJECTORY_SCHEMA.field("messages").type)
    item = ["done", "write", "note\nline one\nnext line\nwho\nZoë\n7", "write", "{}"]
    assert list(row_texts(column)) == [[], item, [*item, "done", "write", '{"a": "b\\n']]
    assert list(row_texts(column[1:])) == [item, [*item, "done", "write", '{"a": "b\\n']]


def test_sql_takes_matches_wherever_a_condition_may_stand(buffer: TrajectoryBuffer) -> None:
    def of(query: str) -> list[int]:
        return numbers(buffer.sql(query)["trajectory_id"])

    asked = "select trajectory_id from trajectories where "
    assert of(asked + "matches(messages, 'refund')") == [0, 1]
    assert of(asked + "success and matches(messages, 'refund')") == [1]
    assert of(asked + "not matches(messages, 'refund') or MATCHES ( messages , 'gift' )") == [1, 2, 3, 4]
    assert of("select t.trajectory_id from trajectories t where matches(t.messages, '\"gift card\"')") == [1]
    assert of("select trajectory_id from tool_calls where matches(messages, 'gift')") == [1]
    assert of(asked + "prompt = 'matches(messages, ''gift'')'") == []
    counted = buffer.sql("select matches(messages, 'refund') as hit, count(*) as n from trajectories group by hit")
    assert dict(counted.iter_rows()) == {True: 2, False: 3}
    for wrong in ("matches(content, 'x')", "matches(messages)", 'matches(messages, "x")', "matches(messages, 'x', 1)"):
        with pytest.raises(StoreError, match="matches takes the column messages and one text"):
            of(asked + wrong)
    with pytest.raises(StoreError, match="lacks its closing"):
        of(asked + "matches(messages, '\"x')")


def test_a_query_that_asks_for_no_words_stays_as_it_is() -> None:
    query = """select "matches(messages, 'x')", 'it''s matches(messages, ''x'')' from t where smatches(messages, 'x')"""
    assert as_tables(query, None) == (query, {})


def test_rules_and_filters_take_matches(buffer: TrajectoryBuffer) -> None:
    rules = Rules.model_validate({"rules": [{"rule": "filter", "where": "success and matches(messages, 'refund')"}]})
    kept = curate(buffer, rules.rules)
    assert numbers(pl.Series(kept.ids.to_pylist())) == [1]
    with pytest.raises(ValueError, match="lacks its closing"):
        Rules.model_validate({"rules": [{"rule": "filter", "where": "matches(messages, '\"x')"}]})
    with pytest.raises(ValueError, match="has no messages"):
        Rules.model_validate({"rules": [{"rule": "group", "where": "matches(messages, 'x')"}]})


def test_the_command_finds_words_and_selections_hold_them(buffer: TrajectoryBuffer) -> None:
    def call(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["buffer", *arguments, "--store", buffer.store])
        return done.exit_code, done.output + str(done.exception)

    code, said_by = call("search", "--text", 'refund -"gift card"')
    assert code == 0
    assert "The **refund** of order" in said_by
    assert "no row holds 'nowhere'" in call("search", "--text", "nowhere")[1]
    code, said_by = call("search", "--text", '"x')
    assert code != 0
    assert "lacks its closing" in said_by
    code, said_by = call("search", "--text", "x", "--diverse", "1")
    assert code != 0
    assert "--text finds words as they are" in said_by
    where = ["--where", "matches(messages, 'refund')"]
    assert "2 rows of version" in call("select", "refunds", *where)[1]
    assert call("export", str(Path(buffer.store).parent / "out.jsonl"), "--format", "sharegpt", *where)[0] == 0
    state = json.loads(call("index", "--text", "--json")[1].removesuffix("None"))
    assert {**state[0], "bytes": 0} == {"rows": 5, "files": 1, "read": 0, "bytes": 0}


# upkeep


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data files that are read for the index."""
    files: list[str] = []
    plain: Callable[..., object] = text_index.TextIndex._add

    def add(self: object, writer: object, bits: object, number: int, name: str) -> object:
        files.append(name)
        return plain(self, writer, bits, number, name)

    monkeypatch.setattr(text_index.TextIndex, "_add", add)
    return files


def test_only_new_files_are_read_and_those_that_left_go(store: str, read: list[str]) -> None:
    buffer = TrajectoryBuffer(store)
    for shard in range(3):
        buffer.append([said(shard, f"word{shard} shared")], stage="s", fingerprint=FP, shard=shard)
        assert numbers(buffer.text.ids("shared")) == list(range(shard + 1))
        assert len(read) == shard + 1
    assert numbers(TrajectoryBuffer(store).text.ids("word1")) == [1]
    assert len(read) == 3
    before = buffer.version
    compact(buffer)
    assert numbers(buffer.text.ids("shared")) == [0, 1, 2]
    assert len(read) == 4
    held = buffer.text.index.on_disk()
    assert held is not None
    assert len(held.files) == 1
    assert numbers(buffer.text.ids("shared", before)) == [0, 1, 2]  # the files of an old version are read again
    hits = buffer.search("shared", 3, method="text")
    assert numbers(hits["trajectory_id"]) == [0, 1, 2]


def test_rows_that_were_forgotten_are_found_no_more(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    for shard in range(2):
        run = f"import-{str(shard) * 16}"
        buffer.append([said(shard, "shared")], stage="s", fingerprint=str(shard) * 32, run_id=run)
    assert numbers(buffer.text.ids("shared")) == [0, 1]
    forget(buffer, "0" * 16)
    assert numbers(buffer.text.ids("shared")) == [1]


@pytest.mark.parametrize("damage", ["torn meta", "no meta", "torn postings", "lost files", "another form"])
def test_a_damaged_index_is_built_anew(buffer: TrajectoryBuffer, damage: str, read: list[str]) -> None:
    folder = buffer.text.index.folder
    assert numbers(buffer.text.ids("refund")) == [0, 1]
    if damage == "torn meta":
        (folder / "meta.json").write_text('{"segments": [')
    elif damage == "no meta":
        (folder / "meta.json").unlink()
    elif damage == "another form":
        folder.rename(folder.with_name("text-0"))
    else:
        for path in list(folder.glob("*.idx" if damage == "torn postings" else "*.term")):
            path.unlink()
            if damage == "torn postings":  # another file: a thread of tantivy may still read the one that it mapped
                path.write_bytes(b"")
    assert numbers(TrajectoryBuffer(buffer.store).text.ids("refund")) == [0, 1]
    assert len(read) == 2
    assert [path.name for path in folder.parent.glob("text-*/")] == [folder.name]


def test_a_lock_that_another_reader_takes_as_the_folder_goes_is_no_fault(
    buffer: TrajectoryBuffer, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.text.refresh()
    lock, remove = buffer.text.index.folder / ".tantivy-meta.lock", text_index.shutil.rmtree

    def removing(path: Path, ignore_errors: bool = False) -> None:
        remove(path, ignore_errors=ignore_errors)
        path.mkdir()
        lock.touch()

    monkeypatch.setattr(text_index.shutil, "rmtree", removing)
    (buffer.text.index.folder / "meta.json").unlink()
    assert numbers(TrajectoryBuffer(buffer.store).text.ids("refund")) == [0, 1]
    assert len(read) == 2


def test_an_interrupted_refresh_goes_on_where_it_committed(
    buffer: TrajectoryBuffer, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.text.refresh()
    for shard in range(1, 4):
        rows = [said(shard * 10 + row, "refund") for row in range(3)]
        buffer.append(rows, stage="rollout", fingerprint=FP, shard=shard)
    files, plain = [0], text_index.row_texts

    def stopping(messages: pa.ChunkedArray) -> Iterator[list[str]]:
        files[0] += 1
        for number, texts in enumerate(plain(messages)):
            if files[0] == 3 and number == 2:  # in the middle of the last file
                raise KeyboardInterrupt
            yield texts

    monkeypatch.setattr(text_index, "row_texts", stopping)
    monkeypatch.setattr(text_index, "COMMIT_ROWS", 1)
    with pytest.raises(KeyboardInterrupt):
        buffer.text.refresh()
    assert buffer.text.lacking() == 3
    assert len(buffer.text.ids("refund")) == 2 + 9
    assert len(read) == 1 + 3 + 1


READER = """
import sys
from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.search import text_index
text_index.COMMIT_ROWS = 1
print(TrajectoryBuffer(sys.argv[1]).text.refresh(progress=lambda done, total: print(done, flush=True)))
"""


@pytest.mark.slow
def test_a_killed_refresh_loses_nothing_and_two_at_once_agree(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    for shard in range(12):
        rows = [said(shard * 40 + row, f"shard{shard} shared") for row in range(40)]
        buffer.append(rows, stage="s", fingerprint=FP, shard=shard)
    command = [sys.executable, "-c", READER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        while int(killed.stdout.readline()) < 200:
            pass
        killed.kill()
    started = time.monotonic()
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [process.communicate(timeout=120)[0].splitlines()[-1] for process in both]
    assert all(end.startswith("TextState(rows=480, files=12") for end in ends), ends
    assert time.monotonic() - started < 100
    assert len(buffer.text.ids("shared")) == 480
    assert buffer.text.lacking() == 0
    assert [len(buffer.text.ids(f"shard{shard}")) for shard in range(12)] == [40] * 12


@pytest.mark.slow
def test_kills_while_an_index_is_built_lose_what_was_not_committed_alone(tmp_path: Path) -> None:
    """Real kills, a random time after a process has read one more file; what was committed is never read again."""
    buffer, chance = TrajectoryBuffer(tmp_path), random.Random(0)
    for shard in range(20):
        rows = [said(shard * 40 + row, f"shard{shard} shared") for row in range(40)]
        buffer.append(rows, stage="s", fingerprint=FP, shard=shard)
    lacking, kills = buffer.text.lacking(), 0
    while lacking:
        with subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(chance.randint(1, 4)):
                process.stdout.readline()
            time.sleep(chance.uniform(0, 0.02))
            process.kill()
        kills += 1
        before, lacking = lacking, TrajectoryBuffer(tmp_path).text.lacking()
        assert lacking <= before
        assert lacking % 40 == 0, "whole files"
    assert kills > 4
    assert len(buffer.text.ids("shared")) == 800
    assert [len(buffer.text.ids(f"shard{shard}")) for shard in range(20)] == [40] * 20


@pytest.mark.parametrize("version", range(5))
def test_tables_of_older_schemas_are_searched(version: int, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(HERE / f"old_store_version_{version}", tmp_path / "store")
    buffer = TrajectoryBuffer(tmp_path / "store")
    rows = buffer.scan().select("trajectory_id", "messages").collect()
    first = rows["messages"][0][0]["content"]
    word = next(part for part in first.replace("?", " ").split() if part.isalpha())
    assert rows["trajectory_id"][0] in buffer.text.ids(word).to_list()


@pytest.mark.parametrize("share", [0, 1, 3, 5, 6])
def test_a_word_of_few_or_of_most_rows_is_found_in_each_version(tmp_path: Path, share: int) -> None:
    """If most rows match, tantivy is asked for the others."""
    made = TrajectoryBuffer(tmp_path / "store")
    for shard in range(3):
        rows = [
            said(number, "zebra" if number % 6 < share else "horse") for number in range(shard * 10, shard * 10 + 10)
        ]
        made.append(rows, stage="rollout", fingerprint=FP, shard=shard)
    for version, count in ((1, 10), (3, 30)):
        expected = [number for number in range(count) if number % 6 < share]
        assert numbers(made.text.ids("zebra", version)) == expected
        assert numbers(made.text.ids("zebra bob", version)) == expected
