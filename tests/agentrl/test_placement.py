"""Launchers: the same commands on this machine and over ssh. There is no second machine here: `ssh` is a script that
runs its command on this one, with hardly any environment."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_machines import fake_gpus, fake_ssh

from agentrl.placement.addresses import own_address
from agentrl.placement.base import Launcher, LaunchError, Process
from agentrl.placement.connected import Machine, Machines
from agentrl.placement.devices import Devices, memory_gib, visible
from agentrl.placement.hostfile import Ssh, read_hosts
from agentrl.placement.launcher import here, placed, temporary
from agentrl.placement.local import Local
from agentrl.schemas.pipeline import Execution

SAYS = "import os, sys; print(sys.argv[1:], os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('WORD'))"
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{FAMILY}"
"""Drops a SIGTERM, as a vLLM server does while it starts; its child does not."""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fake_ssh(tmp_path / "bin", monkeypatch)


def ended(process: Process) -> int:
    until = time.monotonic() + 20
    while (code := process.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    return code


def child_of(log: Path) -> psutil.Process:
    until = time.monotonic() + 20
    while "child" not in (log_text := log.read_text() if log.exists() else ""):
        assert time.monotonic() < until, log_text
        time.sleep(0.02)
    return psutil.Process(int(log_text.partition("child ")[2].split()[0]))


def is_gone(process: psutil.Process) -> bool:
    until = time.monotonic() + 20
    with contextlib.suppress(psutil.NoSuchProcess):  # it may go between the two questions
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
    return True


def over_ssh(hosts: list[Machine] | None = None) -> Machines:
    return Machines(Ssh(), hosts or [Machine("one", 4), Machine("me@two", 4)], {"WORD": "said"}, 60.0)


@pytest.mark.parametrize("kind", ["local", "hostfile"])
def test_a_command_is_started_with_its_address_its_gpus_and_its_environment(
    kind: str, tmp_path: Path, ssh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(tmp_path / "bin", 4, monkeypatch)
    monkeypatch.setenv("SECRET", "stays here")
    launcher: Launcher = Local() if kind == "local" else over_ssh()
    log = tmp_path / "log"
    command = [sys.executable, "-c", SAYS, "{host}", "--port", "{port}", "with 'quotes' $HOME"]
    env = {"WORD": "a word"} if kind == "local" else {}
    process = launcher.start("server", command, log=log, gpus=2, env=env)
    assert ended(process) == 0, log.read_text()
    host, port = process.address.split(":")
    assert host == ("127.0.0.1" if kind == "local" else own_address())
    word = "a word" if kind == "local" else "said"
    given = [host, "--port", port, "with 'quotes' $HOME"]
    assert f"{given} 2,3 {word}" in log.read_text()
    assert ssh.exists() == (kind == "hostfile")
    launcher.close()


@pytest.mark.parametrize("kind", ["local", "hostfile"])
def test_what_is_stopped_takes_its_children_with_it(kind: str, tmp_path: Path, ssh: Path) -> None:
    launcher: Launcher = Local() if kind == "local" else over_ssh()
    process = launcher.start("server", [sys.executable, "-c", FAMILY], log=tmp_path / "log")
    child = child_of(tmp_path / "log")
    assert process.poll() is None
    launcher.close()
    assert process.poll() is not None
    assert is_gone(child)


STARTS = """
import sys
from pathlib import Path
from agentrl.placement import watch
from agentrl.placement.launcher import here, placed
from agentrl.schemas.pipeline import Execution

watch.STOP_S = 0.3
kind, folder = sys.argv[1], Path(sys.argv[2])
execution = Execution(launcher=kind, hostfile=str(folder / "hosts") if kind == "hostfile" else None)
with placed(execution):
    here().start("server", [sys.executable, "-c", sys.argv[3]], log=folder / "log")
    sys.stdin.read()
"""


@pytest.mark.parametrize(("kind", "family"), [("local", FAMILY), ("local", STUBBORN), ("hostfile", FAMILY)])
def test_a_stage_that_is_killed_leaves_nothing_running(kind: str, family: str, tmp_path: Path, ssh: Path) -> None:
    (tmp_path / "hosts").write_text("one slots=0\n")
    command = [sys.executable, "-c", STARTS, kind, str(tmp_path), family]
    stage = subprocess.Popen(command, stdin=subprocess.PIPE)
    child = child_of(tmp_path / "log")
    leader = child.parent()
    assert leader is not None
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    assert is_gone(leader)
    assert is_gone(child)


def test_folders_of_a_stage_that_was_killed_are_removed_by_its_next_try(tmp_path: Path) -> None:
    left = tmp_path / "started" / "agentrl-vllm-killed"
    left.mkdir(parents=True)
    with placed(Execution(), tmp_path / "started"):
        assert not left.exists()
        made = temporary("vllm")
        assert made.parent == tmp_path / "started"
        assert temporary("vllm") != made
    assert list(tmp_path.iterdir()) == []
    outside = temporary("vllm")
    assert tmp_path not in outside.parents
    outside.rmdir()


def test_processes_are_spread_over_machines_and_gpus_come_back(tmp_path: Path, ssh: Path) -> None:
    launcher = over_ssh()
    started = [launcher.start("server", ["sleep", "60"], log=tmp_path / str(n), gpus=2) for n in range(4)]
    assert ssh.read_text().split() == ["one", "me@two", "one", "me@two"]
    with pytest.raises(LaunchError, match=r"the server needs 1 GPUs of one machine, and 0 of 4, 0 of 4 are left"):
        launcher.start("server", ["sleep", "60"], log=tmp_path / "more", gpus=1)
    started[0].stop()
    launcher.start("server", ["sleep", "60"], log=tmp_path / "more", gpus=1)
    assert ssh.read_text().split()[-1] == "one"
    launcher.close()


def test_a_machine_that_does_not_answer_is_named_with_what_ssh_says(tmp_path: Path, ssh: Path) -> None:
    launcher = over_ssh([Machine("gone", 1)])
    with pytest.raises(
        LaunchError, match=r"the ranks cannot be started: ssh gone ended with 1; try: ssh .* gone true; .*refused"
    ):
        launcher.start("ranks", ["true"], log=tmp_path / "log", gpus=1)
    assert launcher._devices.free == [["0"]], "its GPU is left for another try"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one\n", r"line 1: 'one' is not 'name slots=N'"),
        ("# ours\none slots=8\none slots=8\n", "line 3: one is named twice"),
        ("-oProxyCommand=evil slots=1\n", "line 1"),
        ("one slots=8\n", r"has 1 machines, and execution.nodes is 2"),
        ("one slots=8\ntwo slots=2\n", "fewer than execution.gpus = 4 slots for two"),
    ],
)
def test_a_hostfile_that_cannot_be_used_is_refused_with_its_line(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(LaunchError, match=reason):
        read_hosts(tmp_path / "hosts", nodes=2, gpus=4)
    (tmp_path / "hosts").write_text("one slots=8 # the first\n\nme@two slots = 4\nthree slots=4\n")
    assert read_hosts(tmp_path / "hosts", nodes=2, gpus=4) == [Machine("one", 4), Machine("me@two", 4)]


def test_visible_gpus_are_those_of_the_environment_else_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(tmp_path / "bin", 3, monkeypatch)
    assert visible() == ["0", "1", "2"]
    assert memory_gib() == pytest.approx(79.6, abs=0.1)
    for text, names in (("2,0", ["2", "0"]), ("", []), ("1,-1,2", ["1"]), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])):
        assert visible({**os.environ, "CUDA_VISIBLE_DEVICES": text}) == names
    devices = Devices([visible()])
    assert devices.take("server", 2) == (0, ["1", "2"]), "the first is left for the stage itself"


def test_a_launcher_is_that_of_the_stage_and_external_starts_nothing(tmp_path: Path) -> None:
    outside = here()
    assert isinstance(outside, Local)
    says = "external starts no vLLM server; name those that run in engine[.]urls"
    with placed(Execution(launcher="external")), pytest.raises(LaunchError, match=says):
        here().start("vLLM server", ["true"], log=tmp_path / "log")
    assert here() is outside


@pytest.mark.slow
def test_ranks_on_two_machines_of_a_hostfile_train_as_one_process(tmp_path: Path, ssh: Path) -> None:
    pytest.importorskip("deepspeed")
    from test_placement_ray import assert_it_trains_alike

    (tmp_path / "hosts").write_text("localhost slots=0\nme@127.0.0.1 slots=0\n")
    assert_it_trains_alike(tmp_path, f"launcher: hostfile, hostfile: {tmp_path / 'hosts'}")
    assert set(ssh.read_text().split()) == {"localhost", "me@127.0.0.1"}
