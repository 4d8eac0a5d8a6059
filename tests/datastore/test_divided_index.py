"""The search index is the same whoever embeds the prompts, and what a worker finished is not made again."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import shard_work
from store_rows import build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.search import index, vectors
from agentrl.datastore.search.index import SearchIndex
from agentrl.datastore.search.minilm import is_installed
from agentrl.datastore.shards.divide import dividing_of
from agentrl.datastore.shards.local import VISIBLE, LocalProcesses
from agentrl.datastore.shards.shard import Shard, ShardError
from agentrl.schemas.shards import ShardsNow


def filled(folder: Path, count: int) -> TrajectoryBuffer:
    random = np.random.default_rng(0)
    buffer = TrajectoryBuffer(folder)
    texts = [
        " ".join(f"word{number}" for number in random.integers(0, 300, random.integers(3, 60))) for _ in range(count)
    ]
    buffer.append([build(number, prompt=text) for number, text in enumerate(texts)], stage="s", fingerprint="f")
    return buffer


def embedded(
    buffer: TrajectoryBuffer, name: str, engine: object = None, told: list[object] | None = None
) -> tuple[list[str], bytes, int]:
    """Texts, the bytes of their vectors, and how many texts are cut, in an index that is made anew."""

    def tell(done: int, total: int, **more: object) -> None:
        (told if told is not None else []).append((done, total, *more.values()))

    search = SearchIndex(buffer, name)
    state = search.refresh(True, dividing=dividing_of(engine, buffer.store, tell))  # type: ignore[arg-type]
    batches = list(search.batches(state))
    texts = [text for some, _ in batches for text in some]
    return texts, np.concatenate([some for _, some in batches]).tobytes(), state.cut


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and batches of few texts."""
    monkeypatch.setattr(index, "PART", 50)
    monkeypatch.setattr(index, "TEXTS", 20)


@pytest.mark.usefixtures("small")
def test_shards_change_nothing(tmp_path: Path) -> None:
    buffer, told = filled(tmp_path, 130), list[object]()
    expected = embedded(buffer, "embedded")
    assert len(expected[0]) == 130
    for shards in (None, 5):
        assert embedded(buffer, "embedded", {"type": "here", "shards": shards}, told) == expected
    assert told[-1] == (4, 4, ShardsNow(what="vectors"))
    assert not list(tmp_path.glob("tmp/**/*.npz")), "what shards made is removed when the index has it"


@pytest.mark.usefixtures("small")
def test_what_is_finished_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled(tmp_path, 130)
    expected = embedded(buffer, "embedded")
    engine = {"type": "here", "shards": 8}
    tries = list[int]()
    encode = vectors.embedded

    def failing(batches: Sequence[Sequence[str]], model: object) -> object:
        tries.append(1)
        if len(tries) == 4:
            raise KeyboardInterrupt
        return encode(batches, model)  # type: ignore[arg-type]

    monkeypatch.setattr(vectors, "embedded", failing)
    search = SearchIndex(buffer, "embedded")
    (tmp_path / search.folder / "index.json").unlink()
    dividing = dividing_of(engine, buffer.store, lambda *state, **more: None)
    with pytest.raises(KeyboardInterrupt):
        search.refresh(dividing=dividing)
    state = search.refresh(dividing=dividing)
    assert len(tries) == 9, "eight batches, and the one that failed"
    assert np.concatenate([some for _, some in search.batches(state)]).tobytes() == expected[1]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.skipif(not is_installed(), reason="needs the extra minilm")
@pytest.mark.usefixtures("small")
def test_processes_that_keep_a_model_give_the_same(tmp_path: Path) -> None:
    buffer = filled(tmp_path, 130)
    expected = embedded(buffer, "minilm")
    assert embedded(buffer, "minilm", {"type": "processes", "workers": 2, "shards": 5}) == expected


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="needs the extra minilm")
@pytest.mark.usefixtures("small")
def test_ray_gives_the_same(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    buffer = filled(tmp_path, 130)
    expected = embedded(buffer, "minilm")
    ray.init(num_cpus=2, log_to_driver=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    try:
        assert embedded(buffer, "minilm", {"type": "ray", "shards": 5}) == expected
    finally:
        ray.shutdown()


def test_each_process_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,6")
    with pytest.raises(ShardError, match=r"2 processes with 2 GPUs each need 4, and CUDA_VISIBLE_DEVICES names 3; set"):
        LocalProcesses(2, 2)
    pool = LocalProcesses(3, 1)
    try:
        work = [
            Shard(f"{number}", f"{shard_work.__name__}:sees", (tmp_path / f"{number}", VISIBLE)) for number in range(3)
        ]

        def seen() -> list[str]:
            waiting = set(pool.start(work))
            while waiting:
                waiting -= {number for number, _ in pool.ended(1.0)}
            return sorted((tmp_path / f"{number}").read_text() for number in range(3))

        assert seen() == ["4", "5", "6"]
        os.kill(pool.pids[0], signal.SIGKILL)
        [number] = pool.start(work[:1])
        assert any(ended == number and ending.died for ended, ending in pool.ended(10.0))
        assert seen() == ["4", "5", "6"], "a process that replaces another has its GPU"
    finally:
        pool.close()
