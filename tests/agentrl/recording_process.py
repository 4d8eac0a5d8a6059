"""A recorder in a process of its own, to be killed: ``python recording_process.py FOLDER [TURNS]`` says where it
listens. With TURNS it kills itself after it has written so many turns, before the last one is answered."""

import os
import signal
import sys
import threading
from pathlib import Path

from recording import numbered, policy_for_tests, served

from agentrl.recorder.episode import RecordedEpisode
from agentrl.recorder.tree import SampledTurn


def kill_after(turns: int) -> None:
    write, written = RecordedEpisode.sampled, 0

    def sampled(self: RecordedEpisode, turn: SampledTurn) -> None:
        nonlocal written
        write(self, turn)
        written += 1
        if written == turns:
            os.kill(os.getpid(), signal.SIGKILL)

    RecordedEpisode.sampled = sampled  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[2:]:
        kill_after(int(sys.argv[2]))
    with served(Path(sys.argv[1]), policy_for_tests(), numbered()) as server:
        print(server.url, flush=True)
        threading.Event().wait()
