from random import Random

from my_shop.shop import Shop

from agentrl.rollouts.demonstrations import demonstrate


def test_the_expert_is_right_without_noise() -> None:
    for shop in (Shop(), Shop(dearest=2)):
        [task] = shop.tasks({"train": 1}, seed=0)["train"]
        row = demonstrate(shop, task, noise=0.0, seed=0, trajectory_id="t")
        assert (row.success, row.reward, row.n_tool_calls) == (True, 1.1, 2)


def test_splits_share_no_question() -> None:
    splits = Shop().tasks({"train": 50, "heldout": 50}, seed=Random(0).randrange(9))
    assert not {task.prompt for task in splits["train"]} & {task.prompt for task in splits["heldout"]}
