"""An online stage that samples with a vLLM server. Either of them is killed at random moments while it samples.

    python online_crash_servers.py FOLDER KILLS SEED CONFIG

runs the stage in FOLDER/storm-0, storm-1, ... until KILLS kills were made, in turns of the run, which then begins
again, and of its server, which it has to start again itself. Prints, as JSON, whom it killed, the number of storms, and
the processes that were left behind.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
from online_crash import forked, inputs, run


def main() -> None:
    folder, kills, seed, config = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    assert os.waitpid(forked(lambda: inputs(folder)), 0)[1] == 0
    moments, victims, left, storms = random.Random(seed), list[str](), list[str](), 0
    while len(victims) < kills:
        storm = folder / f"storm-{storms}"
        storms += 1
        storm.mkdir()
        ended = False
        while not ended:
            child = forked(lambda storm=storm: run(folder, storm, config))  # type: ignore[misc]
            started = psutil.Process(child)
            ended = True
            while len(victims) < kills and sampled(child, storm / "made.txt", moments.randint(1, 16)):
                time.sleep(moments.uniform(0, 0.2))
                victim = ("run", "server")[len(victims) % 2]
                below = started.children(recursive=True)
                servers = [process for process in below if "vllm" in " ".join(process.cmdline()).lower()]
                if not servers:
                    continue
                for process in [started] if victim == "run" else servers:
                    process.send_signal(signal.SIGKILL)
                victims.append(victim)
                if victim == "run":
                    os.waitpid(child, 0)
                    left += alive(below)
                    ended = False
                    break
            else:
                below = started.children(recursive=True)
                status = os.waitpid(child, 0)[1]
                if status:
                    sys.exit(f"a run failed: {status}")
                left += alive(below)
    print(json.dumps({"victims": victims, "storms": storms, "left": left}))


def sampled(child: int, made: Path, more: int) -> bool:
    """Wait until so many more rows are made. False if the run ends before."""
    wanted = lines(made) + more
    while lines(made) < wanted:
        if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.005)
    return True


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def alive(processes: list[psutil.Process]) -> list[str]:
    """Those that do not end within half a minute."""
    _, result = psutil.wait_procs(processes, timeout=30)
    return [str(item) for item in result if item.is_running() and item.status() != psutil.STATUS_ZOMBIE]


if __name__ == "__main__":
    main()
