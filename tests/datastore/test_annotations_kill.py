"""kill -9 while two processes annotate: nothing that was acknowledged is lost, nothing is half written."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_rows import FP, Make

from agentrl.datastore.annotations.table import MERGED, PARTS, AnnotationTable
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.storage.object_store import storage_of

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "annotation_worker.py"
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
KILLS = 10


def test_no_acknowledged_annotation_is_lost_to_kills(tmp_path: Path, make: Make) -> None:
    store, row = str(tmp_path / "store"), make(0).trajectory_id
    TrajectoryBuffer(store).append([make(0)], stage="rollout", fingerprint=FP)
    chance, told = random.Random(0), {"ann": [0], "bob": [0]}
    for _ in range(KILLS):
        workers = {
            name: subprocess.Popen(
                [sys.executable, str(WORKER), store, row, name, str(numbers[-1])],  # the last one again, too
                env=ENV,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, numbers in told.items()
        }
        for name, worker in workers.items():
            assert worker.stdout is not None
            told[name].append(int(worker.stdout.readline()))
        time.sleep(chance.uniform(0, 0.4))
        for name, worker in workers.items():
            worker.kill()
            told[name] += [int(line) for line in worker.communicate()[0].splitlines(keepends=True) if line[-1] == "\n"]
    for parts_alone in (False, True):
        storage = storage_of(store)
        if parts_alone:
            storage.delete(MERGED)
        rows = AnnotationTable(storage).rows()
        ids = rows["annotation_id"].to_pylist()
        assert len(ids) == len(set(ids))
        expected = {f"{name}-{number}" for name, numbers in told.items() for number in numbers}
        assert expected <= set(ids)
        assert {f"{name}-words" for name in ids if not name.endswith("words")} <= set(ids), "both of a call, or none"
    assert len([*storage_of(store).keys(PARTS)]) == max(rows["version"].to_pylist())
    assert sum(map(len, told.values())) > 4 * KILLS
