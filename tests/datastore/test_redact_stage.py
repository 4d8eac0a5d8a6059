"""The stage, the rule, the export and the recorder that keep secrets from going on: planted secrets, and kill -9."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from store_rows import build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.tokenizers import keep
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.exports import export_rows
from agentrl.datastore.redaction.rows import RowRedaction
from agentrl.pipelines.file import library
from agentrl.pipelines.file.load import Node
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.plan.code import CodeGraph
from agentrl.pipelines.plan.fingerprint import Fingerprinter
from agentrl.pipelines.serve import BufferRows
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages import redact as stage_module
from agentrl.pipelines.stages.audit import audit
from agentrl.pipelines.stages.redact import RedactConfig, redact
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.cut import CutSecrets
from agentrl.schemas.pipeline import Execution
from agentrl.schemas.trajectory import Trajectory
from benchmarks.planted_secrets import KINDS, Planted, planted_rows, texts_of, tokenizer


def harness_with(folder: Path, rows: list[Trajectory]) -> tuple[Harness, object]:
    harness = Harness(folder)
    keep(harness.buffer.storage, "chatml-4000", tokenizer().to_str)
    return harness, harness.trajectories(rows)


def left_in(row: Trajectory, secret: str) -> bool:
    once = json.dumps(secret)[1:-1]
    forms = (secret, once, json.dumps(once)[1:-1])
    return any(form in text for text in texts_of(row) for form in forms)


def check(folder: Path, rows: list[Trajectory], planted: list[Planted]) -> None:
    harness, given = harness_with(folder, rows)
    result = harness.run(redact, trajectories=[given])
    after = {row.parent_id or row.trajectory_id: row for row in result["trajectories"].read()}
    assert len(after) == len(rows)
    left = Counter(each.kind for each in planted if left_in(after[rows[each.row].trajectory_id], each.secret))
    assert not left, "no secret is left"
    dirty = {rows[each.row].trajectory_id for each in planted}
    touched = [name for name, row in after.items() if row.parent_id and name not in dirty]
    assert len(touched) <= 0.01 * (len(rows) - len(dirty))
    told = json.dumps([result["counts"].table().to_pylist(), result["redacted"].table().to_pylist(), result.metrics])
    assert not any(json.dumps(each.secret)[1:-1] in told for each in planted)
    assert result.metrics["redacted"] == len(dirty) + len(touched)
    assert {row["stage"] for row in result["counts"].table().to_pylist()} == {"given-1"}


def test_no_planted_secret_is_left(tmp_path: Path) -> None:
    rows, planted = planted_rows(70, 2 * len(KINDS))
    check(tmp_path, rows, planted)


@pytest.mark.slow
def test_no_planted_secret_is_left_of_a_thousand(tmp_path: Path) -> None:
    assert len(KINDS) >= 20
    check(tmp_path, *planted_rows(10_000, 1_000, seed=1))


def test_rows_are_new_ones_that_name_their_parents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [build(number) for number in range(6)]
    rows[1].final_state = json.dumps({"mail": "jane.roe@northwind.io", "to": "JANE.ROE@northwind.io"})
    rows[4].messages[0].content = "write to jane.roe@northwind.io or call +49 30 90182055"
    harness, given = harness_with(
        tmp_path,
        [
            row.model_copy(
                update={
                    "input_ids": [],
                    "action_mask": [],
                    "logprobs": [],
                    "n_tokens": 0,
                    "n_action_tokens": 0,
                    "messages": [m.model_copy(update={"token_start": None, "token_end": None}) for m in row.messages],
                }
            )
            for row in rows
        ],
    )
    result = harness.run(redact, trajectories=[given])
    after = result["trajectories"].read()
    assert [row.parent_id for row in after] == [None, rows[1].trajectory_id, None, None, rows[4].trajectory_id, None]
    assert json.loads(after[1].final_state) == {"mail": "<EMAIL_1>", "to": "<EMAIL_1>"}
    assert after[4].messages[0].content == "write to <EMAIL_1> or call <PHONE_1>"
    assert (after[1].task_id, after[1].episode_id, after[1].reward) == ("t0", "e1", 1.0)
    buffer = harness.buffer
    assert buffer.digest([after[1].trajectory_id]) != buffer.digest([rows[1].trajectory_id])
    assert result["counts"].table().select(["kind", "rows", "places"]).to_pylist() == [
        {"kind": "EMAIL", "rows": 2, "places": 3},
        {"kind": "PHONE", "rows": 1, "places": 1},
    ]
    assert result.metrics["values.EMAIL"] == 1
    assert capsys.readouterr().out == "redacted 2 of 6 rows; replaced: EMAIL 3, PHONE 1\n"


def test_the_rule_drops_rows_with_secrets(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    rows = [build(number) for number in range(4)]
    rows[2].tools = json.dumps([{"type": "function", "function": {"name": "f", "description": "by jane@northwind.io"}}])
    buffer.append(rows, stage="rollout", fingerprint="f")
    rules = Rules.model_validate({"rules": [{"rule": "secrets"}]}).rules
    result = curate(buffer, rules)
    assert result.ids.to_pylist() == [row.trajectory_id for row in rows if row is not rows[2]]
    assert result.funnel[0].rule == "secrets"
    only = Rules.model_validate({"rules": [{"rule": "secrets", "secrets": {"detect": ["phone"]}}]}).rules
    assert len(curate(buffer, only).ids) == 4


def test_an_export_refuses_secrets_or_replaces_them(tmp_path: Path) -> None:
    rows, planted = planted_rows(12, 4)
    harness, given = harness_with(tmp_path, rows)
    ids, out = [row.trajectory_id for row in rows], tmp_path / "rows.jsonl"
    with pytest.raises(StoreError, match=r"^4 rows hold secrets \(.*nothing was written") as raised:
        export_rows(harness.buffer, ids, out, "openai-chat", secrets="refuse")
    assert not out.exists()
    assert not any(each.secret in str(raised.value) for each in planted)
    done = export_rows(harness.buffer, ids, out, "openai-chat", secrets="redact")
    assert done.records == 12
    assert sum((done.redacted or {}).values()) >= 4
    assert not any(json.dumps(each.secret)[1:-1] in out.read_text() for each in planted)
    result = harness.run(redact, trajectories=[given])
    clean = tmp_path / "clean.jsonl"
    assert (
        export_rows(harness.buffer, result["trajectories"].ids(), clean, "openai-chat", secrets="refuse").records == 12
    )


def test_a_recorder_stores_no_secret(tmp_path: Path) -> None:
    rows, planted = planted_rows(3, 3)
    harness, _ = harness_with(tmp_path, [build(0)])
    named = [
        row.model_copy(update={"episode_id": f"recorded-{number}", "stage": "record"})
        for number, row in enumerate(rows)
    ]
    BufferRows(harness.buffer, RowRedaction(harness.buffer.storage)).keep("r" * 32, named)
    stored = harness.buffer.get_many([row.trajectory_id for row in named])
    assert not any(left_in(stored[each.row], each.secret) for each in planted)


def test_a_recorder_stores_no_secret_of_feedback(tmp_path: Path) -> None:
    harness, _ = harness_with(tmp_path, [build(0)])
    call = {"id": "1", "name": "connect", "arguments": json.dumps({"db_username": "alice"})}
    feedback = [
        {"correction": {"content": "Dear jane.roe@northwind.io", "tool_calls": [call]}},
        {"comment": "call +49 30 90182055"},
        {"value": "jane.roe@northwind.io"},
        {"value": "up"},
        {"value": "+493090182055"},
    ]
    annotations = [
        Annotation(trajectory_id="t", turn=0, name=f"n{number}", author="jane.roe@northwind.io", **fields)
        for number, fields in enumerate(feedback)
    ]
    BufferRows(harness.buffer, RowRedaction(harness.buffer.storage)).annotate(annotations)
    rows = sorted(harness.buffer.annotations.rows().to_pylist(), key=lambda row: row["name"])
    correction = json.loads(rows[0]["correction"])
    assert correction["content"] == "Dear <EMAIL_1>"
    assert json.loads(correction["tool_calls"][0]["arguments"]) == {"db_username": "<USER_1>"}
    assert [row["comment"] for row in rows] == ["", "call <PHONE_1>", "", "", ""]
    assert [row["value"] for row in rows] == [None, None, "<EMAIL_1>", "up", "<PHONE_2>"]
    assert [row["number"] for row in rows] == [None, None, None, 1.0, None]
    assert {row["author"] for row in rows} == {"<EMAIL_1>"}


def spoken_in_tokens_alone(tokenizer_name: str) -> Trajectory:
    ids = tokenizer().encode("write to jane.roe@northwind.io", add_special_tokens=False).ids
    update = {"input_ids": ids, "action_mask": [False] * len(ids), "logprobs": [math.nan] * len(ids)}
    spans = [message.model_copy(update={"token_start": None, "token_end": None}) for message in build(1).messages]
    return build(1).model_copy(
        update={**update, "messages": spans, "n_tokens": len(ids), "n_action_tokens": 0, "tokenizer": tokenizer_name}
    )


def test_secrets_in_tokens_alone_are_refused_and_tokens_that_nobody_reads_are_counted(tmp_path: Path) -> None:
    row = spoken_in_tokens_alone("chatml-4000")
    harness, _ = harness_with(tmp_path / "kept", [row])
    with pytest.raises(StoreError, match=r"^1 rows hold secrets \(EMAIL 1\)"):
        export_rows(harness.buffer, [row.trajectory_id], tmp_path / "a.jsonl", "openai-chat", secrets="refuse")
    rules = Rules.model_validate({"rules": [{"rule": "secrets"}]}).rules
    assert len(curate(harness.buffer, rules).ids) == 0
    other, given = harness_with(tmp_path / "other", [spoken_in_tokens_alone("other")])
    done = export_rows(other.buffer, [row.trajectory_id], tmp_path / "b.jsonl", "openai-chat", secrets="refuse")
    assert (done.records, done.unread) == (1, 1)
    with pytest.warns(UserWarning, match="rule secrets: the tokens of 1 rows were not searched"):
        assert len(curate(other.buffer, rules).ids) == 1
    result = other.run(redact, {"tokens": "drop"}, trajectories=[given])
    assert (result.metrics["redacted"], result.metrics["unread"]) == (0, 1)


def test_a_cut_says_which_tokens_nobody_read() -> None:
    assert CutSecrets(rows=1, places={"EMAIL": 1}).model_dump(mode="json") == {"rows": 1, "places": {"EMAIL": 1}}
    assert CutSecrets(rows=0, places={}, unread=2).model_dump(mode="json")["unread"] == 2


@pytest.mark.parametrize("run", [redact, audit])
def test_weights_stay(tmp_path: Path, run: Any) -> None:
    rows = [build(number) for number in range(3)]
    rows[1].messages[0].content = "write to jane.roe@northwind.io"
    harness, _ = harness_with(tmp_path, rows)
    context = context_of(tmp_path / "given", tmp_path / "given" / "made")
    context.buffer = harness.buffer
    given = context.select([row.trajectory_id for row in rows], [0.5, 2.0, 3.0], name="weighted")
    result = harness.run(run, {"tokens": "drop"} if run is redact else {}, trajectories=[given])
    after = result["trajectories"].selection().to_pydict()
    named = {row.parent_id or row.trajectory_id: row.trajectory_id for row in result["trajectories"].read()}
    weights = dict(zip(after["trajectory_id"], after["weight"], strict=True))
    expected = dict(zip([row.trajectory_id for row in rows], [0.5, 2.0, 3.0], strict=True))
    assert weights
    assert {new: expected[old] for old, new in named.items()} == weights


@pytest.mark.parametrize(
    ("uses", "settings"),
    [
        ("trajectories.redact", {}),
        ("trajectories.select", {"version": 0, "rules": [{"rule": "secrets"}]}),
        ("trajectories.cut", {"version": 0, "secrets": "refuse"}),
    ],
)
def test_detectors_are_in_the_fingerprint(uses: str, settings: dict[str, Any]) -> None:
    used = library.resolve(uses)
    node = Node("x", used, used.config.model_validate(settings), {}, 0, Execution())
    assert {"detect_secrets", "phonenumbers"} <= set(Fingerprinter(CodeGraph(())).ingredients(node, {}).packages)


def context_of(folder: Path, made: Path) -> Context:
    (made / "scratch").mkdir(parents=True, exist_ok=True)
    buffer = TrajectoryBuffer(folder / "store")
    return Context("redact", "c" * 32, "run", 0, buffer, made, made / "scratch")


def run_once(folder: Path, made: Path) -> tuple[list[str], str, list[dict[str, object]]]:
    """The stage over the rows of the store: ids, their digest, and the table of redacted rows."""
    context = context_of(folder, made)
    given = context.select(sorted(context.buffer.ids("f" * 32)), name="given")
    outputs = redact(context, RedactConfig(), trajectories=[given])
    ids = outputs["trajectories"].ids()
    return ids, context.buffer.digest(ids), outputs["redacted"].table().to_pylist()


def killed_after(folder: Path, appends: int, before: bool) -> None:
    """In a process of its own: run the stage, and end by SIGKILL ``before`` or after its append of this number."""
    real, calls = TrajectoryBuffer.append, [0]

    def append(self: TrajectoryBuffer, *arguments: object, **options: object) -> object:
        calls[0] += 1
        if before and calls[0] == appends:
            os.kill(os.getpid(), signal.SIGKILL)
        done = real(self, *arguments, **options)  # type: ignore[arg-type]
        if calls[0] == appends:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    TrajectoryBuffer.append = append  # type: ignore[method-assign,assignment]
    stage_module.SHARD_ROWS = 16
    run_once(folder, folder / f"killed-{appends}-{before}")


@pytest.mark.slow
def test_a_killed_stage_goes_on_with_the_same_placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "SHARD_ROWS", 16)
    rows, planted = planted_rows(96, 48)
    for name in ("whole", "killed"):
        buffer = TrajectoryBuffer(tmp_path / name / "store")
        keep(buffer.storage, "chatml-4000", tokenizer().to_str)
        buffer.append(rows, stage="rollout", fingerprint="f" * 32)
    expected = run_once(tmp_path / "whole", tmp_path / "whole" / "made")
    for appends, before in ((1, True), (1, False), (2, True), (3, False)):
        call = (
            "from test_redact_stage import killed_after; from pathlib import Path; "
            f"killed_after(Path({str(tmp_path / 'killed')!r}), {appends}, {before})"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        ended = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert not any(each.secret in ended.stdout + ended.stderr for each in planted)
    assert run_once(tmp_path / "killed", tmp_path / "killed" / "made") == expected
    assert len(TrajectoryBuffer(tmp_path / "killed" / "store").ids("c" * 32)) == 48
