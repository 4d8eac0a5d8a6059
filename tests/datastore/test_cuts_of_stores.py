"""Cuts of a store on a folder and on S3, and of processes that are killed while they make, export or import one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest
from store_rows import build

import agentrl
from agentrl.datastore.cuts.verify import verify_export
from agentrl.pipelines.results.gc import find_garbage

RULES = {
    "rules": [{"rule": "near_duplicates", "threshold": 0.95, "scope": "all"}, {"rule": "filter", "where": "success"}],
    "licences": {"mit": "level = 0"},
}


def test_a_cut_of_a_folder_and_of_a_bucket(store: str, tmp_path: Path) -> None:
    own = agentrl.Store(store)
    own.buffer.append([build(i) for i in range(12)], stage="rollout", fingerprint="f")
    gold = own.cut("gold", RULES, progress=False)
    assert own.cut("twin", RULES, progress=False).sha256 == gold.sha256
    assert gold.verify().ok
    assert gold.contents.rows == 6
    gold.export(tmp_path / "out")
    other = agentrl.Store(f"{store}-other")
    taken = other.import_cut(tmp_path / "out", "gold", progress=False)
    assert (taken.sha256, taken.verify().ok) == (gold.sha256, True)
    assert taken.diff(gold).rows.is_empty()


KILLS = 8
WORK = """
import sys, agentrl
from agentrl.datastore.cuts import export
from agentrl.flows.api import cuts
from agentrl.pipelines.stages import cut
store, what, out = sys.argv[1:]
own = agentrl.Store(store)
print("begins", flush=True)
if what == "make":
    own.cut("gold", {rules}, progress=False)
elif what == "export":
    own.cut("gold").export(out)
else:
    agentrl.Store(store + "-other").import_cut(out, "gold", progress=False)
print("done", flush=True)
"""


def work(store: Path, what: str, out: Path, kill_after_s: float | None = None) -> bool:
    """Whether a process did its work; it is killed ``kill_after_s`` seconds after it began, or not at all."""
    code = WORK.replace("{rules}", repr(RULES))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, str(store), what, str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    assert process.stdout
    assert process.stdout.readline() == "begins\n"
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        process.send_signal(signal.SIGKILL)
    return "done" in process.communicate()[0]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["make", "export", "import"])
def test_a_kill_leaves_a_whole_cut_or_none(tmp_path: Path, what: str) -> None:
    """Real kills, each later than the one before, over about as long as the work takes."""
    own = agentrl.Store(tmp_path / "store")
    rows = [build(i, final_state=f'{{"text": "{i * 7919 % 1009} "}}') for i in range(1500)]
    own.buffer.append(rows, stage="rollout", fingerprint="f")
    out = tmp_path / "out"
    began = time.monotonic()
    twin = own.cut("twin", RULES, progress=False)
    if what != "make":
        own.cut("gold", RULES, progress=False)
        began = time.monotonic()
        own.cut("gold").export(tmp_path / "timed")
    if what == "import":
        own.cut("gold").export(out)
        began = time.monotonic()
        agentrl.Store(tmp_path / "timed-store").import_cut(out, "gold", progress=False)
    took = time.monotonic() - began
    done = []
    for number in range(KILLS):
        if not (what == "export" and out.exists()):
            done.append(work(tmp_path / "store", what, out, took * (number + 0.5) / KILLS))
        _is_whole_or_none(tmp_path / "store", what, out, twin)
    assert done.count(False) >= KILLS // 2, "killed too late to say anything"
    if not (what == "export" and out.exists()):
        assert work(tmp_path / "store", what, out)
    assert own.cut("gold").sha256 == twin.sha256
    assert own.cut("gold").verify().ok
    if what != "make":
        assert verify_export(out).ok
    if what == "import":
        other = agentrl.Store(f"{tmp_path / 'store'}-other")
        assert other.cut("gold").sha256 == twin.sha256
        assert other.cut("gold").verify().ok
        assert other.rows.select(pl.len()).collect().item() == twin.contents.rows
        assert other.check().is_empty()
    assert not find_garbage(own.catalog, 0).artifacts


def _is_whole_or_none(store: Path, what: str, out: Path, twin: agentrl.Cut) -> None:
    of = agentrl.Store(f"{store}-other" if what == "import" else store)
    names = of.cuts().filter(pl.col("cut").str.starts_with("gold/"))["cut"].to_list()
    for name in names:
        assert of.cut(name).sha256 == twin.sha256
        assert of.cut(name).verify().ok
    if what == "export" and out.exists():
        assert verify_export(out).ok
    if what == "import" and of.buffer.version is not None:
        assert of.rows.select(pl.len()).collect().item() in (0, twin.contents.rows)
