"""What orchestration costs: nothing to do, a stage, planning, starting one stage of the quickstart.

Prints one line for each figure: the figure, the target, and `met` or `MISSED`. ``CHECK=1`` turns a miss into exit code
1. ``SCALE=small`` takes under a minute: fewer repeats, no comparison with dvc, no quickstart. dvc is looked for in
``DVC`` (the path of the command), else installed into a folder of its own.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SMALL = os.environ.get("SCALE") == "small"
REPEATS = 2 if SMALL else 5
STAGES = 20
DVC_VERSION = "3.67.1"

STAGE_SOURCE = """
import pyarrow as pa

from agentrl.pipelines.handles import Table
from agentrl.pipelines.stage import Context, StageConfig, stage


class Config(StageConfig):
    value: int = 0


@stage("trivial", version=1)
def trivial(context: Context, config: Config, table: Table | None = None) -> Table:
    return context.table(pa.table({"x": [config.value]}))
"""

TINY_QUICKSTART = """
name: tiny
extends: quickstart
stages:
  tasks: {with: {env: {type: words, unknown: 0}, train: 32, dev: 8, heldout: 16, compositional: 8}}
  warm: {with: {steps: 70, batch: 16}}
  sample: {with: {samples: 4}}
  perfect: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {coverage: 1.0, noise: 0.0}}
  star: {inputs: {trajectories: [reject, perfect]}, with: {steps: 4, batch: 8}}
  sampled: {uses: trajectories.sample, inputs: {model: star, tasks: tasks.train}, with: {samples: 4}}
  pairs: {uses: pairs.agentq, inputs: {trajectories: sampled}}
  dpo: {uses: train.dpo, inputs: {pairs: pairs, model: star}, with: {steps: 4, batch: 4, optimizer: {lr: 1.0e-4}}}
  grpo: {inputs: {model: dpo}, with: {iterations: 3, tasks: 4, samples: 4}}
"""

misses = 0


def figure(name: str, value: float, unit: str, target: float | None = None, at_least: bool = False) -> None:
    """Print one line, and count a miss."""
    global misses
    if target is None:
        print(f"{name:<66} {value:8.3f} {unit:<3}", flush=True)
        return
    met = value >= target if at_least else value <= target
    misses += not met
    sign = ">=" if at_least else "<="
    print(f"{name:<66} {value:8.3f} {unit:<3} target {sign} {target:g} {'met' if met else 'MISSED'}", flush=True)


def chain(stages: int) -> str:
    lines = ["name: chain", "stages:", '  s0: {uses: "trivial_stages:trivial"}']
    lines += [f'  s{n}: {{uses: "trivial_stages:trivial", inputs: {{table: s{n - 1}}}}}' for n in range(1, stages)]
    return "\n".join(lines)


def agentrl(*arguments: str, env: dict[str, str] | None = None) -> float:
    """Seconds of the whole process. Raises if it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(ROOT), **(env or {})}
    return timed([sys.executable, "-m", "agentrl.flows.cli", *arguments], environment)


def timed(command: list[str], env: dict[str, str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    took = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return took


def median(command: list[str] | None = None, *arguments: str) -> float:
    """Median seconds of several runs, after one that is not counted."""
    runs = [timed(command, dict(os.environ)) if command else agentrl(*arguments) for _ in range(REPEATS + 1)]
    return statistics.median(runs[1:])


def orchestration() -> float:
    """Cost of executed stages and of the engine's start. Returns the seconds of a run with nothing to do."""
    Path("chain.yaml").write_text(chain(STAGES))
    Path("one.yaml").write_text(chain(1).replace("name: chain", "name: one"))
    figure("first start of Prefect's own server on a new store (once), 1 stage", _fresh("one.yaml"), "s")
    costs, starts = zip(*(_stages_of_a_run() for _ in range(1 if SMALL else 3)), strict=True)
    figure("start of the engine, on a store that is there: until its first task", statistics.median(starts), "s")
    figure(f"orchestration per executed stage, {STAGES} trivial stages", statistics.median(costs), "s", 0.25)
    nothing = median(None, "run", "chain.yaml", "--store", "store", "--set", f"seed={_again.seed}")
    figure(f"nothing to do, {STAGES} stages, whole process", nothing, "s", 1.5)
    return nothing


def _stages_of_a_run(file: str = "chain.yaml", env: dict[str, str] | None = None) -> tuple[float, float]:
    """Seconds per stage, from the second to the last, and seconds from the command to the second.

    The first stage works while Prefect starts, so the second is the first that waits for it.
    """
    began = time.time()
    _again(file, env)
    record = json.loads(max(Path("store/runs").glob("*.json")).read_text())
    starts = [datetime.fromisoformat(stage["started_at"]).timestamp() for stage in record["stages"].values()]
    return (starts[-1] - starts[1]) / max(1, len(starts) - 2), starts[1] - began


def _fresh(file: str) -> float:
    shutil.rmtree("store", ignore_errors=True)
    return agentrl("run", file, "--prefect", "--store", "store")


def _again(file: str, env: dict[str, str] | None = None) -> float:
    """Seconds of a run of every stage on an existing store; a new seed makes all stages run."""
    _again.seed += 1
    return agentrl("run", file, "--prefect", "--store", "store", "--set", f"seed={_again.seed}", env=env)


_again.seed = 0  # type: ignore[attr-defined]


def cpu() -> None:
    """CPU seconds of a run of one trivial stage, with all processes that it starts and waits for."""
    Path("one.yaml").write_text(chain(1).replace("name: chain", "name: one"))
    result: dict[str, list[float]] = {"--prefect": [], "--no-prefect": []}
    for number in range(REPEATS + 1):
        for option, seconds in result.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            agentrl("run", "one.yaml", option, "--store", "cpu", "--set", f"seed={10 * number + len(option)}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    with_prefect, without = (statistics.median(seconds[1:]) for seconds in result.values())
    figure("CPU seconds of a run of one trivial stage, with Prefect", with_prefect, "s")
    figure("CPU seconds of the same run, which needs no Prefect", without, "s", 5.0)


@contextmanager
def prefect_server() -> Iterator[str]:
    """A Prefect server that is already running, as a team would have one."""
    import socket
    from urllib.request import urlopen

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    env = {**os.environ, "PREFECT_HOME": str(Path("server").absolute()), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(port), "--no-ui"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def running_server() -> None:
    Path("two.yaml").write_text(chain(2).replace("name: chain", "name: two"))
    with prefect_server() as url:
        env = {"PREFECT_API_URL": url}
        _again("two.yaml", env)
        starts = [_stages_of_a_run("two.yaml", env)[1] for _ in range(REPEATS)]
    figure("start of the engine with a running server: until its first task", statistics.median(starts), "s", 3.0)


def planning() -> None:
    Path("big.yaml").write_text(chain(200))
    figure("planning 200 stages, whole process", median(None, "plan", "big.yaml", "--store", "store"), "s", 2.0)


def against_dvc(nothing: float) -> None:
    """``dvc repro`` with nothing to do on an equivalent file: 20 stages in a chain, each reading the one before."""
    folder = Path("dvc-project")
    folder.mkdir()
    stages: dict[str, Any] = {"s0": {"cmd": "echo 0 > s0.txt", "outs": ["s0.txt"]}}
    for n in range(1, STAGES):
        command, before = f"cp s{n - 1}.txt s{n}.txt", f"s{n - 1}.txt"
        stages[f"s{n}"] = {"cmd": command, "deps": [before], "outs": [f"s{n}.txt"]}
    (folder / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    dvc = [_dvc(), "--cd", str(folder)]
    env = {**os.environ, "DVC_NO_ANALYTICS": "1"}
    timed([*dvc, "init", "--no-scm"], env)
    timed([*dvc, "repro"], env)
    took = median([*dvc, "repro"])
    figure(f"dvc {DVC_VERSION} repro with nothing to do, {STAGES} stages", took, "s")
    figure("dvc's time over ours", took / nothing, "x", 1.0, at_least=True)


def _dvc() -> str:
    if "DVC" in os.environ:
        return os.environ["DVC"]
    folder = ROOT / ".venv-dvc"
    if not (folder / "bin" / "dvc").exists():
        print(f"installing dvc {DVC_VERSION} into {folder.name} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", f"dvc=={DVC_VERSION}"], check=True)
    return str(folder / "bin" / "dvc")


def quickstart() -> None:
    """Re-run dpo alone with a new beta: how soon its function begins, and what else is touched."""
    Path("tiny.yaml").write_text(TINY_QUICKSTART)
    agentrl("run", "tiny.yaml", "--store", "quickstart")
    nothing = median(None, "run", "tiny.yaml", "--store", "quickstart")
    figure("quickstart (smallest sizes): nothing to do, whole process", nothing, "s", 1.5)
    before = {path: path.stat().st_mtime_ns for path in Path("quickstart/artifacts").rglob("*") if path.is_file()}
    started = time.time()
    agentrl("run", "tiny.yaml", "--store", "quickstart", "--only", "dpo", "--set", "stages.dpo.with.beta=0.3")
    after = {path: path.stat().st_mtime_ns for path in Path("quickstart/artifacts").rglob("*") if path.is_file()}
    [new] = {path.parent for path in after.keys() - before.keys() if path.name == "manifest.json"}
    manifest = json.loads((new / "manifest.json").read_text())
    began = datetime.fromisoformat(manifest["created_at"]).timestamp() - manifest["duration_s"] - started
    figure("quickstart: --only dpo with a new beta, until the stage begins", began, "s", 5.0)
    touched = {path.parts[2] for path in after if before.get(path) != after[path]} - {"dpo"}
    figure("quickstart: other stages touched by that", len(touched), "", 0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, an editable install is compiled by every command
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start", flush=True)
        figure("agentrl --help", median(None, "--help"), "s", 0.5)
        Path("trivial_stages.py").write_text(STAGE_SOURCE)
        nothing = orchestration()
        cpu()
        running_server()
        planning()
        if not SMALL:
            against_dvc(nothing)
            quickstart()
        os.chdir(ROOT)
    if misses:
        print(f"{misses} MISSED")
    sys.exit(bool(misses) and os.environ.get("CHECK") == "1")


if __name__ == "__main__":
    main()
