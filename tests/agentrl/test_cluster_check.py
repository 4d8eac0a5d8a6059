"""`agentrl check-cluster`. There is no second machine here: those of a Slurm allocation are all this one."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_machines import fake_slurm

from agentrl.placement.local import KeptPort
from agentrl.schemas.pipeline import Execution, SlurmLauncher, TimeLimits
from agentrl.training.cluster_check import ClusterCheck, ClusterFinding, _Machine
from agentrl.training.cluster_probe import SAYS, listen, locks, unreached, versions

PIPELINE = """
name: p
execution: {launcher: {type: slurm}, ENV}
stages:
  tasks: {uses: tasks.generate, with: {env: words, train: 8, dev: 0, heldout: 0}}
"""


class Ended:
    """A probe that has ended."""

    def __init__(self, address: str) -> None:
        self.address = address

    def poll(self) -> int:
        return 0

    def stop(self) -> None:
        pass


class TwoMachines:
    nodes, gpus = 2, 0


def judged(tmp_path: Path, *machines: tuple[str, dict[str, Any]], told: float = 100.0) -> dict[str, ClusterFinding]:
    """The findings that are not ok, by check; of equal ones the last."""
    check = ClusterCheck(Execution(gpus=1), tmp_path)
    check.folder.mkdir(parents=True)
    for number, (address, answers) in enumerate(machines):
        (log := tmp_path / f"{number}.log").write_text("no module named agentrl\n")
        check._machines.append(_Machine(Ended(address), log, answers, dict.fromkeys(answers, told + 1)))  # type: ignore[arg-type]
        (check.folder / f"from-{number}").touch()
    findings = check._judged(TwoMachines(), told)  # type: ignore[arg-type]
    return {finding.check: finding for finding in findings if finding.verdict != "ok"}


def answers(**changes: Any) -> dict[str, Any]:
    free = dict.fromkeys(("folder", "temporary", "models"), 2**40)
    gpu = {"name": "H100", "memory": 80 * 2**30}
    about = {"host": "gpu-1", "versions": versions(), "free": free}
    return {"about": about, "seen": 100.5, "unreached": {}, "gpus": [gpu], "summed": 1e9} | changes


def test_machines_that_are_as_they_should_be_have_no_finding(tmp_path: Path) -> None:
    assert judged(tmp_path, ("10.0.0.1:1", answers()), ("10.0.0.2:1", answers())) == {}


@pytest.mark.parametrize(
    ("check", "verdict", "evidence", "address", "changes"),
    [
        ("address", "wrong", "others reach no machine at this address", "127.0.0.1:1", {}),
        ("clock", "warning", "at least 99 s", "10.0.0.2:1", {"seen": 200.0}),
        ("reach", "wrong", "connect to 10.0.0.1:1: no", "10.0.0.2:1", {"unreached": {"10.0.0.1:1": "no"}}),
        ("devices", "wrong", "no GPU; execution.gpus is 1", "10.0.0.2:1", {"gpus": []}),
        ("probe", "wrong", "RendezvousError: no way", "10.0.0.2:1", {"failed": "RendezvousError: no way"}),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_machine_is_named(
    tmp_path: Path, check: str, verdict: str, evidence: str, address: str, changes: dict[str, Any]
) -> None:
    findings = judged(tmp_path, ("10.0.0.1:1", answers()), (address, answers(**changes)))
    assert list(findings) == [check]
    assert (findings[check].verdict, findings[check].where) == (verdict, f"gpu-1 ({address[:-2]})")
    assert evidence in findings[check].evidence
    assert findings[check].remedy


def test_versions_that_differ_are_wrong_where_ranks_must_be_equal(tmp_path: Path) -> None:
    about = answers()["about"]
    other = {**about, "versions": {**versions(), "torch": "2.0", "numpy": "1.0"}}
    findings = judged(tmp_path, ("10.0.0.1:1", answers()), ("10.0.0.2:1", answers(about=other)))
    assert {name: finding.verdict for name, finding in findings.items()} == {"torch": "wrong", "numpy": "warning"}
    assert "2.0 on gpu-1 (10.0.0.2)" in findings["torch"].evidence


def test_a_machine_on_which_the_probe_does_not_start_is_named_with_what_it_printed(tmp_path: Path) -> None:
    findings = judged(tmp_path, ("10.0.0.1:1", answers()), ("10.0.0.2:1", {}))
    assert findings["start"].evidence == "no module named agentrl"


def test_a_port_is_connected_to_only_if_somebody_listens(tmp_path: Path) -> None:
    port, silent = KeptPort(), KeptPort()
    listen(port.number)
    addresses = [f"127.0.0.1:{kept.number}" for kept in (port, silent)]
    assert list(unreached(addresses)) == addresses[1:]
    assert locks(tmp_path / "lock") == ""
    assert "No such file" in locks(tmp_path / "nowhere" / "lock")


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    about = ["--node", "0", "--nodes", "2", "--limit-s", "0.2", "--host", "127.0.0.1", "--port", str(KeptPort().number)]
    command = [sys.executable, "-m", "agentrl.training.cluster_probe", *about, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line[len(SAYS) :]) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert [each["check"] for each in lines] == ["about", "failed"]
    assert f"no file of the stage's machine was seen in {tmp_path}" in lines[1]["answer"]


def check_cluster(folder: Path, env: str) -> tuple[int, dict[str, dict[str, Any]]]:
    (folder / "p.yaml").write_text(PIPELINE.replace("ENV", env))
    command = [sys.executable, "-m", "agentrl.flows.cli", "check-cluster", "p.yaml", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    [machines] = json.loads(done.stdout)["machines"]
    return done.returncode, {finding["check"]: finding for finding in machines["findings"]}


@pytest.mark.slow
@pytest.mark.ci
def test_an_interface_that_no_machine_has_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm(tmp_path / "bin", monkeypatch)
    code, findings = check_cluster(tmp_path, "env: {GLOO_SOCKET_IFNAME: nowhere0}")
    assert code == 1
    assert "GLOO_SOCKET_IFNAME is nowhere0" in findings["start"]["evidence"]


@pytest.mark.slow
@pytest.mark.ci
def test_two_machines_are_checked_within_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm(tmp_path / "bin", monkeypatch)
    began = time.monotonic()
    code, findings = check_cluster(tmp_path, "limits: {heartbeat_s: 60}")
    assert time.monotonic() - began < 60
    assert code == 0, findings
    assert {finding["verdict"] for name, finding in findings.items() if name != "disk"} == {"ok"}
    assert "64 MiB over 2 machines" in findings["sum"]["evidence"]
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_a_machine_that_ends_at_once_is_no_reason_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = fake_slurm(tmp_path / "bin", monkeypatch)
    (called.parent / "srun").write_text("#!/bin/sh\necho 'srun: error: Node gpu-1 is down' >&2; exit 1\n")
    execution = Execution(launcher=SlurmLauncher(), limits=TimeLimits(heartbeat_s=60))
    findings = list(ClusterCheck(execution, tmp_path / "tmp").findings())
    assert [(finding.check, finding.verdict) for finding in findings] == [("locks", "ok"), ("start", "wrong")]
    assert "Node gpu-1 is down" in findings[1].evidence
