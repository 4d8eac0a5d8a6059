"""A pipeline on a store in a bucket: stages that append rows, caching, racing, tidying up."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_project import Project

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PIPELINE = """
    name: remote
    stages:
      tasks: {uses: tasks.generate, with: {env: lookup, train: 16, dev: 4, heldout: 4}}
      expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {coverage: 1.0, noise: 0.5}}
      kept: {uses: trajectories.reject, inputs: {trajectories: expert}, with: {keep: 1}}
      slow: {uses: "toy:trouble", inputs: {table: a}, with: {sleep: 1}}
      a: {uses: "toy:numbers"}
"""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }.items():
        monkeypatch.setenv(name, value)
    import boto3

    for _ in range(100):
        try:
            boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
            break
        except Exception:
            time.sleep(0.1)
    yield "s3://bucket/team"
    process.terminate()
    process.wait()


def start(store: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "agentrl.flows.cli", *arguments, "--store", store]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def agentrl(store: str, *arguments: str) -> str:
    process = start(store, *arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return out


@pytest.mark.ci
def test_a_pipeline_lives_in_a_bucket(project: Project, bucket: str) -> None:
    project.write(PIPELINE)
    both = [start(bucket, "run", "pipeline.yaml", "--no-prefect", "--json") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    records = [json.loads(out) for out, _ in outputs]
    for name in ("tasks", "expert", "kept", "a", "slow"):
        assert sorted(record["stages"][name]["status"] for record in records) == ["ran", "reused"]
    assert "everything is up to date, 5 stages cached" in agentrl(bucket, "run", "pipeline.yaml")
    assert json.loads(agentrl(bucket, "show", "kept", "--json"))["outputs"]["trajectories"]["rows"] > 0
    rows = agentrl(
        bucket, "buffer", "query", "select count(*) as n, count(distinct trajectory_id) as ids from trajectories"
    )
    assert rows.count("16") == 2
    code = "import sys; from agentrl.datastore import Catalog; print(len(list(Catalog(sys.argv[1]).all())))"
    assert subprocess.check_output([sys.executable, "-c", code, bucket], text=True).strip() == "5"
    assert not any(path.name == "artifacts" for path in project.folder.iterdir())
    agentrl(bucket, "run", "pipeline.yaml", "--no-prefect", "--set", "stages.a.with.n=4")
    freed = json.loads(agentrl(bucket, "gc", "--keep-runs", "1", "--json"))
    assert sorted(item["stage"] for item in freed["artifacts"]) == ["a", "slow"]


def test_a_run_with_prefect_on_a_bucket(project: Project, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write(PIPELINE)
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    record = json.loads(agentrl(bucket, "run", "pipeline.yaml", "--json", "--jobs", "2"))
    assert {stage["status"] for stage in record["stages"].values()} == {"ran"}
    assert Path(record["stages"]["slow"]["log"]).exists()
