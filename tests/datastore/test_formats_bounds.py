"""No record takes more memory than it may, and none refuses its neighbours."""

import gzip
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats.imported import Imported
from agentrl.datastore.formats.imports import import_paths

LIMIT = 20_000
USER = {"role": "user", "content": "where is Ann?"}


def chat(text: str) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": text}]}


RECORDS = [chat("in Rome"), chat('\\" ]}, [{ ' * 10_000), chat("in Oslo")]


def as_lines(path: Path) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def zstandard(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def as_simulations(path: Path) -> bytes:
    ends = {"task_id": "1", "termination_reason": "user_stop"}
    simulations = [{"id": str(number), **ends, **record} for number, record in enumerate(RECORDS)]
    return json.dumps({"info": {}, "tasks": [], "simulations": simulations}, indent=1).encode()


def as_csv(path: Path) -> bytes:
    lines = ["id,traceId,type,input,output"]
    for number, record in enumerate(RECORDS):
        text = "x" * len(record["messages"][1]["content"])
        lines.append(f"{number},t{number},GENERATION,where?,{text}")
    return "\n".join(lines).encode()


def as_parquet(path: Path) -> bytes:
    table = pa.Table.from_pylist(RECORDS)
    pq.write_table(table, path, row_group_size=1)
    return path.read_bytes()


def as_archive(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "eval": {"task": "t", "model": "m"}}))
        for number, record in enumerate(RECORDS):
            archive.writestr(f"samples/{number}_epoch_1.json", json.dumps({"id": number, "epoch": 1, **record}))
    return path.read_bytes()


KINDS: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    "lines": ("a.jsonl", as_lines, ":2"),
    "lines in gzip": ("a.jsonl.gz", lambda path: gzip.compress(as_lines(path)), ":2"),
    "lines in zstd": ("a.jsonl.zst", lambda path: zstandard(as_lines(path)), ":2"),
    "lines in two frames": (
        *("a.jsonl.zst", lambda path: b"".join(zstandard(line + b"\n") for line in as_lines(path).splitlines())),
        ":2",
    ),
    "array": ("a.json", lambda _: json.dumps(RECORDS).encode(), "[1]"),
    "array in gzip": ("a.json.gz", lambda _: gzip.compress(json.dumps(RECORDS).encode()), "[1]"),
    "list of a document": ("a.json", as_simulations, "[1]"),
    "csv": ("a.csv", as_csv, "[1]"),
    "parquet": ("a.parquet", as_parquet, ": row group 1"),
    "archive": ("a.eval", as_archive, ":samples/1_epoch_1.json"),
}


def imported(path: Path, limit: int = LIMIT, quarantine: bool = True) -> tuple[Imported, list[str]]:
    buffer = TrajectoryBuffer(path.parent / "store")
    result = import_paths(buffer, [path], on_error="quarantine" if quarantine else "raise", max_record=limit)
    rows = buffer.sql("select messages from trajectories order by trajectory_id")["messages"].to_list()
    return result, [row[-1]["content"] for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_takes_too_much_is_set_aside_alone(kind: str, tmp_path: Path) -> None:
    name, made, position = KINDS[kind]
    path = tmp_path / name
    path.write_bytes(made(path))
    with pytest.raises(StoreError, match=r"takes more than 0.01907 MB, the most that one record may take"):
        imported(path, quarantine=False)
    result, texts = imported(path)
    after = [] if kind == "csv" else ["in Oslo"]  # nobody knows where the next line of a CSV begins
    assert [text for text in texts if not text.startswith("x")] == (["in Rome", *after] if kind != "csv" else [])
    assert len(texts) == (1 if kind == "csv" else 2)
    [record] = result.unreadable
    assert record["place"] == f"{path}{position}"
    assert "--max-record-mb" in record["reason"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_within_the_limit_is_read(kind: str, tmp_path: Path) -> None:
    name, made, _ = KINDS[kind]
    path = tmp_path / name
    path.write_bytes(made(path))
    result, texts = imported(path, 10**6)
    assert (len(texts), result.unreadable) == (3, [])


def test_a_long_element_between_parts_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([chat("in Rome"), chat("y" * 9_000_000), *[chat("in Oslo")] * 5]))
    result, texts = imported(path, 10**6)
    assert texts == ["in Rome", *["in Oslo"] * 5]
    assert [record["place"] for record in result.unreadable] == [f"{path}[1]"]


BROKEN: dict[str, tuple[str, bytes]] = {
    "garbage with the mark of Parquet": ("b.parquet", b"PAR1" + b"garbage" * 100 + b"PAR1"),
    "Parquet that is cut": ("b.parquet", b""),
    "gzip that is cut": ("b.jsonl.gz", gzip.compress(json.dumps(chat("x" * 1000)).encode())[:-20]),
    "zstd that is cut": ("b.jsonl.zst", zstandard(json.dumps(chat("x" * 1000)).encode())[:-3]),
    "zstd that is broken": ("b.jsonl.zst", b"\x28\xb5\x2f\xfd" + b"\xff" * 64),
    "an archive that is none": ("b.eval", b"PK\x03\x04" + b"\x00" * 100),
    "nothing that anybody reads": ("b.jsonl", b'{"odd": 1}\n'),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_cannot_be_read_does_not_refuse_its_neighbours(kind: str, tmp_path: Path) -> None:
    name, content = BROKEN[kind]
    broken, good = tmp_path / name, tmp_path / "a.jsonl"
    broken.write_bytes(content or as_parquet(broken)[:-40])
    good.write_text(json.dumps(chat("in Rome")) + "\n")
    buffer = TrajectoryBuffer(tmp_path / "store")
    with pytest.raises(StoreError) as refused:
        import_paths(buffer, [broken, good])
    assert name in str(refused.value)
    result = import_paths(buffer, [broken, good], on_error="quarantine")
    assert result.rows == 1
    assert [Path(record["place"].split(":")[0]).name for record in result.unreadable] == [name]


ODD = st.one_of(
    st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.just(10**400) | st.just(USER),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["messages", "role", "content", "tool_calls", "id", "label"]), inner, max_size=3
            )
        ),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(max_examples=30, deadline=None)
@given(odd=st.lists(ODD, min_size=1, max_size=4))
def test_no_line_refuses_its_neighbours(odd: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("odd") / "a.jsonl"
    good = [json.dumps(chat(f"says {number}")).encode() for number in range(len(odd) + 1)]
    lines = [line for pair in zip(good, [*odd, b""], strict=True) for line in pair]
    path.write_bytes(b"\n".join([good[0], *lines]))
    _, texts = imported(path)
    assert [text for text in texts if text.startswith("says")] == ["says 0", *(f"says {n}" for n in range(len(good)))]


MEMORY = """
import resource, sys
from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.formats.imports import import_paths
import polars, deltalake
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = import_paths(TrajectoryBuffer(sys.argv[2]), [sys.argv[1]], on_error="quarantine", max_record=int(sys.argv[3]))
print(result.rows, len(result.unreadable), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def megabytes(path: Path, limit: int) -> tuple[int, int, int]:
    """Rows, records set aside, and by how many megabytes an import in a process of its own grows it."""
    command = [sys.executable, "-c", MEMORY, str(path), str(path.parent / "store"), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows, aside, grown = map(int, done.stdout.split())
    return rows, aside, grown


def bomb(path: Path, size: int) -> None:
    """A sample of ``size`` bytes, of which the archive holds a thousandth."""
    sample = {"id": 2, "epoch": 1, **chat("in Oslo")}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps({"version": 2, "eval": {"task": "t", "model": "m"}}))
        with archive.open("samples/1_epoch_1.json", "w", force_zip64=True) as file:
            file.write(b'{"id": 1, "epoch": 1, "messages": "')
            for _ in range(size // 2**20):
                file.write(b" " * 2**20)
            file.write(b'"}')
        archive.writestr("samples/2_epoch_1.json", json.dumps(sample))


def test_a_bomb_is_set_aside_in_little_memory(tmp_path: Path) -> None:
    bomb(tmp_path / "a.eval", 200 * 2**20)
    rows, aside, grown = megabytes(tmp_path / "a.eval", 2**20)
    assert (rows, aside) == (1, 1)
    assert grown < 120


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["archive", "line in gzip", "element in gzip", "page of Parquet"])
def test_a_gigabyte_in_a_megabyte_is_set_aside_by_default(kind: str, tmp_path: Path) -> None:
    from agentrl.datastore.formats.raw import MAX_RECORD

    path = tmp_path / {"archive": "a.eval", "page of Parquet": "a.parquet"}.get(kind, "a.json.gz")
    if kind == "archive":
        bomb(path, 2**30)
    elif kind == "page of Parquet":
        schema = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
        with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
            for text in ("in Rome", "x" * 2**30, "in Oslo"):
                writer.write_table(pa.Table.from_pylist([chat(text)], schema=schema))
    else:
        around = (b"[", b",", b"]") if kind == "element in gzip" else (b"", b"\n", b"\n")
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(around[0] + json.dumps(chat("in Rome")).encode() + around[1])
            file.write(b'{"messages": [{"role": "user", "content": "')
            for _ in range(2**10):
                file.write(b" " * 2**20)
            file.write(b'"}]}' + around[1] + json.dumps(chat("in Oslo")).encode() + around[2])
    rows, aside, grown = megabytes(path, MAX_RECORD)
    assert (rows, aside) == (1 if kind == "archive" else 2, 1)
    assert grown < 600
