"""``kill -9`` of an online run at random moments, and of the vLLM servers that it samples with. ROUNDS says how many of
each kind of run (default 8, and 4 with vLLM)."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.rollouts.segments import by_episode, episode_of, name_of
from agentrl.schemas.trajectory import Role, Termination, Trajectory

KILLS = int(os.environ.get("ROUNDS", "8"))
SMALL = {"iterations": 5, "tasks": 3, "samples": 4, "optimizer": {"lr": 1e-3}, "checkpoint_every": 2}
WAYS = {
    "synchronous": {},
    "one step off": {"max_staleness": 1},
    "ahead, with dynamic sampling": {"ahead": 1, "max_staleness": 3, "algorithm": {"type": "dapo", "resample": 1}},
    "critic": {"ahead": 1, "max_staleness": 2, "algorithm": {"type": "ppo"}},
}


def ran(script: str, folder: Path, *given: Any, timeout: float = 3000) -> Any:
    """What a script beside this one prints last, as JSON; each of what it is given is JSON, too."""
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder), *map(json.dumps, given)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def killed(folder: Path, config: dict[str, Any]) -> list[Path]:
    """The folders of an undisturbed run, and of runs that were killed."""
    kills = ran("online_crash.py", folder, KILLS, 0, config)
    assert sum(kills) == KILLS
    return [folder / "calm", *(folder / f"storm-{number}" for number in range(len(kills)))]


def is_whole(folder: Path, tickets: int, bound: int) -> None:
    """Each ticket is in one batch, no group is late, and no row was made twice."""
    covered = pq.read_table(folder / "out" / "coverage.parquet").to_pylist()
    assert sorted(entry["ticket"] for entry in covered) == list(range(tickets))
    assert max(entry["staleness"] for entry in covered) <= bound
    made = Counter((folder / "made.txt").read_text().split())
    assert not [name for name, times in made.items() if times > 1]
    assert len(pq.read_table(folder / "out" / "trajectories.parquet")) == tickets * SMALL["samples"]


def content(folder: Path) -> dict[str, bytes]:
    """What the stage put out, by name, but for its checkpoints, which pickle in an order of their own."""
    files = [path for path in (folder / "out").rglob("*") if path.is_file() and path.suffix != ".pt"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.ci if WAYS[way].get("ahead") else ()) for way in WAYS]
)
def test_a_run_that_was_killed_equals_one_that_was_not(tmp_path: Path, way: str) -> None:
    calm, *storms = killed(tmp_path, {**SMALL, **WAYS[way]})
    expected = content(calm)
    assert {"out/batches.parquet", "out/steps.parquet", "out/metrics.parquet", "out/coverage.parquet"} <= set(expected)
    oldest = max(row["staleness"] for row in pq.read_table(calm / "out" / "coverage.parquet").to_pylist())
    assert oldest == 0 if way == "synchronous" else oldest > 0
    for storm in storms:
        result = content(storm)
        assert result.keys() == expected.keys()
        assert [name for name in expected if result[name] != expected[name]] == []


@pytest.mark.slow
@pytest.mark.ci
def test_an_asynchronous_run_that_is_killed_makes_no_row_twice_and_drops_none(tmp_path: Path) -> None:
    """What the stage itself asserts before it ends: each ticket in one batch, all its rows in the buffer, none late."""
    engine = {"type": "transformers", "schedule": "free"}
    _, *storms = killed(tmp_path, {**SMALL, "ahead": 1, "max_staleness": 2, "engine": engine})
    for storm in storms:
        is_whole(storm, 15, 2)


@pytest.mark.slow
def test_runs_on_trees_that_were_killed_have_the_trees_of_one_that_was_not(tmp_path: Path) -> None:
    """In step, also rounds of continuations are the same; as rollouts come, no row is made twice and none is lost."""
    trees = {**SMALL, "ahead": 1, "max_staleness": 2, "fork": {"trees": 2, "nodes": 1, "rounds": 1}}
    (tmp_path / "step").mkdir()
    calm, *storms = killed(tmp_path / "step", trees)
    for storm in storms:
        assert content(storm) == content(calm)
    (tmp_path / "free").mkdir()
    for storm in killed(tmp_path / "free", {**trees, "engine": {"type": "transformers", "schedule": "free"}})[1:]:
        is_whole(storm, 15, 2)


@pytest.mark.slow
def test_runs_that_are_killed_in_compressed_episodes_keep_whole_ones(tmp_path: Path) -> None:
    """After a kill the buffer has no episode without all its segments, and the run that goes on counts each once."""
    config = {**SMALL, "compress": {"limit": 76}}
    left = ran("segments_crash.py", tmp_path, config)
    assert {way: set(moments) for way, moments in left.items()} == {
        "sample": {"compressed", "appending", "appended"},
        "online": {"compressed", "appending", "appended"},
        "free": {"compressed", "keeping", "appending", "appended"},
    }
    for way, moments in left.items():
        calm = tmp_path / way / "calm"
        for moment, kills in moments.items():
            storm = tmp_path / way / moment
            episodes = stored(storm)
            for names in kills:
                result = {episode_of(name) for name in names}
                assert sorted(names) == sorted(row.trajectory_id for name in result for row in episodes[name])
            assert way == "free" or content(storm) == content(calm)
            if way != "sample":
                counts_each_once(storm, episodes)
            if way == "free":
                made = Counter((storm / "made.txt").read_text().split())
                assert set(made.values()) == {1}
        halves = [names for kills in moments.values() for names in kills]
        assert any(name != episode_of(name) for names in halves for name in names)


def stored(folder: Path) -> dict[str, list[Trajectory]]:
    """The episodes in a store, of which all are whole: segments without a gap, up to the answer if one was given."""
    buffer = TrajectoryBuffer(folder / "store")
    rows = buffer.get_many(buffer.scan().collect()["trajectory_id"].to_list())
    result = {each[0].episode_id: each for each in by_episode(rows)}
    assert any(len(each) > 1 for each in result.values())
    for name, each in result.items():
        assert [row.trajectory_id for row in each] == [name_of(name, number) for number in range(len(each))]
        if each[0].termination is Termination.ANSWERED:
            ends = each[-1].messages[-1]
            assert ends.role is Role.ASSISTANT
            assert not ends.tool_calls
    return result


def counts_each_once(folder: Path, episodes: dict[str, list[Trajectory]]) -> None:
    """Batches have whole groups, and rewards are compared between episodes, however many rows these have."""
    steps = pq.read_table(folder / "out" / "steps.parquet").to_pylist()
    assert sorted(step["trajectory_id"] for step in steps) == sorted(
        row.trajectory_id for each in episodes.values() for row in each
    )
    covered = pq.read_table(folder / "out" / "coverage.parquet").to_pylist()
    assert sorted(entry["ticket"] for entry in covered) == list(range(SMALL["iterations"] * SMALL["tasks"]))
    assert {entry["rows"] for entry in covered} == {SMALL["samples"]}
    groups: dict[str, list[float]] = {}
    for each in episodes.values():
        groups.setdefault(each[0].group_id or "", []).append(each[0].reward or 0.0)
    for step in steps:
        mine = episodes[episode_of(step["trajectory_id"])]
        rewards = groups[mine[0].group_id or ""]
        assert len(rewards) == SMALL["samples"]
        row = next(row for row in mine if row.trajectory_id == step["trajectory_id"])
        scaled = ((mine[0].reward or 0.0) - np.mean(rewards)) / (np.std(rewards) + 1e-6) if row.n_action_tokens else 0.0
        assert step["advantage"] == pytest.approx(scaled, abs=1e-3)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["folders", "adapters"])
def test_runs_with_servers_of_which_either_is_killed_make_no_row_twice_and_leave_no_server(
    tmp_path: Path, lora: dict[str, int] | None
) -> None:
    rounds = int(os.environ.get("ROUNDS", "4"))
    engine = {"type": "vllm", "dtype": "float32", "python": os.environ["VLLM_PYTHON"], "context": 128}
    config = {**SMALL, "iterations": 8, "ahead": 1, "max_staleness": 2, "engine": engine}
    config["optimizer"] = {"lr": 1e-3, "lora": lora}
    result = ran("online_crash_servers.py", tmp_path, rounds, 0, config, timeout=600 + 240 * rounds)
    assert len(result["victims"]) == rounds
    assert {"run", "server"} == set(result["victims"])
    assert result["left"] == []
    for number in range(result["storms"]):
        is_whole(tmp_path / f"storm-{number}", 24, 2)
