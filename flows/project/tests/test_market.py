from environments.market import Market

from agentrl import demonstrate, load


def test_the_expert_is_right_without_noise() -> None:
    market = Market()
    [task] = market.tasks({"train": 1}, seed=0)["train"]
    row = demonstrate(market, task, noise=0.0, seed=0, trajectory_id="t")
    assert (row.success, row.n_tool_calls) == (True, 2)


def test_the_pipeline_is_valid() -> None:
    assert "warm" in load("pipeline.yaml").stages
