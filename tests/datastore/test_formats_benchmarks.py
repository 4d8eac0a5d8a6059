"""Results of benchmarks."""

import json
import zipfile
from pathlib import Path
from typing import Any

from format_files import CALL, TALK, USER, Read, shape

from agentrl.datastore.formats import FORMATS, detect
from agentrl.datastore.formats.source import Source
from agentrl.schemas.trajectory import Termination


def test_tau2_document_and_folder(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "where is Ann?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "name": "find", "arguments": {"who": "Ann"}}],
        },
        {"role": "tool", "id": "c1", "content": "in Rome", "requestor": "assistant", "error": True},
        {"role": "assistant", "content": "She is in Rome."},
    ]
    reward = {
        "reward": 1.0,
        "reward_breakdown": {"DB": 1.0},
        "extra": {"x": 1},
        "action_checks": [{"action_match": False}],
    }
    item = {
        "id": "s",
        "task_id": "5",
        "trial": 1,
        "termination_reason": "max_steps",
        "reward_info": reward,
        "messages": messages,
    }
    info = {"environment_info": {"domain_name": "airline", "policy": "be kind"}, "agent_info": {"llm": "m"}}
    document = {
        "info": info,
        "tasks": [{"id": "5", "text": "find Ann"}],
        "simulations": [item, item | {"reward_info": None}],
    }
    read = Read(tmp_path, "tau2", document)
    row, unscored = read.rows
    assert shape(row) == [("system", "be kind"), *TALK]
    assert (row.reward, row.success, row.termination, row.n_tool_errors) == (1.0, True, Termination.MAX_STEPS, 1)
    assert (row.env, row.policy, row.sample_index) == ("airline", "m", 1)
    assert {part.name: part.value for part in row.reward_components} == {"DB": 1.0, "action_checks": 0.0}
    assert (unscored.reward, unscored.success) == (None, None)
    assert read.notes.ignored == {"reward_info.extra": 1, "tasks": 1}
    folder = tmp_path / "run" / "simulations"
    folder.mkdir(parents=True)
    (folder.parent / "results.json").write_text(json.dumps({"info": info, "tasks": document["tasks"]}))
    assert Read(folder, "tau2", item | {"termination_reason": "infrastructure_error"}).row.task_id == row.task_id
    spoken = Read(folder, "tau2", {"id": "v", "task_id": "5", "termination_reason": "user_stop", "ticks": [1]})
    assert "full-duplex" in spoken.notes.unreadable[0].reason


def test_tau_bench(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "policy"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    messages += [
        {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "in Rome"},
        {"role": "user", "content": "###STOP###"},
    ]
    info = {"task": {"user_id": "u"}, "reward_info": {"reward": 1.0, "info": {"r_actions": 1.0}}}
    item = {"task_id": 0, "reward": 1.0, "info": info, "traj": messages, "trial": 2}
    broken = {"task_id": 1, "reward": 0.0, "info": {"error": "boom"}, "traj": [USER], "trial": 0}
    row, failed = Read(tmp_path, "tau-bench", [item, broken]).rows
    assert (row.reward, row.success, row.sample_index, row.termination) == (1.0, True, 2, Termination.ANSWERED)
    assert (failed.reward, failed.success, failed.termination) == (None, None, Termination.INFRA_ERROR)


SAMPLE: dict[str, Any] = {
    "id": 1,
    "epoch": 2,
    "input": "where is Ann?",
    "target": "Rome",
    "messages": [
        {"role": "user", "content": "where is Ann?", "source": "input"},
        {
            "role": "assistant",
            "id": "m1",
            "content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": ""}],
            "tool_calls": [{"id": "c1", "function": "find", "arguments": {"who": "Ann"}, "type": "function"}],
        },
        {
            "role": "tool",
            "content": "attachment://a1",
            "tool_call_id": "c1",
            "function": "find",
            "error": {"type": "timeout"},
        },
        {"role": "assistant", "content": "She is in Rome."},
    ],
    "scores": {"match": {"value": "C"}},
    "attachments": {"a1": "in Rome", "a2": "of an event"},
    "limit": {"type": "token", "limit": 10},
    "events": [
        {"event": "x"},
        {"event": "model", "output": {"time": 1.25, "choices": [{"message": {"id": "m1"}}]}},
        {
            "event": "tool",
            "id": "c1",
            "timestamp": "2026-01-31T12:00:00Z",
            "completed": "2026-01-31T13:00:00.500000+01:00",
        },
    ],
}


def test_inspect_documents_and_archives(tmp_path: Path) -> None:
    header = {"version": 2, "status": "success", "eval": {"task": "geo", "model": "m"}}
    read = Read(tmp_path, "inspect", header | {"samples": [SAMPLE]})
    row = read.row
    assert shape(row) == TALK
    assert (row.reward, row.success, row.termination, row.n_tool_errors) == (1.0, True, Termination.MAX_TOKENS, 1)
    assert (row.policy, row.env, row.sample_index, row.messages[1].reasoning) == ("m", "geo", 1, "hm")
    assert row.message_seconds == [None, 1.25, 0.5, None], "its last turn is in no event"
    messages = {"samples.messages.source": 1, "samples.messages.error.type": 1}
    rest = {"samples.target": 1, "samples.limit.limit": 1, "samples.events": 1, "samples.attachments": 1, "status": 1}
    assert read.notes.ignored == messages | rest
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("samples/1_epoch_2.json", json.dumps(SAMPLE))
        archive.writestr("header.json", json.dumps(header))
    assert detect(Source(path)) == "inspect"
    [same] = FORMATS["inspect"].read(Source(path))
    assert (shape(same), same.task_id) == (shape(row), row.task_id)
    path.write_bytes(path.read_bytes()[:60])
    assert detect(Source(path)) is None
    two = SAMPLE | {"scores": {"a": {"value": {"x": 1, "y": "no"}}, "b": {"value": 0.5}}}
    row = Read(tmp_path, "inspect", header | {"samples": [two]}).row
    assert (row.reward, row.success) == (None, None)
    assert {part.name: part.value for part in row.reward_components} == {"a.x": 1.0, "b": 0.5}


def test_tau2_takes_info_and_tasks_wherever_they_stand(tmp_path: Path) -> None:
    """Sorted by key, the tasks come after the simulations, and still tell tasks of one number apart."""
    item = {"id": "s", "task_id": "5", "termination_reason": "unexpected_error", "messages": [USER]}
    names = []
    for text in ("find Ann", "find Bob"):
        document = {"simulations": [item], "tasks": [{"id": "5", "text": text}]}
        info = {"environment_info": {"domain_name": "airline"}}
        first = Read(tmp_path, "tau2", {"info": info, **document}).row
        last = Read(tmp_path, "tau2", {**document, "info": info}).row
        assert (first.task_id, first.env) == (last.task_id, last.env)
        assert first.termination is Termination.INFRA_ERROR
        names.append(first.task_id)
    assert names[0] != names[1]
