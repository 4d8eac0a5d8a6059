"""``python -P -m agentrl.flows.flow_run``: Prefect's engine for one flow run in a process pool.

Prefect looks for the flow's module in the working directory first, where a module of the user's may have the name of
one of our packages. So ours are imported before.
"""

import runpy

from agentrl.pipelines.file.library import search_in

if __name__ == "__main__":
    search_in(())
    runpy.run_module("prefect.engine", run_name="__main__")
