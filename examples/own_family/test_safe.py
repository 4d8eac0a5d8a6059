from my_family.safe import SafeConfig, Safes

from agentrl.environments.faults import Faults
from agentrl.rollouts.demonstrations import demonstrate


def test_the_expert_opens_every_safe_also_if_tools_fail() -> None:
    for config in (SafeConfig(), SafeConfig(lowest=100, faults=Faults(server_error=0.2))):
        safes = Safes(config)
        rows = [demonstrate(safes, task, 0.0, 0, "t") for task in safes.tasks({"train": 60}, seed=1)["train"]]
        assert all(row.success for row in rows)
        assert (sum(row.n_tool_errors for row in rows) > 0) == bool(config.faults)


def test_splits_share_no_safe() -> None:
    splits = Safes().tasks({"train": 200, "heldout": 50}, seed=0)
    safes = [{(task.prompt, task.ground_truth) for task in rows} for rows in splits.values()]
    assert not safes[0] & safes[1]
