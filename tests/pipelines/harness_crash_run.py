"""A run whose stages work in worker processes with guards, as those of `agentrl run`, to be killed.

    python harness_crash_run.py PIPELINE

runs what is left to run of a pipeline file. A stage whose worker is killed begins again, as with ``retries``.
"""

import sys
from pathlib import Path

from own_classes import planned

from agentrl.pipelines.run.execute import job_of
from agentrl.pipelines.run.worker import StageError, Workers


def main() -> None:
    path = Path(sys.argv[1])
    plan = planned(path)
    workers = Workers(lambda *_: None)
    for step in plan.to_run:
        job = job_of(step, plan, "r")
        log = path.parent / "logs" / f"{job.stage}.log"
        done = False
        while not done:
            try:
                workers.run(job, log)
                done = True
            except StageError as error:
                if "signal 9" not in error.cause:
                    raise
    workers.close()


if __name__ == "__main__":
    main()
