"""The stage, the rule, the export and the recorder that keep secrets from going on: planted secrets, and kill -9."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from store_rows import build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.tokenizers import keep
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.exports import export_rows
from agentrl.datastore.redaction.rows import RowRedaction
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.serve import BufferRows
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages import redact as stage_module
from agentrl.pipelines.stages.redact import RedactConfig, redact
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
