"""The flow that workers of a Prefect work pool run for a shard. Importing this imports Prefect."""

from pathlib import Path

from prefect import flow

from agentrl.datastore.shards.worker import from_folder
from agentrl.schemas.installation import leave_checkout


@flow(name="agentrl shards", validate_parameters=False, persist_result=False, retries=0)
def run_shard(folder: str, number: int) -> None:
    """Raises RuntimeError if the shard failed, so that Prefect says so too."""
    leave_checkout()
    ending = from_folder(Path(folder), number)
    if ending.problem is not None:
        raise RuntimeError(ending.problem)
