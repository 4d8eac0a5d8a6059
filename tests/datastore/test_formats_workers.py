"""Several processes read what one process reads: the same rows in the same order, the same counts, the same faults."""

import gc
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pyarrow as pa
import pytest
from format_rows import KINDS
from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis import strategies as st

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import FORMATS, parts, scan, workers
from agentrl.datastore.formats.columns import batches
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.source import Row, Source
from agentrl.datastore.formats.workers import File, read_files
from agentrl.schemas.trajectory import Trajectory

ROWS = [row for rows in KINDS.values() for row in rows]
CUT = [name for name, format_ in FORMATS.items() if format_.cut and format_.write]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SIZE", 3000)
    monkeypatch.setattr(workers, "WORTH_IT", 2)


def kept(record: Any) -> Any:
    return len(record)


class Found:
    """Rows, what was kept, the numbers of the files, and all notes."""

    def __init__(self, name: str, paths: list[Path], quarantine: bool, together: bool) -> None:
        self.notes = Notes(quarantine)
        sources = [Source(path, self.notes) for path in paths]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers, "MOST_WORKERS", 4 if together else 1)
            result = list(read_files([File(source, FORMATS[name]) for source in sources], kept))
        table = pa.concat_tables(item.table for item in result) if result else pa.table({"created_at": []})
        self.rows = table.drop_columns(["created_at"]).to_pylist()
        self.sources = [source.path for batch in result for source in batch.sources]
        self.kept = [item for batch in result for item in batch.kept]

    def everything(self) -> dict[str, Any]:
        notes = {"ignored": self.notes.ignored, "remarks": self.notes.remarks}
        unreadable = sorted((item.place, item.key, item.reason, item.excerpt) for item in self.notes.unreadable)
        rows = json.dumps(self.rows, sort_keys=True, default=str)
        return notes | {"rows": rows, "sources": self.sources, "kept": self.kept, "unreadable": unreadable}


def same(name: str, paths: list[Path], quarantine: bool = False) -> Found:
    item = Found(name, paths, quarantine, together=False)
    assert Found(name, paths, quarantine, together=True).everything() == item.everything()
    return item


@pytest.mark.parametrize(
    "name", [pytest.param(item, marks=pytest.mark.slow) if item == "tau2" else item for item in CUT]
)
def test_parts_of_a_file_give_the_rows_of_the_whole(name: str, tmp_path: Path) -> None:
    suffix = FORMATS[name].suffix or ("" if name == "huggingface" else ".jsonl")
    path = tmp_path / f"rows{suffix}"
    write = FORMATS[name].write
    assert write
    write(ROWS * (1 if suffix == ".jsonl" else 120), path)
    if path.suffix == ".jsonl":
        path.write_text(path.read_text() * 3)
    spans = FORMATS[name].cut
    assert spans
    assert len(list(spans(Source(path)) or [])) > 1
    assert same(name, [path]).rows


def test_parquet_whose_rows_share_their_text_is_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SIZE", 2**20)
    path = tmp_path / "rows.parquet"
    assert FORMATS["verl-sft"].write
    FORMATS["verl-sft"].write(ROWS[:1] * 5000, path)
    assert path.stat().st_size < 2**17
    assert [(span.start, span.stop) for span in parts.by_record(Source(path)) or []] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 4),
        (4, 5),
    ]


def test_many_small_files_and_a_large_one(tmp_path: Path) -> None:
    write = FORMATS["openai-chat"].write
    assert write
    paths = [tmp_path / f"{number}.jsonl" for number in range(20)]
    for number, path in enumerate(paths):
        write(ROWS[:1] if number != 7 else ROWS, path)
    paths[3].write_bytes(gzip.compress(paths[3].read_bytes()))
    read_back = same("openai-chat", paths)
    assert len(read_back.rows) == 19 + len(ROWS)


def test_samples_of_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(100):
            messages = [{"role": "user", "content": f"{number} who?"}, {"role": "assistant", "content": "Ann"}]
            sample = {"id": number, "epoch": 1, "messages": messages, "scores": {"match": {"value": "C"}}, "odd": 1}
            archive.writestr(f"samples/{number}_epoch_1.json", json.dumps(sample) if number % 9 else "{")
        archive.writestr(
            "header.json", json.dumps({"version": 2, "eval": {"task": "t", "odd": 1}, "status": "success"})
        )
    read_back = same("inspect", [path], quarantine=True)
    assert (len(read_back.rows), len(read_back.notes.unreadable), read_back.notes.ignored["eval.odd"]) == (88, 12, 1)


def test_instances_of_openhands_and_a_list_of_its_events(tmp_path: Path) -> None:
    events = [
        {
            "id": number,
            "action": "message",
            "source": "user" if number % 2 else "agent",
            "args": {"content": f"{number}"},
        }
        for number in range(100)
    ]
    whole, folder = tmp_path / "output.jsonl", tmp_path / "events.jsonl"
    whole.write_text("".join(json.dumps({"instance_id": f"{n}", "history": events[: n + 1]}) + "\n" for n in range(60)))
    folder.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert [len(same("openhands", [path]).rows) for path in (whole, folder)] == [60, 1]


GOOD = {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "Ann", "odd": 1}]}
LINES = st.sampled_from(
    [
        json.dumps(GOOD),
        json.dumps(GOOD | {"model": "m", "extra": [1]}),
        json.dumps({"messages": []}),
        json.dumps({"messages": [{"content": "no role"}]}),
        json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "nobody", "content": "x"}]}),
        json.dumps({"messages": [{"role": "user", "content": "hi", "name": 3}]}),
        json.dumps({"messages": [{"role": "user", "content": "half \ud800"}]}),
        "not json",
        "",
        "   ",
        "[1]",
    ]
)


@pytest.mark.slow
@pytest.mark.ci
@settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(LINES, min_size=60, max_size=120), st.booleans(), st.booleans())
def test_faults_and_counts_are_those_of_one_process(tmp_path: Path, lines: list[str], mark: bool, end: bool) -> None:
    path = tmp_path / "rows.jsonl"
    text = ("\ufeff" if mark else "") + "\n".join([json.dumps(GOOD), *lines]) + ("\n" if end else "")
    path.write_text(text, encoding="utf-8")
    same("openai-chat", [path], quarantine=True)
    errors = []
    for together in (False, True):
        try:
            Found("openai-chat", [path], quarantine=False, together=together)
        except StoreError as error:
            errors.append(str(error))
        else:
            errors.append("")
    assert errors[0] == errors[1]


def simulation(number: int) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": f'{number} [who?] \\" {{'},
        {"role": "assistant", "content": "Ann, or \\\\"},
    ]
    return {
        "id": f"s{number}",
        "task_id": f"{number % 3}",
        "termination_reason": "max_steps",
        "messages": messages,
        "x": 1,
    }


@pytest.mark.parametrize("indent", [1, 2])
@pytest.mark.parametrize("order", [("info", "tasks", "simulations", "odd"), ("odd", "simulations", "tasks", "info")])
def test_simulations_of_a_document(order: tuple[str, ...], indent: int, tmp_path: Path) -> None:
    """With what stands before and after them."""
    whole = {
        "info": {"environment_info": {"domain_name": "airline", "odd": 1}},
        "tasks": [{"id": f"{number}", "text": "é"} for number in range(3)],
        "simulations": [simulation(number) for number in range(200)],
        "odd": {"a": ["]"]},
    }
    path = tmp_path / "results.json"
    path.write_text("\ufeff" + json.dumps({key: whole[key] for key in order}, indent=indent, ensure_ascii=False))
    read_back = same("tau2", [path])
    assert [row["env"] for row in read_back.rows] == ["airline"] * 200
    assert read_back.notes.ignored == {"simulations.x": 200, "info.environment_info.odd": 1, "tasks": 1, "odd": 1}
    cut = FORMATS["tau2"].cut
    assert cut
    spans = cut(Source(path))
    assert (spans is None) == (order[1] == "simulations")  # what each of them needs comes too late
    assert spans is None or len(list(spans)) > 5


def test_elements_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD | {"model": f'{number} "],[" \\'} for number in range(300)]))
    read_back = same("openai-chat", [path], quarantine=True)
    assert [row["policy"] for row in read_back.rows] == [f'{number} "],[" \\' for number in range(300)]
    text = path.read_text()
    for broken in (text[:-1], text[:-100], text.replace('"150 ', "150 "), text.replace('"150 ', "{")):
        path.write_text(broken)
        read_back = same("openai-chat", [path], quarantine=True)
        assert 0 < len(read_back.rows) <= 300
        assert read_back.notes.unreadable


_texts = st.text(alphabet='\\",[]{}: aé', max_size=6)
_values = st.recursive(
    st.none() | st.integers() | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.lists(_values, min_size=1, max_size=30), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.booleans())
def test_ends_of_elements(values: list[Any], size: int, chunk: int, indent: bool, plain: bool) -> None:
    text = json.dumps(values, indent=1 if indent else None, ensure_ascii=plain).encode() + b', "more": [1]}'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "CHUNK", chunk)
        result = list(scan.ends(io.BytesIO(text), 1, size))
    start, read = 1, 0
    for position, number, _ in result:
        part = json.loads(b"[" + text[start:position] + b"]")
        assert part == values[read : read + len(part)]
        start, read = position + 1, read + len(part)
        assert read == number
    assert read == len(values)
    assert [item.last for item in result] == [False] * (len(result) - 1) + [True]


def test_a_worker_that_is_killed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(source: Source) -> Iterator[Row]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield {}

    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(GOOD) + "\n") * 400)
    here = os.getpid()
    with pytest.raises(StoreError, match="ended from outside"):
        list(read_files([File(Source(path), FORMATS["openai-chat"].__class__(lambda _: 1, dies, cut=parts.by_record))]))
    assert os.getpid() == here


def test_workers_end_with_their_reader(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(GOOD) + "\n") * 4000)
    before = set(psutil.Process().children())
    reading = read_files([File(Source(path), FORMATS["openai-chat"])])
    next(reading)
    assert set(psutil.Process().children()) > before
    reading.close()  # type: ignore[attr-defined]
    assert set(psutil.Process().children()) <= before


def test_rows_of_two_processes_reach_the_buffer_as_objects(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(GOOD) + "\n") * 200)
    tables = [batch.table for batch in read_files([File(Source(path), FORMATS["openai-chat"])])]
    assert [Trajectory.model_validate(row).prompt for row in pa.concat_tables(tables).to_pylist()] == ["who?"] * 200


def spans(number: int, trace: int) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": f"{number % 7} who?"},
        {"role": "assistant", "content": "Ann " * (number % 5)},
    ]
    attributes = {"gen_ai.input.messages": json.dumps(messages[:1]), "gen_ai.output.messages": json.dumps(messages[1:])}
    return {"context": {"trace_id": f't"{trace}'}, "attributes": attributes, "start_time": str(number)}


def observed(number: int, trace: int) -> dict[str, Any]:
    item = {
        "id": f"o{number}",
        "type": "GENERATION",
        "input": f"{number} who?",
        "output": "Ann",
        "traceId": f"t{trace}",
    }
    return item if number % 3 else {"observations": [item | {"id": f"x{number}"}], "id": f"t{trace}"}


def session(number: int, trace: int) -> dict[str, Any]:
    if number % 11 == 0:
        return {"type": "system", "subtype": "compact_boundary", "sessionId": f"s{trace}"}
    kind = "assistant" if number % 2 else "user"
    message = {"role": kind, "content": f'{number} says "sessionId": "s0"', "id": f"m{number}"}
    line = {"type": kind, "message": message, "sessionId": f"s{trace}", "isSidechain": number % 5 == 0}
    return line if number % 13 else {"type": "summary", "leafUuid": "x"}


@pytest.mark.parametrize(("name", "record"), [("otel", spans), ("otel", observed), ("claude-code", session)])
@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(gaps=st.lists(st.sampled_from([0] * 12 + [3, 9]), min_size=200, max_size=200))
def test_groups_of_lines_are_never_cut(name: str, record: Any, gaps: list[int]) -> None:
    """Some lines of a group stand among those of the next ones."""
    order = sorted(range(200), key=lambda number: number + gaps[number])
    lines = [json.dumps(record(number, number // 4)) + "\n" for number in order]
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "rows.jsonl"
        path.write_text(json.dumps(record(1, 0)) + "\n" + "".join(lines))
        cut = FORMATS[name].cut
        assert cut
        target(len(list(cut(Source(path)) or [])))
        read_back = same(name, [path])
        patch.setattr(parts, "PART_SIZE", 10**9)
        assert Found(name, [path], False, together=False).everything() == read_back.everything()


def test_tables_are_free_when_they_are_done_with(tmp_path: Path) -> None:
    """Also while circles are not looked for, as in an import."""
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(GOOD) + "\n") * 2000)
    source = Source(path)
    gc.disable()
    try:
        allocated = []
        for _ in range(4):  # the first time columns of defaults are made, and kept
            for batch in batches((source, row) for row in FORMATS["openai-chat"].rows(source)):
                assert batch.table.num_rows
            del batch
            allocated.append(pa.total_allocated_bytes())
        assert allocated[1:] == allocated[:1] * 3
    finally:
        gc.enable()


def test_shared_memory_is_written_again_only_when_its_tables_are_free(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(GOOD | {"model": f"m{number}"}) + "\n" for number in range(700)))
    held, policies, handles = [], [], 0
    for number, batch in enumerate(read_files([File(Source(path), FORMATS["openai-chat"])])):
        policies += batch.table["policy"].to_pylist()
        if number % 4 == 0:
            held.append((batch.table, policies[-batch.table.num_rows :]))
        del batch
        handles = max([handles, *(child.num_fds() for child in psutil.Process().children())])
    assert policies == [f"m{number}" for number in range(700)]
    assert all(table["policy"].to_pylist() == kept for table, kept in held)
    assert number > 20
    assert handles < psutil.Process().num_fds() + number / 3  # a piece for each table that is held, and some more


def test_workers_do_not_import_what_they_do_not_need() -> None:
    """It takes as long as thousands of rows."""
    script = """
import sys
from agentrl.datastore.spared import spare_pandas
spare_pandas()
from agentrl.datastore.curation import duplicates
from agentrl.datastore.shards import worker
assert not {"pandas", "polars", "pydantic", "jsonschema", "deltalake"} & set(sys.modules)
from agentrl.datastore.formats import workers
workers.pa.array([1.5])
assert not {"pandas", "polars", "jsonschema", "deltalake"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
